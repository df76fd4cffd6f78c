"""Models without ComfyUI: streamed experts and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...sampling.steps import SCHEDULES, schedule_sigmas
from ...schema import OffloadPolicy
from ...schema.refs import ExpertsRef
from ...wan import ExpertPair, ExpertsRegistry
from ...wan.measurement import with_resolved_precision
from ...wan.text import EmbeddingCache
from ..memory import Memory
from ..models import LoadedExperts, Models, NeedsComfyUIError


class EmbeddedModels(Models):
    """Experts and texts, kept between runs.

    Args:
        experts: the open experts.
        memory: memory for the experts.
        check: raises the host's interrupt.
    """

    def __init__(self, experts: ExpertsRegistry, memory: Memory, check: Callable[[], None]) -> None:
        self._experts = experts
        self._memory = memory
        self._check = check
        self._texts = EmbeddingCache()

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        return self._experts.get(
            with_resolved_precision(ref, self._memory.device(), self._experts.free)
        )

    def load_experts(
        self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int
    ) -> LoadedExperts:
        # This host has no other models to evict.
        return LoadedExperts(pair=self.experts(ref), policy=policy, device=self._memory.device())

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        return self._texts.encode(path, texts, device=self._memory.device(), check=self._check)

    def guider(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(
            "a GUIDER needs ComfyUI, because it works with ComfyUI's samplers: run this workflow "
            "there, or use Wan Sampler, which takes the same experts, texts and sigmas"
        )

    def schedule_names(self) -> list[str]:
        return list(SCHEDULES)

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        return schedule_sigmas(name, steps, denoise, flow_shift)

    def clip_kinds(self, files: int) -> list[str]:
        # Schemas need a choice although nothing can be loaded here.
        return [["wan"], ["flux"]][files - 1]
