"""Loader nodes: a pair of experts, a single model, LoRAs; native models of any family."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar, get_args

from ..devices import AUTO, dtype_name
from ..host import WEIGHT_DTYPES, ModelStreaming, ShareVisits, current_host, io, search_aliases
from ..plan import ArithmeticChoice, AutoOffload
from ..schema import LARGEST_STRENGTH, ExpertsRef, KernelSet, LoraRef, Notice, OffloadPolicy, parse_step_strengths
from ..wan import (
    ARITHMETIC_CHOICES,
    ATTENTIONS,
    STORAGES,
    ExpertPair,
    choose_multiplication,
    expert_mismatches,
    lora_mismatches,
    measured_arithmetic,
)
from . import sockets
from .inputs import show_notices
from .runs.file_checks import (
    EXPERT_FOLDERS,
    LORA_FOLDERS,
    MODEL_FOLDERS,
    NONE,
    SAME_FOLDER,
    check_experts,
    check_lora,
    check_native_model,
    check_single_model,
)
from .runs.file_node import FileNode

DTYPES = {AUTO: AUTO, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "compute_dtype",
        options=list(DTYPES),
        default=AUTO,
        tooltip="Dtype in which the blocks compute, independent of the file. auto: bf16 if the device has units for "
        "it, else fp16, else fp32, as on most CPUs. bf16 and fp16: 0.70 GB per buffer; a CPU without bf16 units "
        "takes three to five times as long as in fp32. fp32: twice the memory, and on a GPU at least twice the "
        "time.",
    ),
    io.Combo.Input(
        "storage",
        options=list(STORAGES),
        default="as stored",
        optional=True,
        tooltip="Format of blocks in RAM and on the bus. fp8 and int8 ConvRot quantise a bf16, fp16 or fp32 file while "
        "it is read: half the RAM and bus bytes of bf16, as many bytes from disk, and an error per weight of 2.7 % "
        "(fp8, 0.3 s of one core per block) or 0.85 % (int8 ConvRot, 0.6 s). int8 ConvRot also takes fp8 files; "
        "other quantised matrices are not changed.",
    ),
    io.Combo.Input(
        "attention",
        options=list(ATTENTIONS),
        default="default",
        optional=True,
        tooltip="Kernel for attention, which takes most of the time of a long video. default: the choice of "
        "diffusers, torch's own sdpa. The others need a GPU and bf16 or fp16 (xformers and int8 also fp32), and all "
        "but cudnn a package of that name: int8 is that of comfy-kitchen, which ComfyUI installs. Results differ in "
        "rounding; sage and int8 also compute in 8 bits, which costs some precision.",
    ),
    io.Boolean.Input(
        "compile",
        default=False,
        optional=True,
        tooltip="Compile the blocks with torch.compile for faster steps. The first step after a start is slow, and so "
        "is that of a second video size, but not of the other expert, another LoRA or another run. Results differ "
        "in the last digits. Needs Triton on a GPU, a C++ compiler on a CPU.",
    ),
    io.Combo.Input(
        "arithmetic",
        options=list(ARITHMETIC_CHOICES),
        default="decoded",
        optional=True,
        tooltip="Arithmetic for matrices in int8 and fp8, stored so in the file or by `storage`. decoded: they become "
        "compute_dtype on arrival. as stored: they are multiplied as they are: half the memory of buffers and "
        "resident blocks. auto: as stored if a block is then at least 5 % faster on this GPU, which is measured "
        "once in about a second; always decoded on a CPU. On an H100 fp8 takes 0.68 to 0.83 of the time of bf16, int8 "
        "as long with comfy-kitchen and three times as long without it. Tokens are rounded to the same format, which "
        "costs little precision in int8 ConvRot and more in int8 and fp8. int8 by comfy-kitchen where its CUDA "
        "kernels are active, else by torch, slow on a CPU; fp8 by torch, on NVIDIA from the RTX 40 series on. The node "
        "shows what is used, and why.",
    ),
    io.Combo.Input(
        "kernels",
        options=list(get_args(KernelSet)),
        default="auto",
        optional=True,
        tooltip="Kernels for norms, residuals and the rotary embedding. auto: triton on a GPU where its test passes, "
        "else torch; the log names it. exact: the order and dtypes of diffusers, to its bits; a step of a short video "
        "then takes 1.35 times as long on an H100. The others differ from it in rounding. triton needs a C compiler, "
        "comfy-kitchen the package of that name.",
    ),
)
"""Inputs of every loader of experts."""

logger = logging.getLogger("wanstream.nodes")


class WanStreamExperts(FileNode):
    """Reference to a high-noise and a low-noise expert that were checked to be a pair."""

    FILES: ClassVar = {"high_noise": EXPERT_FOLDERS, "low_noise": EXPERT_FOLDERS}
    LISTED_INPUTS = ("high_noise", "low_noise")

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = current_host().model_names(*EXPERT_FOLDERS)
        return io.Schema(
            node_id="WanStreamExperts",
            display_name="Wan Experts (streamed)",
            category="WanStream/loaders",
            **search_aliases(
                *("moe", "high noise", "low noise", "load diffusion model", "unet", "gguf", "fp8", "a14b", "wan 2.2"),
                *("sage attention", "torch compile"),
            ),
            description="Opens the two experts of Wan2.2 A14B. Only headers are read: weights move when a step needs "
            "them.",
            inputs=[
                io.Combo.Input(
                    "high_noise",
                    options=names,
                    tooltip="The expert of the early, noisy steps: a .safetensors or .gguf file of diffusion_models, "
                    "or a folder of diffusers. Read per step if all blocks stream: 28 GB in bf16 and fp16, 15 GB "
                    "in Q8_0, 14 GB in fp8, 8 GB in Q4_K. Device memory is the same for all.",
                ),
                io.Combo.Input(
                    "low_noise",
                    options=[SAME_FOLDER, *names],
                    default=SAME_FOLDER,
                    tooltip="The expert of the later steps. A diffusers pipeline folder chosen as high_noise has both.",
                ),
                *MODEL_INPUTS,
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(cls, high_noise: str | None = None, low_noise: str | None = None) -> bool:
        check_experts(high_noise, low_noise)
        return True

    @classmethod
    def execute(cls, high_noise: str, low_noise: str, compute_dtype: str, **settings: Any) -> io.NodeOutput:
        ref = ExpertsRef(
            high_noise=current_host().model_path(high_noise, *EXPERT_FOLDERS),
            low_noise=None if low_noise == SAME_FOLDER else current_host().model_path(low_noise, *EXPERT_FOLDERS),
            compute_dtype=DTYPES[compute_dtype],
            **settings,
        )
        pair = open_here(ref)
        found = [*expert_mismatches(pair.high, pair.low), *_opened_notices(ref, pair)]
        return io.NodeOutput(ref, ui=show_notices(*found, high_noise=high_noise, low_noise=low_noise) or None)


def open_here(ref: ExpertsRef) -> ExpertPair:
    """Open the experts in this process, and log the dtype that `compute_dtype` auto gives here.

    A loader opens them, and not the sampler, so that a bad file or a missing package is reported on the loader. The
    host keeps the pair open for the sampler.
    """
    host = current_host()
    with host.ledger().phase("open", host.device()):
        pair = host.experts(ref)
    # `ref` itself keeps "auto": workers agree on a dtype that is fast on the devices of all of them.
    if ref.compute_dtype == AUTO:
        dtype = dtype_name(pair.compute_dtype)
        logger.info("compute_dtype auto: the blocks compute in %s on %s", dtype, host.device())
    return pair


def _opened_notices(ref: ExpertsRef, pair: ExpertPair) -> list[Notice]:
    """Return notices on unused tensors, and on what multiplies matrices as they are stored."""
    unused = dict.fromkeys((*pair.high.notes, *pair.low.notes))
    return [*_arithmetic_notices(ref, pair), *map(Notice.of, unused)]


def _arithmetic_notices(ref: ExpertsRef, pair: ExpertPair) -> list[Notice]:
    """Return notices on what multiplies matrices as they are stored here."""
    if ref.arithmetic == "decoded" or (ref.arithmetic == "auto" and not pair.code_formats):
        return []
    if ref.arithmetic == "auto":
        return [Notice(text=_measured(ref, pair).words, level="note", values={"arithmetic": ref.arithmetic})]
    if not pair.code_formats:
        unchanged = 'arithmetic "as stored" changes nothing, because no int8 or fp8 matrix may be multiplied'
        remedy = 'choose storage "int8 ConvRot", or write files with `wanstream quantise`'
        return [Notice(text=f"{unchanged}: {remedy}", level="warning", values={"arithmetic": ref.arithmetic})]
    device = current_host().device()
    choices = [choose_multiplication(fmt, device, pair.compute_dtype) for fmt in pair.code_formats]
    choices.sort(key=lambda choice: choice.name is not None)  # warnings first
    return [
        Notice(
            text=choice.words,
            level="warning" if choice.name is None else "note",
            values={"arithmetic": ref.arithmetic},
        )
        for choice in choices
    ]


def _measured(ref: ExpertsRef, pair: ExpertPair) -> ArithmeticChoice:
    """Return the choice for the arithmetic "auto" here."""
    return measured_arithmetic(replace(ref, compute_dtype=dtype_name(pair.compute_dtype)), current_host().device())


def _changed_arithmetic(ref: ExpertsRef, before: ExpertsRef, pair: ExpertPair) -> list[Notice]:
    """Return a notice if "auto" chooses otherwise with the last LoRA of `ref`."""
    if ref.arithmetic != "auto" or (choice := _measured(ref, pair)) == _measured(before, pair):
        return []
    return [Notice(text=choice.words, level="note")]


class WanStreamOneExpert(FileNode):
    """Reference to a single model, which runs every step and was checked to be complete."""

    FILES: ClassVar = {"file": EXPERT_FOLDERS}
    LISTED_INPUTS = ("file",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamOneExpert",
            display_name="Wan Model (single)",
            category="WanStream/loaders",
            **search_aliases("load diffusion model", "unet", "gguf", "fp8", "5b", "ti2v", "1.3b", "wan 2.1"),
            description="Opens a model with one expert for all steps: Wan2.1 T2V (1.3B, 14B), Wan2.1 I2V (14B) or "
            "Wan2.2 5B. Only headers are read: weights move when a step needs them.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=current_host().model_names(*EXPERT_FOLDERS),
                    tooltip="A .safetensors or .gguf file of diffusion_models, or a folder of diffusers. Read per "
                    "step if all blocks stream: 28 GB for 14B (32 GB for Wan2.1 I2V), 9.8 GB for 5B and 2.8 GB "
                    "for 1.3B in bf16 and fp16, half of it in fp8.",
                ),
                *MODEL_INPUTS,
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool:
        check_single_model(file)
        return True

    @classmethod
    def execute(cls, file: str, compute_dtype: str, **settings: Any) -> io.NodeOutput:
        path = current_host().model_path(file, *EXPERT_FOLDERS)
        ref = ExpertsRef(high_noise=path, single=True, compute_dtype=DTYPES[compute_dtype], **settings)
        notices = _opened_notices(ref, open_here(ref))
        return io.NodeOutput(ref, ui=show_notices(*notices, file=file) or None)


class WanStreamLora(FileNode):
    """Experts with one more LoRA each, which was checked to fit."""

    FILES: ClassVar = {"high_noise": LORA_FOLDERS, "low_noise": LORA_FOLDERS}
    LISTED_INPUTS = ("high_noise", "low_noise")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLora",
            display_name="Wan LoRA (pair)",
            category="WanStream/loaders",
            **search_aliases(
                *("lightning", "lightx2v", "4 steps", "distill", "load lora", "three stages", "lora schedule"),
                *("lokr", "loha", "dora"),
            ),
            description="Adds a LoRA to each expert's weights when they arrive on the device. Several nodes in a row "
            "add up; another LoRA or strength reloads no expert. For a single model, the LoRA is high_noise.",
            inputs=[
                sockets.Experts.Input(
                    "experts",
                    tooltip="From Wan Experts (streamed), Wan Model (single) or another Wan LoRA (pair).",
                ),
                _file("high_noise", "early, noisy steps"),
                _file("low_noise", "later steps"),
                _strength("strength_high"),
                _strength("strength_low"),
                io.String.Input(
                    "strength_steps",
                    default="",
                    optional=True,
                    tooltip="Strengths of ranges of steps, in place of both above: 0-1: 0 leaves the LoRA out of the "
                    "first two steps. Steps count from 0; commas divide ranges. Where the strength changes, resident "
                    "blocks are fetched once more. Another strength than 0 keeps its own factors in RAM.",
                ),
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(
        cls, high_noise: str | None = None, low_noise: str | None = None, strength_steps: str | None = None
    ) -> bool:
        parse_step_strengths(strength_steps or "")
        for name in (high_noise, low_noise):
            check_lora(name)
        return True

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        high_noise: str,
        low_noise: str,
        strength_high: float,
        strength_low: float,
        strength_steps: str = "",
    ) -> io.NodeOutput:
        if high_noise == low_noise == NONE:
            return io.NodeOutput(experts, ui=show_notices() or None)
        lora = LoraRef(
            high_noise=None if high_noise == NONE else current_host().model_path(high_noise, *LORA_FOLDERS),
            low_noise=None if low_noise == NONE else current_host().model_path(low_noise, *LORA_FOLDERS),
            strength_high=strength_high,
            strength_low=strength_low,
            steps=parse_step_strengths(strength_steps),
        )
        ref = replace(experts, loras=(*experts.loras, lora))
        # Opened here so that a bad file is reported on this node and not on the sampler.
        pair = current_host().experts(ref)
        found = [*_lora_notices(pair, lora), *_changed_arithmetic(ref, experts, pair)]
        return io.NodeOutput(ref, ui=show_notices(*found, high_noise=high_noise, low_noise=low_noise) or None)


def _lora_notices(pair: ExpertPair, lora: LoraRef) -> list[Notice]:
    """Return notices on LoRAs that do not suit the experts or their places, or are used in part."""
    files = pair.opened_loras(lora.high_noise, lora.low_noise)
    found = lora_mismatches(lora.high_noise, lora.low_noise, pair.high, single=pair.is_single)
    warnings = dict.fromkeys(warning for file in files for warning in file.warnings)
    found += [Notice(text=warning, level="warning") for warning in warnings]
    return [*found, *map(Notice.of, dict.fromkeys(note for file in files for note in file.notes))]


def _file(name: str, steps: str) -> io.Combo.Input:
    return io.Combo.Input(
        name,
        options=[NONE, *current_host().model_names(*LORA_FOLDERS)],
        default=NONE,
        tooltip=f"The LoRA for the expert of the {steps}. Costs its own size in RAM (0.6 GB at rank 64 in bf16) twice, "
        "2 % more bytes per block at rank 64, and no device memory worth naming.",
    )


def _strength(name: str) -> io.Float.Input:
    return io.Float.Input(
        name,
        default=1.0,
        min=-LARGEST_STRENGTH,
        max=LARGEST_STRENGTH,
        step=0.01,
        tooltip="Factor of the LoRA; 0 disables it. Another strength only costs one more fetch of the blocks that are "
        "resident on the device.",
    )


MODEL_POLICY_INPUT = sockets.Policy.Input(
    "policy",
    optional=True,
    tooltip="Device memory of the blocks, from Wan Layerwise Prefetch, Wan Block Swap or Wan Auto Offload. Without it, "
    "and with Wan Auto Offload: two buffers of the size of the largest block in the first step of the first run, then "
    "the policy predicted to be the fastest in the free memory. chunk_tokens is not used.",
)

STREAMING_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "share_visits",
        options=[mode.value for mode in ShareVisits],
        default=ShareVisits.AUTO.value,
        optional=True,
        tooltip="Where ComfyUI computes positive and negative one after the other, because both do not fit into memory "
        "or have prompts of different lengths, both can pass through each block while it is loaded: half the bytes per "
        "step from the second step on, the same result, and up to the activations of a pass more. auto: for tested "
        "models without code of other packs in their layers, if the memory is there; under an automatic policy, if it "
        "also saves time. on: always, except for a run with a node that may count passes, such as a step cache, a "
        "block replacement or a ControlNet. The sampler shows what was decided.",
    ),
    io.Boolean.Input(
        "lora_on_arrival",
        default=False,
        optional=True,
        tooltip="On: LoRAs are added to a block once, when it arrives, and cost nothing per pass. Off: they are added "
        "in every layer and pass, as in ComfyUI's low-VRAM mode, whose bits the result has. The sums are rounded once "
        "in place of three times, so bf16 and fp16 results differ in the last digits. LoHa, LoKr, DoRA and LoRAs on "
        "fp8 and quantised matrices are added as if it were off.",
    ),
)


class WanStreamLoadDiffusionModel(FileNode):
    """MODEL whose blocks stay in their file; a substitute for ComfyUI's own loader."""

    FILES: ClassVar = {"unet_name": MODEL_FOLDERS}
    LISTED_INPUTS = ("unet_name", "weight_dtype")

    @classmethod
    def define_schema(cls) -> io.Schema:
        # Names and choices are those of UNETLoader: a saved graph stays valid when its class is exchanged.
        return io.Schema(
            node_id="WanStreamLoadDiffusionModel",
            display_name="Load Diffusion Model (streamed)",
            category="WanStream/loaders",
            **search_aliases(
                *("unet", "gguf", "unet loader", "low vram", "block swap", "offload", "vace", "animate", "s2v", "humo"),
                *("flux", "qwen image", "hunyuan video", "ltx", "fp8", "vram", "out of memory", "oom", "distorch"),
            ),
            description="Replaces Load Diffusion Model: blocks stay in their file and are fetched ahead of their use. "
            "Samplers, LoRAs and patches behind it stay as they are. For models with 2 GB and more in blocks.",
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=current_host().model_names(*MODEL_FOLDERS),
                    tooltip="A .safetensors or .gguf file of diffusion_models. Opening it reads its header and what is "
                    "outside the blocks, 0.2 to 4.4 % of the file; streamed blocks are read from disk in every step.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="As in Load Diffusion Model. default: ComfyUI's choice, mostly the format of the file. The "
                    "others cast blocks to fp8 on arrival: half the buffers of bf16, as many bytes from disk, and less "
                    "precision than an fp8_scaled file. fp8_e4m3fn_fast also multiplies in fp8 where the GPU can.",
                ),
                MODEL_POLICY_INPUT,
                *STREAMING_INPUTS,
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None, weight_dtype: str | None = None) -> bool:
        check_native_model(unet_name, weight_dtype)
        return True

    @classmethod
    def execute(
        cls, unet_name: str, weight_dtype: str, policy: OffloadPolicy | AutoOffload | None = None, **settings: Any
    ) -> io.NodeOutput:
        host = current_host()
        path = host.model_path(unet_name, *MODEL_FOLDERS)
        with host.ledger().phase("open", host.device()):
            return io.NodeOutput(host.load_model(path, weight_dtype, _streaming(policy, **settings)))


class WanStreamStreamModel(io.ComfyNode):
    """MODEL of another loader whose blocks stream from now on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamStreamModel",
            display_name="Stream Model",
            category="WanStream/loaders",
            **search_aliases("low vram", "vram", "offload", "block swap", "load checkpoint", "unet", "lora"),
            description="Streams the blocks of a MODEL of another loader, and keeps its LoRAs and patches. Blocks come "
            "from its file if that is known, else from the RAM that it occupies.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="From Load Checkpoint, Load Diffusion Model or another loader, with or without patches. A "
                    "known file is opened again and costs no RAM for the blocks, but the loader before may keep "
                    "its own copy: Load Diffusion Model (streamed) has none.",
                ),
                MODEL_POLICY_INPUT,
                *STREAMING_INPUTS,
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def execute(
        cls, model: object, policy: OffloadPolicy | AutoOffload | None = None, **settings: Any
    ) -> io.NodeOutput:
        host = current_host()
        with host.ledger().phase("open", host.device()):
            return io.NodeOutput(host.stream_model(model, _streaming(policy, **settings)))


def _streaming(
    policy: OffloadPolicy | AutoOffload | None,
    *,
    share_visits: str = ShareVisits.AUTO.value,
    lora_on_arrival: bool = False,
) -> ModelStreaming:
    return ModelStreaming(
        policy=policy or AutoOffload(), share_visits=ShareVisits(share_visits), lora_on_arrival=lora_on_arrival
    )
