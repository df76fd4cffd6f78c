"""Noise compared with torch's global generator, as used by ComfyUI."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.sampling.steps import RequestError, seeded_noise
from wanstream.sampling.steps.schedules import step_seeds

SHAPE = (2, 16, 2, 4, 6)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**63, 2**64 - 1])
def test_same_numbers_as_the_global_generator(seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected = torch.randn(SHAPE, dtype=torch.float32, device="cpu")
    assert torch.equal(seeded_noise(SHAPE, seed), expected)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    seeded_noise(SHAPE, 3)
    seeded_noise(SHAPE, 3, batch_index=[1, 0])
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_batch_index_gives_each_sample_the_draw_of_its_place(
    batch_index: list[int], seed: int
) -> None:
    noise = seeded_noise((len(batch_index), 16, 1, 2, 2), seed, batch_index=batch_index)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draws = [torch.randn(1, 16, 1, 2, 2) for _ in range(max(batch_index) + 1)]
    assert torch.equal(noise, torch.cat([draws[i] for i in batch_index]))


@pytest.mark.parametrize("batch_index", [[0], [0, 1, 2], [0, -1]])
def test_batch_index_that_does_not_fit(batch_index: list[int]) -> None:
    with pytest.raises(RequestError, match="for 2 samples"):
        seeded_noise(SHAPE, 0, batch_index=batch_index)


def test_a_seed_on_the_way_is_the_samples_own() -> None:
    noise, latent = seeded_noise(SHAPE, 0), seeded_noise(SHAPE, 1)
    first, second = step_seeds(noise, None)
    assert first != second
    assert step_seeds(noise[1:]) == (second,), "whichever others it is computed with"
    assert step_seeds(noise) == (first, second), "every time"
    assert step_seeds(noise, latent)[0] != first
    assert len(set(step_seeds(torch.zeros(SHAPE), latent))) == 2, (
        "a run that adds no noise starts from its latent"
    )
    assert step_seeds(noise, latent.bfloat16()) == step_seeds(noise, latent.bfloat16().float())
