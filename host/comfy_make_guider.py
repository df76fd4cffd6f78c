"""A guider of both experts, with what the door knows: the memory manager's patcher, the planner, who watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..plan import AutoOffload, ExpertsRef, OffloadJob, OffloadPolicy, Timeline
from ..sampling.cache_settings import cached_policy
from ..wan.compute_dtype import in_own_dtype
from .announced_run import AnnouncedRun
from .auto_offload import Choice
from .comfy_guider import ExpertsGuider
from .guider_settings import GuiderSettings
from .observed import observed
from .run_settings import run_settings

if TYPE_CHECKING:
    from .comfy import ComfyDoor


def make_guider(
    door: ComfyDoor,
    ref: ExpertsRef,
    positive: Sequence[Any],
    negative: Sequence[Any],
    settings: GuiderSettings,
    *,
    flow_shift: float,
    policy: OffloadPolicy | AutoOffload,
) -> ExpertsGuider:
    """See `Door.guider`."""
    ref = in_own_dtype(ref, door.device())

    def choose(job: OffloadJob) -> Choice:
        choice = door.choose_policy(ref, policy, job)
        return replace(choice, policy=cached_policy(choice.policy, settings.cache))

    is_left = isinstance(policy, AutoOffload)
    known = cached_policy(OffloadPolicy.layerwise() if isinstance(policy, AutoOffload) else policy, settings.cache)
    made_by = door.executing_node()

    def watch(
        experts: Sequence[str], expected: Timeline | None, began_with: OffloadPolicy, shape: Sequence[int]
    ) -> AnnouncedRun:
        # By now a sampler executes; its run is shown at the guider.
        return AnnouncedRun(
            door.announce,
            prompt_id=door.run_id(),
            node_id=door.executing_node(),
            shown_at=made_by,
            experts=experts,
            predicted=expected,
            settings=run_settings(ref, policy, began_with, shape, door.device()),
        )

    patcher = door.patcher(ref, known, flow_shift=flow_shift)
    kept = partial(door.known_machine, ref)
    guider = ExpertsGuider(patcher, settings, watch, partial(observed, door), kept, choose if is_left else None)
    guider.set_conds(positive, negative)
    return guider
