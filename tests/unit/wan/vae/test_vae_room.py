"""Tiles by memory: the choice fits and computes least.

A budget too small for any tile is refused with numbers.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.wan.vae.memory import (
    DecodeNeeds,
    VaeMemoryError,
    choose_tiling,
    shared_tiling,
    smaller_tiling,
)
from wanstream.wan.vae.tiles import Tiling

MB = 1_000_000


def _needs(
    height: int, width: int, frames: int = 81, *, to_file: bool = False, per_latent: int = 8
) -> DecodeNeeds:
    return DecodeNeeds(
        height=height,
        width=width,
        frames=frames,
        pixel_bytes=1_463_000,
        value_bytes=1 if to_file else 4,
        keeps_frames=not to_file,
        per_latent=per_latent,
    )


sizes = st.integers(1, 160)
budgets = st.integers(0, 30_000 * MB)


@given(
    sizes,
    sizes,
    st.sampled_from([1, 5, 81]),
    budgets,
    st.booleans(),
    st.booleans(),
    st.sampled_from([8, 16]),
)
def test_the_choice_fits_and_computes_least_of_the_large_ones(
    height: int, width: int, frames: int, budget: int, shared: bool, to_file: bool, per_latent: int
) -> None:
    needs = _needs(height, width, frames, to_file=to_file, per_latent=per_latent)
    every = [Tiling.of(per_latent * size, per_latent) for size in range(8, max(height, width), 4)]
    fitting = [tiling for tiling in every if needs.fit(tiling, budget, shared=shared)]
    if not fitting and not needs.fit(None, budget, shared=shared):
        with pytest.raises(VaeMemoryError, match=f"{budget / 1e9:.2f} GB given"):
            choose_tiling(needs, budget, shared=shared)
        return
    chosen = choose_tiling(needs, budget, shared=shared)
    assert needs.fit(chosen, budget, shared=shared)
    if needs.fit(None, budget, shared=shared):
        assert chosen is None, "whole frames are the VAE's own picture"
    else:
        assert chosen in fitting
        assert chosen.blended * 4 == chosen.pixels
        large = [
            tiling
            for tiling in fitting
            if tiling.pixels >= 0.75 * max(each.pixels for each in fitting)
        ]
        assert chosen in large
        assert chosen.computed(height, width) == min(
            tiling.computed(height, width) for tiling in large
        )


@given(sizes, sizes, st.integers(1, 8), st.integers(1, 3), budgets, st.booleans())
def test_workers_get_tiles_that_fit_and_each_gets_one_where_there_are_enough(
    height: int, width: int, workers: int, videos: int, budget: int, shared: bool
) -> None:
    needs = _needs(height, width)
    if not any(
        needs.fit(Tiling.of(size), budget, shared=shared)
        for size in (64, 8 * max(8, height, width))
    ):
        with pytest.raises(VaeMemoryError, match=f"{budget / 1e9:.2f} GB given"):
            shared_tiling(needs, budget, shared=shared, workers=workers, videos=videos)
        return
    chosen = shared_tiling(needs, budget, shared=shared, workers=workers, videos=videos)
    assert needs.fit(chosen, budget, shared=shared)
    most = videos * len(Tiling.of(64).tiles(height, width))
    assert videos * len(chosen.tiles(height, width)) >= min(workers, most)


def test_a_picture_is_not_cut_for_one_worker_and_not_into_crumbs_for_eight() -> None:
    def share(**given: int) -> Tiling:
        return shared_tiling(_needs(90, 160), 60_000 * MB, shared=False, **given)

    assert not share(workers=1, videos=1).cuts(90, 160)
    assert not share(workers=2, videos=2).cuts(90, 160)
    eight = share(workers=8, videos=1)
    assert len(eight.tiles(90, 160)) >= 8
    assert eight.pixels >= 256


@given(sizes, sizes)
def test_smaller_tiles_take_about_half_until_there_are_none(height: int, width: int) -> None:
    needs = _needs(height, width)
    tiling, tries = None, []
    while True:
        tries.append(needs.device_bytes(tiling))
        tiling = smaller_tiling(needs, tiling)
        if tiling is None:
            break
    assert len(tries) <= 12
    for before, after in pairwise(tries):
        assert after < before
        assert after <= 0.5 * before or after == tries[-1], "the smallest tile ends it"
    assert (
        tries[-1] == needs.pixel_bytes * min(height, 8) * min(width, 8) or max(height, width) <= 8
    )


def test_of_1280x720_a_gigabyte_is_tiles_of_about_200_pixels() -> None:
    tiling = choose_tiling(_needs(90, 160, 5), 1000 * MB, shared=False)
    assert tiling is not None
    assert 160 <= tiling.pixels <= 208


def test_frames_in_the_same_memory_leave_less_for_tiles() -> None:
    apart, together, to_file = (
        choose_tiling(needs, 8000 * MB, shared=shared)
        for needs, shared in [
            (_needs(90, 160), False),
            (_needs(90, 160), True),
            (_needs(90, 160, to_file=True), True),
        ]
    )
    assert apart is not None
    assert together is not None
    assert to_file is not None
    assert together.pixels < to_file.pixels < apart.pixels


def test_a_file_takes_no_room_for_whole_frames_that_have_left() -> None:
    short, long = (_needs(60, 104, frames, to_file=True) for frames in (5, 801))
    assert short.host_bytes(None) == long.host_bytes(None)
    assert short.host_bytes(Tiling.of(256)) < long.host_bytes(Tiling.of(256))


def test_a_budget_for_which_the_smallest_tile_is_too_large_is_refused_with_numbers() -> None:
    said = (
        r"decoding 1280x720 frames in tiles of 64 pixels, .* takes 0\.09 GB of working memory; "
        r"0\.05 GB given: give"
    )
    with pytest.raises(VaeMemoryError, match=said):
        choose_tiling(_needs(90, 160), 50 * MB, shared=False)
    with pytest.raises(
        VaeMemoryError, match=r"0\.09 GB of working memory and 1\.\d\d GB for its 81 frames; 0\.1"
    ):
        choose_tiling(_needs(90, 160), 100 * MB, shared=True)
