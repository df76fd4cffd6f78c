"""Experts in ComfyUI's memory manager, with texts and guider."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfy.model_management
import torch

from ....devices import auto_dtype
from ....plan import AutoOffload
from ....schema import OffloadPolicy
from ....schema.refs import ExpertsRef
from ....wan import ExpertPair
from ....wan.text import open_text_encoder
from ...api import Host
from ...models import GuiderSettings, LoadedExperts, Models
from .. import versions
from ..experts.guider import ExpertsGuider
from ..experts.patcher import OpenExperts
from ..samplers import schedule_names, schedule_sigmas


class ComfyModels(Models):
    """Models for ComfyUI's samplers and memory manager.

    Args:
        host: host of the runs.
        experts: the open experts.
    """

    def __init__(self, host: Host, experts: OpenExperts) -> None:
        self._host = host
        self._experts = experts

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        return self._experts.get(ref)

    def load_experts(
        self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int
    ) -> LoadedExperts:
        patcher = self._experts.patcher(ref, policy)
        # ComfyUI offers the policy the free memory above this minimum.
        comfy.model_management.load_models_gpu(
            [patcher], memory_required=working_bytes, minimum_memory_required=working_bytes
        )
        return patcher.loaded_experts()

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        # Not cached here: ComfyUI's node cache skips the node for equal texts.
        device = self._host.memory.device()
        with open_text_encoder(path, compute_dtype=auto_dtype(device)) as encoder:
            return encoder.encode(texts, device=device, check=self._host.events.raise_if_stopped)

    def guider(
        self,
        ref: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        settings: GuiderSettings,
        *,
        flow_shift: float,
        policy: OffloadPolicy | AutoOffload,
    ) -> ExpertsGuider:
        # The smallest policy until the first run, when the planner gets the sizes it needs.
        first = OffloadPolicy.layerwise() if isinstance(policy, AutoOffload) else policy
        patcher = self._experts.patcher(ref, settings.options.policy(first), flow_shift=flow_shift)
        guider = ExpertsGuider(self._host, patcher, settings, policy)
        guider.set_conds(positive, negative)
        return guider

    clip_kinds = staticmethod(versions.clip_kinds)
    schedule_names = staticmethod(schedule_names)
    sigmas = staticmethod(schedule_sigmas)
