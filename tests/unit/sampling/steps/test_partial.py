"""Partial schedules, compared with ComfyUI's BasicScheduler."""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.schedules import make_schedule, partial_sigmas, schedule_sigmas


@pytest.mark.parametrize(
    ("steps", "denoise", "total"),
    [(20, 1.0, 20), (20, 0.5, 40), (4, 0.3, 13), (1, 0.99, 1), (7, 0.7, 10)],
)
@pytest.mark.parametrize("name", ["simple", "wan"])
def test_the_end_of_a_longer_schedule(name: str, steps: int, denoise: float, total: int) -> None:
    whole = torch.tensor(make_schedule(name, total, 5.0).sigmas)
    part = schedule_sigmas(name, steps, denoise, 5.0)
    assert part.dtype == torch.float32
    assert torch.equal(part, whole[-(steps + 1) :])
    assert part[-1] == 0


def test_a_schedule_may_be_shorter_than_asked_for() -> None:
    """Some ComfyUI schedules drop duplicate sigmas."""
    assert partial_sigmas(lambda total: torch.tensor([1.0, 0.5, 0.0]), 20, 1.0).tolist() == [
        1.0,
        0.5,
        0.0,
    ]


def test_no_denoise_is_no_step() -> None:
    assert schedule_sigmas("simple", 20, 0.0, 5.0).shape == (0,)


@pytest.mark.parametrize(
    ("steps", "denoise", "shift", "message"),
    [
        (20, 1.5, 5.0, "denoise 1.5: give 0"),
        (20, -0.1, 5.0, "denoise -0.1"),
        (20, float("nan"), 5.0, "denoise nan"),
        (0, 1.0, 5.0, "0 steps: give 1 to 1000"),
        (20, 0.01, 5.0, "2000 steps: give 1 to 1000"),
        (20, 1.0, 0.0, "flow shift 0"),
    ],
)
def test_what_no_schedule_can_be(steps: int, denoise: float, shift: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        schedule_sigmas("simple", steps, denoise, shift)
