"""A run of both experts that is ready to begin, in this process: its policy, and what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..host import ExpertsRef, host
from ..host.observed import observed
from ..plan import AutoOffload, OffloadPolicy, Timeline
from ..sampling import DenoiseRequest, DenoiseResult, StepProgress, check_room, denoise, working_bytes
from ..sampling.cache_settings import cached_policy
from ..sampling.predicted import predicted_timeline

if TYPE_CHECKING:
    import torch

    from ..plan import OffloadJob
    from ..wan import ExpertPair


OnStep: TypeAlias = "Callable[[StepProgress], None]"


class Computed(NamedTuple):
    """What came of a run."""

    result: DenoiseResult
    ranks: Mapping[int, Timeline]
    """What each worker did, where there were some."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """Everything is decided; `compute` does it, and tells every step."""

    policy: OffloadPolicy
    device: torch.device
    compute: Callable[[OnStep], Computed]
    predicted: Timeline | None = None
    parts: int = 1
    """In how many the videos are computed; each step is told for each of them."""


def prepare_here(
    pair: ExpertPair,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
    *,
    traces: Path | None,
) -> PreparedRun:
    """A run on the host's device; the host's Cancel ends it before the next block."""
    choice = host.choose_policy(ref, asked, job)
    choice = replace(choice, policy=cached_policy(choice.policy, request.cache))
    chunk = choice.policy.chunk_tokens
    needed = working_bytes(pair, request.computed_shape, guided=request.guided, chunk_tokens=chunk, cache=request.cache)
    pair, policy, device = host.load_experts(ref, choice.policy, working_bytes=needed)
    check_room(pair, request, policy, device)
    machine = host.known_machine(ref, job.expert)
    predicted = None if machine is None else predicted_timeline(pair, request, policy, machine=machine, device=device)

    def compute(on_step: OnStep) -> Computed:
        result = denoise(
            pair,
            request,
            policy=policy,
            device=device,
            on_step=on_step,
            should_stop=host.should_stop,
            revise=choice.revise_under(policy),
            observe=observed(host) if traces is None else replace(observed(host), trace=traces),
        )
        return Computed(result.told_first(choice.reason), {})

    return PreparedRun(policy=policy, device=device, compute=compute, predicted=predicted)
