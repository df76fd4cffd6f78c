"""Native ComfyUI models with streamed blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....schema import OffloadPolicy
from ...api import Host
from ...native_models import Checkpoint, EncoderFiles, ModelStreaming, NativeModels
from ..native.encoders import check_encoder, load_encoders, stream_clip
from ..native.join import ExpertJoiner, split
from ..native.load import last_run, load_checkpoint, load_native
from ..native.network.block_lists import ANY_SIZE
from ..native.network.build import check_native
from ..native.stream_model import ModelStreamer
from ..native.streamed.patcher import NativePatcher
from .files import user_setting
from .user_settings import SMALL_MODELS


class ComfyNativeModels(NativeModels):
    """Native models for ComfyUI's samplers.

    Args:
        host: host of the runs.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streamer = ModelStreamer(host)
        self._joiner = ExpertJoiner(host)

    def load_model(self, path: Path, weight_dtype: str, streaming: ModelStreaming) -> NativePatcher:
        return load_native(path, weight_dtype, streaming, self._host, _native_limits())

    def load_checkpoint(self, path: Path, streaming: ModelStreaming) -> Checkpoint:
        return load_checkpoint(path, streaming, self._host, _native_limits())

    def load_clip(self, files: EncoderFiles, policy: OffloadPolicy) -> object:
        return load_encoders(files, policy, _native_limits())

    def stream_clip(self, clip: object, policy: OffloadPolicy) -> object:
        return stream_clip(clip, policy, _native_limits())

    check_clip = staticmethod(check_encoder)
    check_model = staticmethod(check_native)

    def stream_model(self, model: object, streaming: ModelStreaming) -> NativePatcher:
        return self._streamer.stream(model, streaming, **_native_limits())

    def join_experts(self, high: object, low: object, boundary: float) -> NativePatcher:
        return self._joiner.join(high, low, boundary)

    def split_experts(self, model: object) -> tuple[object, object]:
        experts = split(model)
        return experts["high"], experts["low"]

    model_run = staticmethod(last_run)


def _native_limits() -> Mapping[str, int]:
    if user_setting(SMALL_MODELS):
        return ANY_SIZE
    return {}
