"""Trials of a benchmark with warm-ups and pauses, and digests by which runs are compared."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from ...bench import Trial
from ...sampling import DenoiseRequest, DenoiseResult, RequestError
from ...schema import FRAMES_PER_LATENT
from ...wan import Nag, space_of

MAX_RUNS = 100
MAX_PAUSE_S = 3600.0
POLL_S = 0.1
"""Seconds between two checks for a Cancel during a pause."""


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """Number of runs of each variant, and the pause before each run.

    Raises:
        RequestError: a number is out of range.
    """

    repeats: int = 1
    """Measured runs."""
    warmup: int = 0
    """Runs before them that are not counted."""
    cooldown_s: float = 0.0
    """Pause before each run in seconds."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RequestError(f"{self.repeats} repeats measure nothing: give 1 to {MAX_RUNS}")
        for name in ("repeats", "warmup"):
            if not 0 <= getattr(self, name) <= MAX_RUNS:
                raise RequestError(f"{name} is {getattr(self, name)}: give at most {MAX_RUNS}, and not less than 0")
        if not (math.isfinite(self.cooldown_s) and 0 <= self.cooldown_s <= MAX_PAUSE_S):
            raise RequestError(f"cooldown_s is {self.cooldown_s:g}: give 0 to {MAX_PAUSE_S:g} seconds")

    @property
    def runs(self) -> int:
        """Number of runs of each variant, warm-ups included."""
        return self.warmup + self.repeats


def trials(times: TrialTimes, run: Callable[[], DenoiseResult], *, check: Callable[[], None]) -> Iterator[Trial]:
    """Run one variant as often as `times` says and yield each trial, warm-ups first.

    `check` is called during the pauses and ends them by raising. An error of `run` ends the trials.
    """
    for number in range(times.runs):
        pause(times.cooldown_s, check)
        yield as_trial(run(), warmup=number < times.warmup)


def pause(seconds: float, check: Callable[[], None]) -> None:
    """Sleep; `check` is called at the start, every `POLL_S` seconds and at the end, and may raise to stop."""
    until = time.monotonic() + seconds
    check()
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(min(remaining, POLL_S))
        check()


def as_trial(result: DenoiseResult, *, warmup: bool = False) -> Trial:
    """Return the trial of a report for this result."""
    return Trial(timeline=result.timeline, latents=tensor_digest(result.latents), warmup=warmup)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of shape, dtype and values in hex."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def job_digest(request: DenoiseRequest, experts: object) -> str:
    """Return a digest that is equal for equal requests to equal experts; `experts` is a reference to them."""
    digest = hashlib.sha256(repr(experts).encode())
    for field in fields(request):
        digest.update(f"{field.name}={_value_digest(getattr(request, field.name))};".encode())
    return digest.hexdigest()


def _value_digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_value_digest, value))}]"
    return repr(value)


def with_steps(request: DenoiseRequest, steps: int | None) -> DenoiseRequest:
    """Return the request with another number of steps, or unchanged for None; raises RequestError if it has sigmas."""
    if steps is None:
        return request
    if request.sigmas is not None:
        raise RequestError(
            f"{steps} steps were requested, but the run has its sigmas from another node: leave steps empty"
        )
    return replace(request, steps=steps)


def describe_request(request: DenoiseRequest) -> dict[str, str]:
    """Return the settings of a request by name, as text for a report."""
    _, channels, frames, height, width = request.noise.shape
    pixels = space_of(channels).pixels
    step_plan = request.step_plan
    taken = [step_plan.experts[step] for step in step_plan.steps]
    levels = f"{request.schedule}, flow shift {request.flow_shift:g}" if request.sigmas is None else "from another node"
    return {
        "Size": f"{width * pixels}x{height * pixels}, {_frames(frames)} frames",
        "Videos": str(request.batch),
        "Steps": f"{len(taken)}: {taken.count('high')} high-noise, {taken.count('low')} low-noise",
        "Solver": request.solver,
        "Sigmas": levels,
        "Guidance": _guidance(request),
        **({} if request.nag is None else {"NAG": _nag(request.nag)}),
        **_windows(request),
        **({} if request.cache is None else {"Cache": request.cache.words}),
    }


def _guidance(request: DenoiseRequest) -> str:
    if request.guidance_steps is not None:
        return ", ".join(f"{scale:g}" for scale in request.guidance_steps) + ", step by step"
    high, low = request.guidance
    return f"{high:g} high-noise, {low:g} low-noise"


def _nag(nag: Nag) -> str:
    return f"scale {nag.scale:g}, tau {nag.tau:g}, alpha {nag.alpha:g}, in steps of guidance 1"


def _windows(request: DenoiseRequest) -> dict[str, str]:
    windows = request.windows
    if windows is None:
        return {}
    stride = "" if windows.stride == 1 else f", stride {windows.stride}"
    fixed = "" if windows.shift_windows else ", at fixed positions"
    text = f"{_frames(windows.frames)} frames, {windows.overlap} latent frames shared{stride}, {windows.blend}{fixed}"
    return {"Context windows": text}


def _frames(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1
