"""A run of both experts that is ready to begin, on workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..distributed.driver_steps import part_sizes
from ..host import ExpertsRef, host
from ..host.workers_plan import SharedRun
from ..plan import AutoOffload, OffloadPolicy, WorkersRef
from ..sampling import DenoiseRequest, DenoiseResult
from .prepared_run import Computed, OnStep, PreparedRun

if TYPE_CHECKING:
    from ..plan import OffloadJob


def prepare_shared(
    workers: WorkersRef,
    job: OffloadJob,
    ref: ExpertsRef,
    request: DenoiseRequest,
    asked: OffloadPolicy | AutoOffload,
) -> PreparedRun:
    """A run on `workers`, which are started if they are not there; the host's Cancel ends it before the next block.

    Raises MeshError for a layout that does not suit the run, and what starting the workers raises.
    """
    shared = SharedRun(workers=workers, job=job, videos=request.batch, asked=asked)
    plan = host.plan_workers(shared, ref)
    driver = host.workers(workers, plan.mesh)

    def compute(on_step: OnStep) -> Computed:
        ran = driver.denoise(ref, request, plan.policy, on_step=on_step, should_stop=host.should_stop)
        result = DenoiseResult(latents=ran.latents.to(request.noise.device), sigma=ran.sigma, timeline=ran.timeline)
        for reason in reversed(plan.reasons):
            result = result.told_first(reason)
        return Computed(result, ran.timelines)

    parts = len(part_sizes(request.batch, plan.mesh))
    return PreparedRun(policy=plan.policy, device=host.device(), compute=compute, parts=parts)
