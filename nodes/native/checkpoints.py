"""Loader for a whole checkpoint with a streamed MODEL."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...host import current_host, io, search_aliases
from ..runs.file_checks import CHECKPOINT_FOLDERS, check_native_model
from ..runs.file_node import FileNode
from .models import MODEL_POLICY_INPUT, STREAMING_INPUTS, StreamingValues, model_streaming

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on


class WanStreamLoadCheckpoint(FileNode):
    """MODEL, CLIP and VAE from one file. Replaces ComfyUI's own loader."""

    FILES: ClassVar = {"ckpt_name": CHECKPOINT_FOLDERS}
    LISTED_INPUTS = ("ckpt_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        # CheckpointLoaderSimple has the same names, choices and outputs. A saved graph stays valid
        # with either class.
        return io.Schema(
            node_id="WanStreamLoadCheckpoint",
            display_name="Load Checkpoint (streamed)",
            category="WanStream/loaders",
            **search_aliases(
                "load checkpoint, checkpoint loader simple, ltx, ltx-2, all in one, aio, low vram, "
                "offload"
            ),
            description="Replaces Load Checkpoint: the blocks of the MODEL stay in the file and "
            "are fetched ahead of their use, and so are those of a large text encoder. VAE and "
            "smaller encoders are loaded as usual. For models with 2 GB and more in blocks.",
            inputs=[
                cls.file_input(
                    "ckpt_name",
                    tooltip="A .safetensors file of checkpoints. Opening it reads its header, what "
                    "is outside the blocks of the MODEL, and CLIP and VAE, which take RAM as in "
                    "Load Checkpoint. Streamed blocks are read from disk in every step.",
                ),
                MODEL_POLICY_INPUT,
                *STREAMING_INPUTS,
            ],
            outputs=[
                io.Model.Output(display_name="model"),
                io.Clip.Output(display_name="clip"),
                io.Vae.Output(display_name="vae"),
            ],
        )

    @classmethod
    def validate_inputs(cls, ckpt_name: str | None = None) -> bool:
        check_native_model(current_host(), ckpt_name, None, CHECKPOINT_FOLDERS)
        return True

    @classmethod
    def execute(cls, ckpt_name: str, **values: Unpack[StreamingValues]) -> io.NodeOutput:
        host = current_host()
        path = host.files.model_path(ckpt_name, *CHECKPOINT_FOLDERS)
        streaming = model_streaming(**values)
        with host.events.ledger().phase("open", host.memory.device()):
            parts = host.native.load_checkpoint(path, streaming)
        return io.NodeOutput(parts.model, parts.clip, parts.vae)
