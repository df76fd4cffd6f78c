"""Loaders for native CLIPs with streamed text encoders, and streaming for other loaders' CLIPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...host import EncoderFiles, current_host, io, search_aliases
from ...plan import AutoOffload
from ...schema import OffloadPolicy
from .. import sockets
from ..inputs import advanced
from ..runs.file_checks import ENCODERS_OF_A_CLIP, check_native_clip
from ..runs.file_node import FileNode

ALIASES = "text encoder, t5, umt5, qwen, gemma, llama, low vram, offload, prompt"
KINDS = (
    "As in ComfyUI's loader: the model that the text is for. The text encoder must be one of this "
    "model's."
)
POLICY_INPUT = sockets.Policy.Input(
    "policy",
    optional=True,
    tooltip="Memory of the blocks, from Wan Layerwise Prefetch or Wan Block Swap. Without it, and "
    "with Wan Auto Offload: two buffers of the size of the largest block while a text is "
    "encoded, and nothing afterwards. Resident and RAM blocks stay, and make the next text "
    "faster. chunk_tokens is not used.",
)
DEVICE_INPUT = io.Combo.Input(
    "device",
    options=["default", "cpu"],
    default="default",
    optional=True,
    **advanced(),
    tooltip="As in ComfyUI's loader. cpu: the text is encoded without the GPU, several times "
    "slower.",
)

Policy = OffloadPolicy | AutoOffload | None


def _fixed(policy: Policy) -> OffloadPolicy:
    """Return a fixed policy. An encoding is too short to measure one."""
    return policy if isinstance(policy, OffloadPolicy) else OffloadPolicy.layerwise()


class ClipLoader(FileNode):
    """Base class for native CLIP loaders, with the same inputs as ComfyUI's own."""

    FILES: ClassVar[Mapping[str, tuple[str, ...]]]
    # ComfyUI reads no GGUF for text encoders.
    READS_GGUF = False

    @classmethod
    def _schema(cls, node_id: str, name: str, recipe: str, *inputs: io.Input) -> io.Schema:
        files = [
            cls.file_input(
                each,
                tooltip="A .safetensors file of text_encoders, in any format that ComfyUI reads "
                "there. Opening it reads its header and what is outside the blocks. The blocks "
                "are read from disk for each text, or kept by the policy.",
            )
            for each in cls.FILES
        ]
        return io.Schema(
            node_id=node_id,
            display_name=f"{name} (streamed)",
            category="WanStream/loaders",
            **search_aliases(f"{ALIASES}, {name.lower()}"),
            description=f"Replaces {name}: the blocks of the text encoder stay in their file, and "
            f"the result is the same. {recipe} For encoders with 2 GB and more in blocks.",
            inputs=[*files, *inputs, POLICY_INPUT],
            outputs=[io.Clip.Output(display_name="clip")],
        )

    @classmethod
    def execute(cls, *, policy: Policy = None, **values: str) -> io.NodeOutput:
        host = current_host()
        files = EncoderFiles(
            paths=tuple(
                host.files.model_path(values[name], *folders) for name, folders in cls.FILES.items()
            ),
            # The loaders of three and four files have no type, as in ComfyUI.
            kind=values.get("type", EncoderFiles.kind),
            on_cpu=values.get("device") == "cpu",
        )
        with host.events.ledger().phase("open", host.memory.device()):
            return io.NodeOutput(host.native.load_clip(files, _fixed(policy)))


class WanStreamLoadCLIP(ClipLoader):
    """CLIP from one file. Replaces ComfyUI's CLIPLoader."""

    FILES: ClassVar = {"clip_name": ENCODERS_OF_A_CLIP}
    LISTED_INPUTS = ("clip_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = io.Combo.Input("type", options=current_host().models.clip_kinds(1), tooltip=KINDS)
        recipe = "UMT5 for Wan, Qwen for Qwen-Image and Z-Image, Gemma for LTX and Lumina."
        return cls._schema("WanStreamLoadCLIP", "Load CLIP", recipe, kinds, DEVICE_INPUT)

    @classmethod
    def validate_inputs(cls, clip_name: str | None = None) -> bool:
        check_native_clip(current_host(), clip_name)
        return True


class WanStreamDualCLIP(ClipLoader):
    """CLIP from two files. Replaces ComfyUI's DualCLIPLoader."""

    FILES: ClassVar = dict.fromkeys(("clip_name1", "clip_name2"), ENCODERS_OF_A_CLIP)
    LISTED_INPUTS = ("clip_name1", "clip_name2")

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = io.Combo.Input("type", options=current_host().models.clip_kinds(2), tooltip=KINDS)
        recipe = "CLIP-L and T5-XXL for Flux, CLIP-L and Llama for HunyuanVideo."
        return cls._schema("WanStreamDualCLIP", "Load CLIP (Dual)", recipe, kinds, DEVICE_INPUT)

    @classmethod
    def validate_inputs(cls, clip_name1: str | None = None, clip_name2: str | None = None) -> bool:
        check_native_clip(current_host(), clip_name1, clip_name2)
        return True


class WanStreamTripleCLIP(ClipLoader):
    """CLIP from three files. Replaces ComfyUI's TripleCLIPLoader."""

    FILES: ClassVar = dict.fromkeys(("clip_name1", "clip_name2", "clip_name3"), ENCODERS_OF_A_CLIP)
    LISTED_INPUTS = tuple(FILES)

    @classmethod
    def define_schema(cls) -> io.Schema:
        recipe = "CLIP-L, CLIP-G and T5-XXL for SD3."
        return cls._schema("WanStreamTripleCLIP", "Load CLIP (Triple)", recipe)

    @classmethod
    def validate_inputs(
        cls,
        clip_name1: str | None = None,
        clip_name2: str | None = None,
        clip_name3: str | None = None,
    ) -> bool:
        check_native_clip(current_host(), clip_name1, clip_name2, clip_name3)
        return True


class WanStreamQuadrupleCLIP(ClipLoader):
    """CLIP from four files. Replaces ComfyUI's QuadrupleCLIPLoader."""

    FILES: ClassVar = dict.fromkeys(
        ("clip_name1", "clip_name2", "clip_name3", "clip_name4"), ENCODERS_OF_A_CLIP
    )
    LISTED_INPUTS = tuple(FILES)

    @classmethod
    def define_schema(cls) -> io.Schema:
        recipe = "CLIP-L, CLIP-G, T5-XXL and Llama for HiDream."
        return cls._schema("WanStreamQuadrupleCLIP", "Load CLIP (Quadruple)", recipe)

    @classmethod
    def validate_inputs(
        cls,
        clip_name1: str | None = None,
        clip_name2: str | None = None,
        clip_name3: str | None = None,
        clip_name4: str | None = None,
    ) -> bool:
        check_native_clip(current_host(), clip_name1, clip_name2, clip_name3, clip_name4)
        return True


class WanStreamStreamCLIP(io.ComfyNode):
    """CLIP from another loader, streamed from now on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamStreamCLIP",
            display_name="Stream CLIP",
            category="WanStream/loaders",
            **search_aliases(f"{ALIASES}, ltxv audio text encoder loader, lora"),
            description="Streams the text encoder of a CLIP of another loader of ComfyUI, and "
            "keeps its LoRAs. Its files are opened again.",
            inputs=[
                io.Clip.Input(
                    "clip",
                    tooltip="From Load CLIP, LTXV Audio Text Encoder Loader or another loader of "
                    "ComfyUI, with or without LoRAs. The loader before may keep its own copy in "
                    "RAM: Load CLIP (streamed) has none.",
                ),
                POLICY_INPUT,
            ],
            outputs=[io.Clip.Output(display_name="clip")],
        )

    @classmethod
    def execute(cls, clip: object, policy: Policy = None) -> io.NodeOutput:
        host = current_host()
        with host.events.ledger().phase("open", host.memory.device()):
            return io.NodeOutput(host.native.stream_clip(clip, _fixed(policy)))
