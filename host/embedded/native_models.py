"""Native models without ComfyUI: refusals with the alternative."""

from __future__ import annotations

from pathlib import Path

from ..models import NeedsComfyUIError
from ..native_models import Checkpoint, ModelRun, NativeModels
from .workflow.validate import NEEDS_COMFYUI


class NoNativeModels(NativeModels):
    """Native models in a host that has none."""

    def load_model(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(f"Load Diffusion Model (streamed) {NEEDS_COMFYUI}")

    def load_checkpoint(self, *_: object) -> Checkpoint:
        raise NeedsComfyUIError(f"Load Checkpoint (streamed) {NEEDS_COMFYUI}")

    def load_clip(self, *_: object) -> object:
        raise NeedsComfyUIError(f"Load CLIP (streamed) {NEEDS_COMFYUI}")

    def check_clip(self, path: Path) -> None:
        self.load_clip(path)

    def stream_clip(self, *_: object) -> object:
        raise NeedsComfyUIError(f"Stream CLIP {NEEDS_COMFYUI}")

    def check_model(self, path: Path, weight_dtype: str) -> None:
        self.load_model(path, weight_dtype)

    def stream_model(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(f"Stream Model {NEEDS_COMFYUI}")

    def join_experts(self, *_: object) -> object:
        raise NeedsComfyUIError(f"Join Experts {NEEDS_COMFYUI}")

    def split_experts(self, *_: object) -> tuple[object, object]:
        raise NeedsComfyUIError(f"Split Experts {NEEDS_COMFYUI}")

    def model_run(self, *_: object) -> ModelRun:
        raise NeedsComfyUIError(f"Run of Streamed Model {NEEDS_COMFYUI}")
