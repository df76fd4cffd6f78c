"""The split at the boundary, over other implementations' schedules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from wanstream.plan.programs import split_at_boundary

Schedule = Callable[[int, float], list[float]]


def shifted(u: np.ndarray, shift: float) -> np.ndarray:
    return shift * u / (1 + (shift - 1) * u)


def comfy_simple(steps: int, shift: float) -> list[float]:
    """Every int(1000 / steps)-th of 1000 sigmas, all in float32.

    The timestep is 1000 times the float32 sigma.
    """
    u = (
        (np.arange(1, 1001, dtype=np.float32) / np.float32(1000))
        * np.float32(1000)
        / np.float32(1000)
    )
    sigmas = np.float32(shift) * u / (np.float32(1) + np.float32(shift - 1) * u)
    return [1000 * float(sigmas[-(1 + int(i * (1000 / steps)))]) for i in range(steps)]


def comfy_simple_unipc(steps: int, shift: float) -> list[float]:
    """Return the schedule for one step more, without the last sigma above 0."""
    return comfy_simple(steps + 1, shift)[:-1]


def diffusers_unipc(steps: int, shift: float) -> list[float]:
    sigmas = shifted(np.linspace(1, 0.001, steps + 1)[:-1], shift)
    sigmas[0] -= 1e-6
    return [float(int(1000 * sigma)) for sigma in sigmas]


def wan_repository(steps: int, shift: float) -> list[float]:
    sigmas = shifted(np.linspace(0.999, 0, steps + 1)[:-1], shift)
    return [float(int(1000 * sigma)) for sigma in sigmas]


def diffusers_flow_match_euler(steps: int, shift: float) -> list[float]:
    """Shifts twice: the range ends at the shifted 0.001, and is then shifted again."""
    lowest = shifted(np.array(0.001), shift)
    return [
        1000 * float(sigma)
        for sigma in shifted(np.linspace(1, lowest, steps), shift).astype(np.float32)
    ]


SCHEDULES: tuple[Schedule, ...] = (
    comfy_simple,
    comfy_simple_unipc,
    diffusers_unipc,
    wan_repository,
    diffusers_flow_match_euler,
)

# First low-noise step at boundary 0.875 | 0.900, one column per schedule above.
SWITCH_STEPS = """
 4  3   2|1   2|2   2|2   2|1   1|1
 4  5   2|2   3|2   2|2   2|2   2|2
 4  8   3|2   3|3   3|2   3|2   2|2
 4 12   3|3   4|3   3|3   3|3   2|2
20  3   6|5   7|6   7|6   6|5   6|5
20  5   9|8   9|8   9|8   9|8   8|7
20  8  11|10 12|10 11|10 11|10 11|10
20 12  13|12 14|13 13|12 13|12 13|11
27  3   9|7   9|7   9|7   9|7   8|7
27  5  12|10 12|11 12|10 12|10 11|10
27  8  15|13 15|14 15|13 15|13 14|13
27 12  18|16 18|17 18|16 18|16 17|16
30  3   9|8  10|8  10|8   9|8   9|8
30  5  13|11 13|12 13|11 13|11 13|11
30  8  17|15 17|15 17|15 16|15 16|14
30 12  19|18 20|18 19|18 19|18 19|17
40  3  12|10 13|11 13|11 12|10 12|10
40  5  17|15 18|15 17|15 17|15 17|14
40  8  22|19 22|20 22|19 22|19 21|19
40 12  26|23 26|24 26|23 26|23 25|23
"""


@pytest.mark.parametrize("row", SWITCH_STEPS.strip().splitlines())
def test_switch_steps_of_every_known_schedule(row: str) -> None:
    steps, shift, *expected = row.split()
    found = []
    for schedule in SCHEDULES:
        timesteps = schedule(int(steps), float(shift))
        assert len(timesteps) == int(steps)
        found.append(f"{split_at_boundary(timesteps, 0.875)}|{split_at_boundary(timesteps, 0.9)}")
    assert found == expected


def test_a_step_is_high_noise_while_it_starts_at_or_above_the_boundary() -> None:
    assert split_at_boundary([999.0, 875.0, 874.9999, 500.0], 0.875) == 2


@pytest.mark.parametrize(
    ("timesteps", "boundary_ratio", "switch"),
    [
        ([], 0.875, 0),
        ([1000.0], 1.0, 1),
        ([999.0, 500.0], 1.0, 0),
        ([999.0, 0.0], 0.0, 2),
        ([999.0, 999.0, 999.0, 10.0], 0.9, 3),
    ],
)
def test_one_expert_may_run_every_step(
    timesteps: list[float], boundary_ratio: float, switch: int
) -> None:
    assert split_at_boundary(timesteps, boundary_ratio) == switch


@pytest.mark.parametrize("boundary_ratio", [-0.1, 1.001, 875.0, float("nan")])
def test_a_boundary_outside_0_to_1_is_refused(boundary_ratio: float) -> None:
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        split_at_boundary([999.0, 500.0], boundary_ratio)


@pytest.mark.parametrize("timesteps", [[500.0, 999.0], [999.0, float("nan"), 3.0]])
def test_timesteps_that_rise_are_refused(timesteps: list[float]) -> None:
    with pytest.raises(ValueError, match="must not rise: step 0"):
        split_at_boundary(timesteps, 0.875)
