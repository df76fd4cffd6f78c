"""Native host models: MODELs and CLIPs whose blocks stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch

from ..plan import AutoOffload
from ..schema import OffloadPolicy
from ..schema.records import Timeline

WEIGHT_DTYPES: Mapping[str, torch.dtype | None] = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Choices for `load_model`, as in ComfyUI's own loader.

None keeps the file dtype where the device computes with it.
"""


class ShareVisits(str, Enum):
    """Setting for conditions computed in turn: they may share each block visit."""

    AUTO = "auto"
    """For tested models without other packs' code in their layers, if there is enough memory and it
    saves time."""
    ON = "on"
    """Unless a known reason prevents it."""
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ModelStreaming:
    """Block settings for a native model."""

    policy: OffloadPolicy | AutoOffload
    """An AutoOffload is resolved after a run's first model call."""
    share_visits: ShareVisits = ShareVisits.AUTO


@dataclass(frozen=True, kw_only=True)
class EncoderFiles:
    """Text encoder files used together."""

    paths: tuple[Path, ...]
    kind: str = "stable_diffusion"
    """Model type for the text, by host name."""
    on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Parts of a file with a whole model, as host objects."""

    model: object
    clip: object | None
    """None if the file has no text encoder."""
    vae: object


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """Finished run with a streamed native model and a host sampler."""

    timeline: Timeline
    settings: Mapping[str, str]
    """Settings as text, by name."""
    device: torch.device
    node_id: str | None
    """Sampler node id."""


class NativeModels(Protocol):
    """Native models for the host's own samplers.

    All methods run on the executing node's thread. Each raises NeedsComfyUIError if
    the host has no native models.
    """

    def load_model(self, path: Path, weight_dtype: str, streaming: ModelStreaming) -> object:
        """Return a native MODEL with blocks streamed from `path`, for the host's own samplers.

        Reads the header, and everything outside the blocks.

        Args:
            path: a safetensors or GGUF file in the host's own model format.
            weight_dtype: one of `WEIGHT_DTYPES`.
            streaming: block settings.

        Raises `CheckpointFileError` for a file that cannot be streamed, and ValueError for a
        policy that does not fit the blocks.
        """

    def load_checkpoint(self, path: Path, streaming: ModelStreaming) -> Checkpoint:
        """Return the parts of a checkpoint. The MODEL is as from `load_model`.

        CLIP and VAE are as from the host's own loader, without memory for the MODEL.

        Raises the same errors as `load_model`.
        """

    def load_clip(self, files: EncoderFiles, policy: OffloadPolicy) -> object:
        """Return a native CLIP with blocks streamed from files.

        After an encoding, only blocks kept by the policy use memory.

        Raises `CheckpointFileError` for files that cannot be streamed, and ValueError if the policy
        does not fit the blocks.
        """

    def check_clip(self, path: Path) -> None:
        """Raise the errors `load_clip` would find in one file's header."""

    def stream_clip(self, clip: object, policy: OffloadPolicy) -> object:
        """Return a CLIP like `clip`, with all patches, and blocks streamed from the same files.

        Raises the errors of `load_clip`, and ValueError if the files are unknown.
        """

    def check_model(self, path: Path, weight_dtype: str) -> None:
        """Raise the errors `load_model` would find in the header: format, or another model."""

    def stream_model(self, model: object, streaming: ModelStreaming) -> object:
        """Return a MODEL like `model`, with all patches, and blocks streamed from file or RAM.

        Args:
            model: a MODEL from any loader.
            streaming: block settings.

        Raises ValueError for a model that cannot be streamed or a policy that does not fit the
        blocks, and OSError if the file cannot be read.
        """

    def join_experts(self, high: object, low: object, boundary: float) -> object:
        """Return one MODEL with two streamed experts, for any host sampler.

        A model call runs the expert for its noise level, as in `split_at_boundary`.

        Raises ValueError for a boundary outside 0..1 and for MODELs that are not two experts of one
        model.
        """

    def split_experts(self, model: object) -> tuple[object, object]:
        """Return the high-noise and low-noise MODELs in a joined one, with the shared patches.

        Raises ValueError for any other MODEL.
        """

    def model_run(self, model: object) -> ModelRun:
        """Return the last run of a MODEL from `load_model` or `stream_model`.

        Raises ValueError for a MODEL that does not stream or has not run.
        """
