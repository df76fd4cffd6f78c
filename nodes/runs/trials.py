"""The runs of a benchmark, one after the other, with warm-ups and pauses; and what tells two of them apart."""

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

MOST_RUNS = 100
LONGEST_PAUSE_S = 3600.0
LOOK_S = 0.1
"""How often a pause looks whether it is still wanted."""


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """How often each variant is run, and how long the machine rests before a run.

    Raises RequestError for a number that measures nothing, or out of range.
    """

    repeats: int = 1
    """Runs that count."""
    warmup: int = 0
    """Runs before them that do not."""
    cooldown_s: float = 0.0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RequestError(f"{self.repeats} repeats measure nothing: give 1 to {MOST_RUNS}")
        for name in ("repeats", "warmup"):
            if not 0 <= getattr(self, name) <= MOST_RUNS:
                raise RequestError(f"{name} is {getattr(self, name)}: give at most {MOST_RUNS}, and not less than 0")
        if not (math.isfinite(self.cooldown_s) and 0 <= self.cooldown_s <= LONGEST_PAUSE_S):
            raise RequestError(f"cooldown_s is {self.cooldown_s:g}: give 0 to {LONGEST_PAUSE_S:g} seconds")

    @property
    def runs(self) -> int:
        """Of each variant, warm-ups too."""
        return self.warmup + self.repeats


def trials(times: TrialTimes, run: Callable[[], DenoiseResult], *, check: Callable[[], None]) -> Iterator[Trial]:
    """Run one variant as often as `times` says, each run after a pause; warm-ups come first.

    `check` is asked during the pauses and ends them by raising. What `run` raises ends the trials.
    """
    for number in range(times.runs):
        pause(times.cooldown_s, check)
        yield as_trial(run(), warmup=number < times.warmup)


def pause(seconds: float, check: Callable[[], None]) -> None:
    """Wait; `check` is asked at once, several times a second, and at the end."""
    until = time.monotonic() + seconds
    check()
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_S))
        check()


def as_trial(result: DenoiseResult, *, warmup: bool = False) -> Trial:
    """What a report keeps of a run."""
    return Trial(timeline=result.timeline, latents=tensor_digest(result.latents), warmup=warmup)


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of shape, dtype and values, in hex."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def job_digest(request: DenoiseRequest, experts: object) -> str:
    """Equal for equal requests to equal experts; `experts` is a value that names them."""
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
    """The request with another number of steps; None leaves it as it is. Raises RequestError where that cannot be."""
    if steps is None:
        return request
    if request.sigmas is not None:
        raise RequestError(
            f"{steps} steps were asked for, but the run has its sigmas from another node: leave steps empty"
        )
    return replace(request, steps=steps)


def describe_request(request: DenoiseRequest) -> dict[str, str]:
    """What a request asks for, by setting, for a reader."""
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
    stay = "" if windows.shift_windows else ", staying where they are"
    said = f"{_frames(windows.frames)} frames, {windows.overlap} latent frames shared{stride}, {windows.blend}{stay}"
    return {"Context windows": said}


def _frames(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1
