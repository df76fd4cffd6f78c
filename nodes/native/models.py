"""Loaders for native MODELs from any family, with streamed blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypedDict

from ...host import (
    WEIGHT_DTYPES,
    ModelStreaming,
    ShareVisits,
    current_host,
    io,
    search_aliases,
)
from ...plan import AutoOffload
from ...schema import OffloadPolicy
from .. import sockets
from ..inputs import advanced
from ..runs.file_checks import MODEL_FOLDERS, check_native_model
from ..runs.file_node import FileNode

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

MODEL_POLICY_INPUT = sockets.Policy.Input(
    "policy",
    optional=True,
    tooltip="Device memory of the blocks, from Wan Layerwise Prefetch, Wan Block Swap or Wan Auto "
    "Offload. Without it, and with Wan Auto Offload: two buffers of the size of the largest "
    "block in the first step of the first run, then the policy predicted to be the fastest in "
    "the free memory. chunk_tokens divides feed-forwards whose bits stay the same.",
)

STREAMING_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "share_visits",
        options=[mode.value for mode in ShareVisits],
        default=ShareVisits.AUTO.value,
        optional=True,
        **advanced(),
        tooltip="Where ComfyUI computes positive and negative one after the other, because both do "
        "not fit into memory or have prompts of different lengths, both can pass through each "
        "block while it is loaded: half the bytes per step from the second step on, the same "
        "result, and up to the activations of a pass more. auto: for tested models without "
        "code of other packs in their layers, if the memory is there; under an automatic "
        "policy, if it also saves time. on: always, except for a run with a node that may "
        "count passes, such as a step cache, a block replacement or a ControlNet. The sampler "
        "shows what was decided.",
    ),
)


class StreamingValues(TypedDict, total=False):
    """Values for `MODEL_POLICY_INPUT` and `STREAMING_INPUTS`. All are optional."""

    policy: OffloadPolicy | AutoOffload
    share_visits: str


class WanStreamLoadDiffusionModel(FileNode):
    """MODEL whose blocks stay in the file. Replaces ComfyUI's own loader."""

    FILES: ClassVar = {"unet_name": MODEL_FOLDERS}
    LISTED_INPUTS = ("unet_name", "weight_dtype")

    @classmethod
    def define_schema(cls) -> io.Schema:
        # UNETLoader has the same names and choices. A saved graph stays valid when the class is
        # exchanged.
        return io.Schema(
            node_id="WanStreamLoadDiffusionModel",
            display_name="Load Diffusion Model (streamed)",
            category="WanStream/loaders",
            **search_aliases(
                "unet, gguf, unet loader, low vram, block swap, offload, vace, animate, s2v, humo, "
                "flux, qwen image, hunyuan video, ltx, fp8, vram, out of memory, oom, distorch"
            ),
            description="Replaces Load Diffusion Model: blocks stay in their file and are fetched "
            "ahead of their use. Samplers, LoRAs and patches behind it stay as they are. For "
            "models with 2 GB and more in blocks.",
            inputs=[
                cls.file_input(
                    "unet_name",
                    tooltip="A .safetensors or .gguf file of diffusion_models. Opening it reads "
                    "its header and what is outside the blocks, 0.2 to 3.5 % of the file; "
                    "streamed blocks are read from disk in every step.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    **advanced(),
                    tooltip="As in Load Diffusion Model. default: ComfyUI's choice, mostly the "
                    "format of the file. The others cast blocks to fp8 on arrival: half the "
                    "buffers of bf16, as many bytes from disk, and less precision than an "
                    "fp8_scaled file. fp8_e4m3fn_fast also multiplies in fp8 where the GPU "
                    "can.",
                ),
                MODEL_POLICY_INPUT,
                *STREAMING_INPUTS,
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None, weight_dtype: str | None = None) -> bool:
        check_native_model(current_host(), unet_name, weight_dtype)
        return True

    @classmethod
    def execute(
        cls, unet_name: str, weight_dtype: str, **values: Unpack[StreamingValues]
    ) -> io.NodeOutput:
        host = current_host()
        path = host.files.model_path(unet_name, *MODEL_FOLDERS)
        streaming = model_streaming(**values)
        with host.events.ledger().phase("open", host.memory.device()):
            return io.NodeOutput(host.native.load_model(path, weight_dtype, streaming))


class WanStreamStreamModel(io.ComfyNode):
    """MODEL from another loader, streamed from now on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamStreamModel",
            display_name="Stream Model",
            category="WanStream/loaders",
            **search_aliases("low vram, vram, offload, block swap, load checkpoint, unet, lora"),
            description="Streams the blocks of a MODEL of another loader, and keeps its LoRAs and "
            "patches. Blocks come from its file if that is known, else from the RAM that it "
            "occupies.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="From Load Checkpoint, Load Diffusion Model or another loader, with or "
                    "without patches. A known file is opened again and costs no RAM for the "
                    "blocks, but the loader before may keep its own copy: Load Diffusion Model "
                    "(streamed) has none.",
                ),
                MODEL_POLICY_INPUT,
                *STREAMING_INPUTS,
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: object, **values: Unpack[StreamingValues]) -> io.NodeOutput:
        host = current_host()
        streaming = model_streaming(**values)
        with host.events.ledger().phase("open", host.memory.device()):
            return io.NodeOutput(host.native.stream_model(model, streaming))


def model_streaming(
    policy: OffloadPolicy | AutoOffload | None = None,
    share_visits: str = ShareVisits.AUTO.value,
) -> ModelStreaming:
    """Return the settings from `MODEL_POLICY_INPUT` and `STREAMING_INPUTS`."""
    return ModelStreaming(
        policy=policy or AutoOffload(),
        share_visits=ShareVisits(share_visits),
    )
