"""Node that encodes prompts."""

from __future__ import annotations

from typing import ClassVar

from ..host import current_host, io, search_aliases
from .runs.file_checks import TEXT_FOLDERS, check_text_encoder
from .runs.file_node import FileNode
from .runs.notices import noticed


class WanStreamTextEncode(FileNode):
    """Conditioning for both prompts from the streamed UMT5 encoder."""

    FILES: ClassVar = {"text_encoder": TEXT_FOLDERS}
    LISTED_INPUTS = ("text_encoder",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamTextEncode",
            display_name="Wan Text Encode (streamed)",
            category="WanStream/loaders",
            **search_aliases("t5, umt5, clip, prompt, load clip"),
            description="Encodes both prompts in one pass; the encoder's blocks stream through the "
            "device like the experts'.",
            inputs=[
                cls.file_input(
                    "text_encoder",
                    tooltip="UMT5-XXL: a umt5_xxl file in safetensors or GGUF, or a diffusers "
                    "pipeline folder. Costs one read of 9 GB (bf16, fp16; fp8 and Q8_0 half of "
                    "it) from disk per change of a prompt, and 0.8 GB of device memory instead "
                    "of 11.",
                ),
                io.String.Input(
                    "positive",
                    multiline=True,
                    tooltip="Content of the video. Long prompts cost nothing: every prompt is "
                    "padded or cut to 512 tokens.",
                ),
                io.String.Input(
                    "negative",
                    multiline=True,
                    tooltip="Content to avoid. Used only by an expert whose guidance is not 1: it "
                    "doubles the compute of its steps, but not the bytes that are moved.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str | None = None) -> bool:
        check_text_encoder(current_host().files, text_encoder)
        return True

    @classmethod
    def execute(cls, text_encoder: str, positive: str, negative: str) -> io.NodeOutput:
        host = current_host()
        path = host.files.model_path(text_encoder, *TEXT_FOLDERS)
        with host.events.ledger().phase("text", host.memory.device()):
            embeddings = host.models.encode_texts(path, [positive, negative])
        # The keys as in ComfyUI's conditionings. UMT5 has no pooled embedding.
        conditionings = ([[embedding, {"pooled_output": None}]] for embedding in embeddings)
        return noticed(host, *conditionings, notices=check_text_encoder(host.files, text_encoder))
