"""A sampler's run once more, measured for a cache, in this process."""

from __future__ import annotations

from ..host import host
from ..host.observed import observed
from ..plan.version import VERSION
from ..sampling import Cancelled, StepProgress
from ..sampling.calibrate import calibrate, calibration_bytes, calibration_job
from ..sampling.mag_table import MagTable
from .sampler_run import SamplerRun


def calibrate_run(run: SamplerRun, *, node_id: str | None) -> MagTable:
    """Compute `run` again with no cache and measure; the host's Cancel ends it before the next block.

    Raises RequestError for a run that cannot be measured.
    """
    pair = host.experts(run.experts)
    request, job = run.request, calibration_job(pair, run.request, host.device())
    choice = host.choose_policy(run.experts, run.asked, job)
    needed = calibration_bytes(pair, request, chunk_tokens=choice.policy.chunk_tokens)
    pair, policy, device = host.load_experts(run.experts, choice.policy, working_bytes=needed)
    progress = host.progress(len(request.course().steps), node_id)

    def on_step(step: StepProgress) -> None:
        progress.update(step.done, denoised=step.denoised)

    try:
        table, _ = calibrate(
            pair,
            request,
            policy=policy,
            device=device,
            source=_source(run),
            on_step=on_step,
            should_stop=host.should_stop,
            observe=observed(host),
        )
    except Cancelled:
        host.raise_if_stopped()
        raise
    return table


def _source(run: SamplerRun) -> str:
    """What was measured, for a reader of the file."""
    ref, shape = run.experts, run.request.noise.shape
    files = " and ".join(path.name for path in (ref.high_noise, ref.low_noise) if path is not None)
    loras = ", ".join(sorted({path.name for lora in ref.loras for path in (lora.high_noise, lora.low_noise) if path}))
    with_loras = f" with {loras}" if loras else ""
    steps = run.request.course().schedule.steps
    return f"measured with WanStream {VERSION} on {files}{with_loras}, {steps} steps, latents {list(shape)}"
