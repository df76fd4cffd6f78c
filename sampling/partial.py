"""The sigmas of a schedule, or of its last part: what a `denoise` below 1 asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import RequestError
from .schedules import check_steps, make_schedule


def partial_sigmas(make: Callable[[int], torch.Tensor], steps: int, denoise: float) -> torch.Tensor:
    """The last `steps` + 1 sigmas of a schedule of int(steps / denoise) steps, as ComfyUI's BasicScheduler takes them.

    `make(n)` gives the sigmas of a schedule of n steps. Float32; empty for a denoise of 0, which changes nothing.
    Raises `RequestError` for a denoise outside 0 to 1.
    """
    check_steps(steps)
    if not 0 <= denoise <= 1:
        raise RequestError(f"denoise {denoise:g}: give 0 (change nothing) to 1 (start from noise alone)")
    if denoise == 0:
        return torch.empty(0)
    return make(int(steps / denoise))[-(steps + 1) :]


def schedule_sigmas(name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
    """`partial_sigmas` of one of `SCHEDULES`."""
    return partial_sigmas(lambda total: torch.tensor(make_schedule(name, total, flow_shift).sigmas), steps, denoise)
