"""Noise of a run: seeded noise, and schedules of noise levels.

Torch's global generator is never used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from ...plan.programs import TRAIN_TIMESTEPS
from .errors import RequestError

Level = TypeVar("Level", float, torch.Tensor)


def seeded_noise(
    shape: Sequence[int], seed: int, *, batch_index: Sequence[int] | None = None
) -> torch.Tensor:
    """Return standard normal noise with `shape` [B, ...], float32, on the CPU.

    Args:
        batch_index: index of each sample in its original batch, from a LATENT cut out of one. The
            sample then gets its original noise.

    Raises:
        RequestError: the indices do not fit the number of samples.
    """
    # On the CPU, as in ComfyUI: a GPU draws other numbers from the same seed.
    generator = torch.Generator().manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator)
    if len(batch_index) != shape[0] or min(batch_index) < 0:
        raise RequestError(
            f"batch_index {list(batch_index)} for {shape[0]} samples: give one index >= 0 for each"
        )
    # Draw k depends on the draws before it, so unused ones are made too.
    one = (1, *shape[1:])
    draws = [torch.randn(one, generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([draws[k] for k in batch_index])


def step_seeds(*starts: torch.Tensor | None) -> tuple[int, ...]:
    """Return a seed per sample, derived from its starting tensors [B, ...].

    It does not depend on the rest of the batch, so a sample draws the same noise in any batch and
    on any worker.
    """
    given = [start.detach().to("cpu", torch.float32) for start in starts if start is not None]
    return tuple(_seed(sample) for sample in zip(*given, strict=True))


def _seed(tensors: Sequence[torch.Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


HIGHEST_BELOW_ONE = 1 - 1e-6
"""First sigma in place of 1, as in diffusers' UniPC: a multistep solver computes log(1 - sigma)."""

PURE_NOISE = 1 - 2e-6
"""Least sigma that counts as pure noise. The `wan` schedule starts 1e-6 below 1, from noise
alone."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """N steps: step i goes from `sigmas[i]` to `sigmas[i + 1]`, the model sees `timesteps[i]`."""

    sigmas: tuple[float, ...]
    """N + 1 float32 values, strictly descending from at most 1. The last one is 0 unless noise is
    left over."""
    timesteps: tuple[float, ...]
    """N values. Whole numbers where the schedule truncates them."""

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def until(self, end_step: int, *, leftover_noise: bool) -> Schedule:
        """Return the first `end_step` steps.

        The last one ends at sigma 0 unless `leftover_noise`.

        For all steps, the schedule is returned unchanged, including the last sigma.
        """
        if end_step >= self.steps:
            return self
        end = self.sigmas[end_step] if leftover_noise else 0.0
        return Schedule(sigmas=(*self.sigmas[:end_step], end), timesteps=self.timesteps[:end_step])


def simple_schedule(steps: int, flow_shift: float) -> Schedule:
    """Return ComfyUI's `simple` schedule under a `ModelSamplingSD3` with this shift, bit-equal."""
    # In float32, as in ComfyUI: float64 rounds to other last bits.
    table = _shifted(torch.arange(1, TRAIN_TIMESTEPS + 1) / TRAIN_TIMESTEPS, flow_shift).tolist()
    # ComfyUI divides first and truncates afterwards. Integer division picks another entry at 38,
    # 76, 122, ... steps.
    stride = TRAIN_TIMESTEPS / steps
    return explicit_schedule([*(table[-1 - int(i * stride)] for i in range(steps)), 0.0])


def wan_schedule(steps: int, flow_shift: float) -> Schedule:
    """Return flow sigmas bit-equal to diffusers' `UniPCMultistepScheduler` (0.37 and later)."""
    stride = (1 / TRAIN_TIMESTEPS - 1) / steps
    # u = 1 - 0.999 i / steps, in the order of operations in numpy's `linspace`.
    levels = [_shifted(i * stride + 1, flow_shift) for i in range(steps)]
    levels[0] = HIGHEST_BELOW_ONE
    # diffusers passes integer timesteps, truncated from the float64 level: the first one is 999.
    timesteps = tuple(float(int(level * TRAIN_TIMESTEPS)) for level in levels)
    return Schedule(sigmas=_float32([*levels, 0.0]), timesteps=timesteps)


def explicit_schedule(sigmas: Sequence[float] | torch.Tensor) -> Schedule:
    """Return a schedule with these steps + 1 sigmas, unchanged.

    Timesteps are 1000 times the float32 sigma.

    A last sigma above 0 leaves noise over for another run.

    Raises:
        RequestError: the sigmas do not descend strictly from at most 1 to at least 0.
    """
    levels = _float32(sigmas)
    if len(levels) < 2:
        raise RequestError(
            f"{len(levels)} sigmas make no step: give steps + 1 values, the last one 0 for a clean "
            "end"
        )
    if not 0 < levels[0] <= 1:
        raise RequestError(
            f"the first sigma is {levels[0]:g}: flow sigmas start above 0 and at most at 1"
        )
    if levels[-1] < 0:
        raise RequestError(
            f"the last sigma is {levels[-1]:g}: flow sigmas end at 0, or above it to leave noise "
            "over"
        )
    for i, (here, after) in enumerate(pairwise(levels)):
        if not after < here:
            raise RequestError(
                f"sigma {i + 1} ({after:g}) is not below sigma {i} ({here:g}): sigmas must descend"
            )
    return Schedule(
        sigmas=levels, timesteps=tuple(level * TRAIN_TIMESTEPS for level in levels[:-1])
    )


SCHEDULES: Mapping[str, Callable[[int, float], Schedule]] = {
    "simple": simple_schedule,
    "wan": wan_schedule,
}
"""Schedule functions by name, called with step count and flow shift."""


def make_schedule(name: str, steps: int, flow_shift: float) -> Schedule:
    """Return the schedule with this name.

    Raises:
        RequestError: the name is unknown, or the step count or the shift is out of range.
    """
    if name not in SCHEDULES:
        raise RequestError(
            f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}, or give sigmas"
        )
    check_steps(steps)
    check_flow_shift(flow_shift)
    return SCHEDULES[name](steps, flow_shift)


def _shifted(u: Level, flow_shift: float) -> Level:
    return flow_shift * u / (1 + (flow_shift - 1) * u)


def _float32(values: Sequence[float] | torch.Tensor) -> tuple[float, ...]:
    return tuple(torch.as_tensor(values, dtype=torch.float32).flatten().tolist())


def check_steps(steps: int) -> None:
    """Raise RequestError unless `steps` is 1 to `TRAIN_TIMESTEPS`."""
    if not 1 <= steps <= TRAIN_TIMESTEPS:
        raise RequestError(f"{steps} steps: give 1 to {TRAIN_TIMESTEPS}")


def check_flow_shift(flow_shift: float) -> None:
    """Raise RequestError unless the flow shift is a positive number."""
    if not (math.isfinite(flow_shift) and flow_shift > 0):
        raise RequestError(
            f"flow shift {flow_shift:g}: give a positive number (Wan2.2: 12 for text, 5 for images)"
        )


def partial_sigmas(make: Callable[[int], torch.Tensor], steps: int, denoise: float) -> torch.Tensor:
    """Return the last `steps` + 1 sigmas of a schedule with int(steps / denoise) steps.

    ComfyUI's BasicScheduler does the same.

    Args:
        make: returns the sigmas for a schedule with n steps, float32.
        denoise: 0 to 1. 0 returns an empty tensor, which changes nothing.

    Raises:
        RequestError: `steps` or `denoise` is out of range.
    """
    check_steps(steps)
    if not 0 <= denoise <= 1:
        raise RequestError(
            f"denoise {denoise:g}: give 0 (change nothing) to 1 (start from noise alone)"
        )
    if denoise == 0:
        return torch.empty(0)
    return make(int(steps / denoise))[-(steps + 1) :]


def schedule_sigmas(name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
    """Return `partial_sigmas` for a schedule in `SCHEDULES`."""
    return partial_sigmas(
        lambda total: torch.tensor(make_schedule(name, total, flow_shift).sigmas), steps, denoise
    )
