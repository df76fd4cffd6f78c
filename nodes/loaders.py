"""Loader nodes: a pair of experts, a single model, and LoRAs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, get_args

import torch

from ..block_kernels import ATTENTIONS, choose_multiplication
from ..devices import AUTO, dtype_name
from ..host import (
    Host,
    current_host,
    io,
    search_aliases,
)
from ..schema import LARGEST_STRENGTH, parse_step_strengths
from ..schema.records import Notice
from ..schema.refs import ExpertsRef, KernelSet, LoraRef
from ..shapes import ArithmeticChoice
from ..wan import ARITHMETIC_CHOICES, STORAGES, ExpertPair, expert_mismatches, lora_mismatches
from ..wan.measurement import measured_arithmetic
from . import sockets
from .inputs import limits
from .runs.file_checks import (
    EXPERT_FOLDERS,
    LORA_FOLDERS,
    NONE,
    SAME_FOLDER,
    check_experts,
    check_lora,
    check_single_model,
    optional_path,
)
from .runs.file_node import FileNode
from .runs.notices import file_notices, noticed

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

DTYPES = {AUTO: AUTO, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "compute_dtype",
        options=list(DTYPES),
        default=AUTO,
        tooltip="Dtype in which the blocks compute, independent of the file. auto: bf16 if the "
        "device has units for it, else fp16, else fp32, as on most CPUs. bf16 and fp16: 0.70 "
        "GB per buffer; a CPU without bf16 units takes three to five times as long as in fp32. "
        "fp32: twice the memory, and on a GPU at least twice the time.",
    ),
    io.Combo.Input(
        # Optional, like all later inputs: ComfyUI refuses older workflows without a required one.
        "storage",
        options=list(STORAGES),
        default="as stored",
        optional=True,
        tooltip="Format of blocks in RAM and on the bus. fp8 and int8 ConvRot quantise a bf16, "
        "fp16 or fp32 file while it is read: half the RAM and bus bytes of bf16, as many bytes "
        "from disk, and an error per weight of 2.7 % (fp8, 0.3 s of one core per block) or "
        "0.85 % (int8 ConvRot, 0.6 s). int8 ConvRot also takes fp8 files; other quantised "
        "matrices are not changed.",
    ),
    io.Combo.Input(
        "attention",
        options=list(ATTENTIONS),
        default="default",
        optional=True,
        tooltip="Kernel for attention, which takes most of the time of a long video. default: the "
        "choice of diffusers, torch's own sdpa. The others need a GPU and bf16 or fp16 "
        "(xformers and int8 also fp32), and all but cudnn a package of that name: int8 is that "
        "of comfy-kitchen, which ComfyUI installs. Results differ in rounding; sage and int8 "
        "also compute in 8 bits, which costs some precision.",
    ),
    io.Boolean.Input(
        "compile",
        default=False,
        optional=True,
        tooltip="Compile the blocks with torch.compile for faster steps. The first step after a "
        "start is slow, and so is that of a second video size, but not of the other expert, "
        "another LoRA or another run. Results differ in the last digits. Needs Triton on a "
        "GPU, a C++ compiler on a CPU.",
    ),
    io.Combo.Input(
        "arithmetic",
        options=list(ARITHMETIC_CHOICES),
        default="decoded",
        optional=True,
        tooltip="Arithmetic for matrices in int8 and fp8, stored so in the file or by `storage`. "
        "decoded: they become compute_dtype on arrival. as stored: they are multiplied as they "
        "are: half the memory of buffers and resident blocks. auto: as stored if a block is "
        "then at least 5 % faster on this GPU, which is measured once in about a second; always "
        "decoded on a CPU. On an H100 fp8 takes 0.68 to 0.83 of the time of bf16, int8 as long "
        "with comfy-kitchen and three times as long without it. Tokens are rounded to the same "
        "format, which costs little precision in int8 ConvRot and more in int8 and fp8. int8 by "
        "comfy-kitchen where its CUDA kernels are active, else by torch, slow on a CPU; fp8 by "
        "torch, on NVIDIA from the RTX 40 series on. The node shows what is used, and why.",
    ),
    io.Combo.Input(
        "kernels",
        options=list(get_args(KernelSet)),
        default="auto",
        optional=True,
        tooltip="Kernels for norms, residuals and the rotary embedding. auto: triton on a GPU "
        "where its test passes, else torch; the log names it. exact: the order and dtypes of "
        "diffusers, to its bits; a step of a short video then takes 1.35 times as long on an "
        "H100. The others differ from it in rounding. triton needs a C compiler, comfy-kitchen "
        "the package of that name.",
    ),
)


class ModelWidgets(TypedDict, total=False):
    """Widgets in `MODEL_INPUTS` after the dtype. Older workflows lack them."""

    storage: Any
    attention: Any
    compile: bool
    arithmetic: Any
    kernels: KernelSet


logger = logging.getLogger("wanstream.nodes")


class WanStreamExperts(FileNode):
    """Reference to a high-noise and a low-noise expert, checked to be a pair."""

    FILES: ClassVar = {"high_noise": EXPERT_FOLDERS, "low_noise": EXPERT_FOLDERS}
    # ComfyUI compares no input of `validate_inputs` with its list. The embedded host does here.
    LISTED_INPUTS = ("high_noise", "low_noise")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamExperts",
            display_name="Wan Experts (streamed)",
            category="WanStream/loaders",
            **search_aliases(
                "moe, high noise, low noise, load diffusion model, unet, gguf, fp8, a14b, wan 2.2, "
                "sage attention, torch compile"
            ),
            description="Opens the two experts of Wan2.2 A14B. Only headers are read: weights move "
            "when a step needs them.",
            inputs=[
                cls.file_input(
                    "high_noise",
                    tooltip="The expert of the early, noisy steps: a .safetensors or .gguf file of "
                    "diffusion_models, or a folder of diffusers. Read per step if all blocks "
                    "stream: 28 GB in bf16 and fp16, 15 GB in Q8_0, 14 GB in fp8, 8 GB in Q4_K. "
                    "Device memory is the same for all.",
                ),
                cls.file_input(
                    "low_noise",
                    no_file=SAME_FOLDER,
                    tooltip="The expert of the later steps. A diffusers pipeline folder chosen as "
                    "high_noise has both.",
                ),
                *MODEL_INPUTS,
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(cls, high_noise: str | None = None, low_noise: str | None = None) -> bool:
        check_experts(current_host().files, high_noise, low_noise)
        return True

    @classmethod
    def execute(
        cls, high_noise: str, low_noise: str, compute_dtype: str, **settings: Unpack[ModelWidgets]
    ) -> io.NodeOutput:
        host = current_host()
        # Widgets missing in an older workflow keep the defaults of `ExpertsRef`.
        ref = ExpertsRef(
            high_noise=host.files.model_path(high_noise, *EXPERT_FOLDERS),
            low_noise=optional_path(host.files, low_noise, EXPERT_FOLDERS, no_file=SAME_FOLDER),
            compute_dtype=DTYPES[compute_dtype],
            **settings,
        )
        return _opened(host, ref, high_noise=high_noise, low_noise=low_noise)


def _opened(host: Host, ref: ExpertsRef, **files: str) -> io.NodeOutput:
    """Open the experts in this process. Return their reference with the notices on `files`.

    Logs the dtype chosen here for `compute_dtype` auto. The loader opens the experts, not the
    sampler, so that a bad file or a missing package is reported on the loader. The host keeps the
    pair open for the sampler.
    """
    with host.events.ledger().phase("open", host.memory.device()):
        pair = host.models.experts(ref)
    # `ref` itself keeps "auto": workers agree on a dtype that is fast on all their devices.
    if ref.compute_dtype == AUTO:
        dtype = dtype_name(pair.compute_dtype)
        logger.info(
            "compute_dtype auto: the blocks compute in %s on %s", dtype, host.memory.device()
        )
    notices = _arithmetic_notices(ref, pair, host.memory.device())
    if not ref.single:
        notices = [*expert_mismatches(pair.high, pair.low), *notices]
    # Each note once: both experts usually have the same ones.
    unused = dict.fromkeys((*pair.high.notes, *pair.low.notes))
    return noticed(host, ref, notices=(*notices, *map(Notice.of, unused)), **files)


def _arithmetic_notices(ref: ExpertsRef, pair: ExpertPair, device: torch.device) -> list[Notice]:
    """Return notices on how stored matrices are multiplied here."""
    found: list[tuple[Literal["note", "warning"], str]] = []
    if ref.arithmetic == "auto" and pair.code_formats:
        found.append(("note", _measured(ref, pair, device).words))
    if ref.arithmetic == "as stored" and not pair.code_formats:
        unchanged = (
            'arithmetic "as stored" changes nothing, because no int8 or fp8 matrix may be '
            'multiplied: choose storage "int8 ConvRot", or write files with `wanstream quantise`'
        )
        found.append(("warning", unchanged))
    if ref.arithmetic == "as stored":
        for fmt in pair.code_formats:
            choice = choose_multiplication(fmt, device, pair.compute_dtype)
            found.append(("warning" if choice.name is None else "note", choice.words))
    found.sort(key=lambda each: each[0] == "note")  # warnings first
    values = {"arithmetic": ref.arithmetic}
    return [Notice(text=text, level=level, values=values) for level, text in found]


def _measured(ref: ExpertsRef, pair: ExpertPair, device: torch.device) -> ArithmeticChoice:
    """Return the choice for arithmetic "auto" here."""
    return measured_arithmetic(replace(ref, compute_dtype=dtype_name(pair.compute_dtype)), device)


def _changed_arithmetic(
    ref: ExpertsRef, before: ExpertsRef, pair: ExpertPair, device: torch.device
) -> list[Notice]:
    """Return a notice if the last LoRA in `ref` changes the choice for "auto"."""
    if ref.arithmetic != "auto":
        return []
    choice = _measured(ref, pair, device)
    if choice == _measured(before, pair, device):
        return []
    return [Notice(text=choice.words, level="note")]


class WanStreamOneExpert(FileNode):
    """Reference to a single model for all steps, checked to be complete."""

    FILES: ClassVar = {"file": EXPERT_FOLDERS}
    LISTED_INPUTS = ("file",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamOneExpert",
            display_name="Wan Model (single)",
            category="WanStream/loaders",
            **search_aliases("load diffusion model, unet, gguf, fp8, 5b, ti2v, 1.3b, wan 2.1"),
            description="Opens a model with one expert for all steps: Wan2.1 T2V (1.3B, 14B), "
            "Wan2.1 I2V (14B) or Wan2.2 5B. Only headers are read: weights move when a step "
            "needs them.",
            inputs=[
                cls.file_input(
                    "file",
                    tooltip="A .safetensors or .gguf file of diffusion_models, or a folder of "
                    "diffusers. Read per step if all blocks stream: 28 GB for 14B (32 GB for "
                    "Wan2.1 I2V), 9.8 GB for 5B and 2.8 GB for 1.3B in bf16 and fp16, half of "
                    "it in fp8.",
                ),
                *MODEL_INPUTS,
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool:
        check_single_model(current_host().files, file)
        return True

    @classmethod
    def execute(
        cls, file: str, compute_dtype: str, **settings: Unpack[ModelWidgets]
    ) -> io.NodeOutput:
        host = current_host()
        path = host.files.model_path(file, *EXPERT_FOLDERS)
        dtype = DTYPES[compute_dtype]
        ref = ExpertsRef(high_noise=path, single=True, compute_dtype=dtype, **settings)
        return _opened(host, ref, file=file)


class WanStreamLora(FileNode):
    """Experts with one more LoRA each, checked to fit."""

    FILES: ClassVar = {"high_noise": LORA_FOLDERS, "low_noise": LORA_FOLDERS}
    LISTED_INPUTS = ("high_noise", "low_noise")

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = (("high_noise", "early, noisy steps"), ("low_noise", "later steps"))
        return io.Schema(
            node_id="WanStreamLora",
            display_name="Wan LoRA (pair)",
            category="WanStream/loaders",
            **search_aliases(
                "lightning, lightx2v, 4 steps, distill, load lora, three stages, lora schedule, "
                "lokr, loha, dora"
            ),
            description="Adds a LoRA to each expert's weights when they arrive on the device. "
            "Several nodes in a row add up; another LoRA or strength reloads no expert. For a "
            "single model, the LoRA is high_noise.",
            inputs=[
                sockets.Experts.Input(
                    "experts",
                    tooltip="From Wan Experts (streamed), Wan Model (single) or another Wan LoRA "
                    "(pair).",
                ),
                *(
                    cls.file_input(
                        name,
                        no_file=NONE,
                        tooltip=f"The LoRA for the expert of the {steps}. Costs its own size in "
                        "RAM (0.6 GB at rank 64 in bf16) twice, 2 % more bytes per block at rank "
                        "64, and no device memory worth naming.",
                    )
                    for name, steps in files
                ),
                *(
                    io.Float.Input(
                        name,
                        default=1.0,
                        **limits(-LARGEST_STRENGTH, LARGEST_STRENGTH, step=0.01),
                        tooltip="Factor of the LoRA; 0 disables it. Another strength only costs "
                        "one more fetch of the blocks that are resident on the device.",
                    )
                    for name in ("strength_high", "strength_low")
                ),
                io.String.Input(
                    "strength_steps",
                    default="",
                    optional=True,
                    tooltip="Strengths of ranges of steps, in place of both above: 0-1: 0 leaves "
                    "the LoRA out of the first two steps. Steps count from 0; commas divide "
                    "ranges. Where the strength changes, resident blocks are fetched once "
                    "more. Another strength than 0 keeps its own factors in RAM.",
                ),
            ],
            outputs=[sockets.Experts.Output(display_name="experts")],
        )

    @classmethod
    def validate_inputs(
        cls,
        high_noise: str | None = None,
        low_noise: str | None = None,
        strength_steps: str | None = None,
    ) -> bool:
        parse_step_strengths(strength_steps or "")
        for name in (high_noise, low_noise):
            check_lora(current_host().files, name)
        return True

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        high_noise: str,
        low_noise: str,
        strength_high: float,
        strength_low: float,
        # ComfyUI passes only inputs in the workflow, so older workflows need this default.
        strength_steps: str = "",
    ) -> io.NodeOutput:
        host = current_host()
        # With an empty LoRA, the reference would differ, and the LoRAs would be set again.
        if high_noise == low_noise == NONE:
            return noticed(host, experts)
        lora = LoraRef(
            high_noise=optional_path(host.files, high_noise, LORA_FOLDERS, no_file=NONE),
            low_noise=optional_path(host.files, low_noise, LORA_FOLDERS, no_file=NONE),
            strength_high=strength_high,
            strength_low=strength_low,
            steps=parse_step_strengths(strength_steps),
        )
        ref = replace(experts, loras=(*experts.loras, lora))
        # Opened here so a bad file is reported on this node and not on the sampler.
        pair = host.models.experts(ref)
        changed = _changed_arithmetic(ref, experts, pair, host.memory.device())
        found = [*_lora_notices(pair, lora), *changed]
        return noticed(host, ref, notices=found, high_noise=high_noise, low_noise=low_noise)


def _lora_notices(pair: ExpertPair, lora: LoraRef) -> list[Notice]:
    """Return notices on LoRAs that do not suit the experts or inputs, or are only partly used."""
    files = pair.opened_loras(lora.high_noise, lora.low_noise)
    found = lora_mismatches(lora.high_noise, lora.low_noise, pair.high, single=pair.is_single)
    warnings = dict.fromkeys(warning for file in files for warning in file.warnings)
    notes = dict.fromkeys(note for file in files for note in file.notes)
    return [*found, *file_notices(warnings, notes)]
