"""Host models: streamed experts, text encoding, a guider, and the host's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..plan import AutoOffload
from ..plan.programs import TRAIN_TIMESTEPS, expert_at
from ..sampling.inputs import RequestOptions
from ..sampling.steps import Guidance, RequestError
from ..schema import OffloadPolicy
from ..schema.refs import ExpertsRef
from ..wan import ExpertPair

NO_OPTIONS = RequestOptions()


class NeedsComfyUIError(ValueError):
    """The embedded host does not support a ComfyUI operation. The message has the alternative."""


class LoadedExperts(NamedTuple):
    """An open pair, its device, and the policy that fits. It may be smaller than requested."""

    pair: ExpertPair
    policy: OffloadPolicy
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """Guider settings. Raises RequestError for a boundary ratio outside 0 to 1."""

    boundary_ratio: float
    guidance: Guidance
    options: RequestOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        if self.guidance.context != 1:
            raise RequestError(
                f"context_guidance is {self.guidance.context:g}, which Wan Guider does not apply, "
                "because ComfyUI combines two predictions there: use Wan Sampler (streamed), or "
                "set it to 1 in Wan Guidance"
            )
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 "
                "for images)"
            )

    def expert(self, sigma: float) -> str:
        """Return the expert for a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)


class Models(Protocol):
    """Host models. All methods run on the executing node's thread."""

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        """Return the open pair named by `ref`, with dtype "auto" resolved for the host's device.

        It stays open until another pair is requested or workers need the memory.
        """

    def load_experts(
        self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int
    ) -> LoadedExperts:
        """Load the pair named by `ref`, and free `working_bytes` for the computation.

        If the host has less memory, fewer blocks are resident than `policy` requests. The log shows
        the numbers.
        """

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return text embeddings from the encoder at `path`, on the CPU. A host may cache them.

        Raises PromptError, the host's interrupt before a block, and the errors from opening the
        encoder.
        """

    def guider(
        self,
        ref: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        settings: GuiderSettings,
        *,
        flow_shift: float,
        policy: OffloadPolicy | AutoOffload,
    ) -> object:
        """Return a native GUIDER that runs both experts in `ref` under `policy` in host samplers.

        Runs are shown on the node that executes now.

        Raises NeedsComfyUIError if the host has no samplers, and `RequestError` for inputs refused
        by the experts.
        """

    def schedule_names(self) -> list[str]:
        """Return the valid names for `sigmas`, including "simple" and "wan"."""

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        """Return the last `steps` + 1 sigmas from a schedule over int(steps / denoise) steps.

        They are float32 on the CPU.

        Empty for a denoise of 0. Raises `RequestError` for numbers that define no schedule.
        """

    def clip_kinds(self, files: int) -> list[str]:
        """Return the `EncoderFiles.kind` choices for one or two files."""
