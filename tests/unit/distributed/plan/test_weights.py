"""Weight placement between workers, chosen machine by machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.distributed.plan import weights

MS = 1e-3
GB = 10**9
BLOCK = 702_788_608
BLOCKS = 80

_SIZES = {"workers": 8, "block_bytes": BLOCK, "blocks": BLOCKS, "free_bytes": 5 * GB}
_COPIES = {"h2d_s": 28.1 * MS, "h2d_concurrent_s": 28.2 * MS, "shard_h2d_s": 3.6 * MS}
_GATHERS = {"gather_s": 3.0 * MS, "gather_during_h2d_s": 3.2 * MS}
NVLINK = weights.WeightFigures(visit_s=13 * MS, **_SIZES, **_COPIES, **_GATHERS)
"""Eight GPUs at 480p, each with a 25 GB/s link, and 200 GB/s or more between them."""

OWN_PORTS = replace(NVLINK, gather_s=24.6 * MS, gather_during_h2d_s=28.1 * MS, shard_h2d_s=5.0 * MS)
"""Same links without NVLink: the gather uses them too, so each one carries whole blocks anyway."""

_UPLINK = {"h2d_concurrent_s": 112.0 * MS, "shard_h2d_s": 29.0 * MS}
_P2P = {"gather_s": 21.0 * MS, "gather_during_h2d_s": 30 * MS}
SHARED_UPLINK = replace(OWN_PORTS, workers=4, **_UPLINK, **_P2P)
"""Four GPUs behind one 25 GB/s uplink, with P2P between them."""

IN_RAM = {"shard_h2d_s": 31.0 * MS, "gather_s": 45.0 * MS, "gather_during_h2d_s": 59.0 * MS}
NO_P2P = replace(OWN_PORTS, workers=2, **IN_RAM)
"""Two GPUs with a gather through host memory."""


def block_seconds(choice: weights.PlacementChoice, figures: weights.WeightFigures) -> float:
    """Return the seconds per block: compute or fetch time, whichever is longer."""
    fetches = {
        "full": figures.h2d_concurrent_s,
        "sharded": max(figures.shard_h2d_s, figures.gather_during_h2d_s),
        "sharded in VRAM": figures.gather_s,
    }
    return max(figures.visit_s, fetches[choice.placement])


@pytest.mark.parametrize(
    ("figures", "placement", "block_s"),
    [
        # Bound by the bus; room in VRAM; compute hides all; not worth it.
        (NVLINK, "sharded", 13),
        (replace(NVLINK, free_bytes=8 * GB), "sharded in VRAM", 13),
        (replace(NVLINK, visit_s=105 * MS, free_bytes=80 * GB), "full", 105),
        (replace(NVLINK, visit_s=27.5 * MS), "full", 28.2),
        (OWN_PORTS, "full", 28.2),
        (replace(OWN_PORTS, free_bytes=80 * GB), "sharded in VRAM", 24.6),
        (SHARED_UPLINK, "sharded", 30),
        (replace(SHARED_UPLINK, free_bytes=20 * GB), "sharded in VRAM", 21),
        (NO_P2P, "full", 28.2),
    ],
)
def test_the_shortest_stall_is_chosen(figures, placement, block_s):
    choice = weights.choose_weight_placement(figures)
    assert choice.placement == placement
    assert block_seconds(choice, figures) == pytest.approx(block_s * MS)


def test_the_reason_has_the_numbers():
    assert weights.choose_weight_placement(SHARED_UPLINK).reason == (
        "sharded weights: a block of 703 MB in 30.0 ms, not hidden behind compute (13.0 ms for "
        "each); full 112.0 ms, sharded 30.0 ms; the bus gives 25.0 GB/s to one of 4 workers and "
        "6.27 GB/s to each of them at once, a gather moves 33.5 GB/s; shards in VRAM need 14.06 "
        "GB, 5.00 GB are free"
    )
    as_much = "25.0 GB/s to one of 8 workers and as much to each of them at once"
    assert as_much in weights.choose_weight_placement(NVLINK).reason
    hidden = weights.choose_weight_placement(replace(NVLINK, free_bytes=8 * GB))
    assert "in 3.0 ms, hidden behind compute" in hidden.reason


times = st.floats(min_value=1e-5, max_value=1.0)


@given(times, times, times, times, times, times, st.integers(0, 100 * GB))
def test_the_chosen_placement_is_the_fastest(
    visit_s, alone, concurrent, shard, gather, during, free_bytes
):
    copies = {"h2d_s": alone, "h2d_concurrent_s": concurrent, "shard_h2d_s": shard}
    gathers = {"gather_s": gather, "gather_during_h2d_s": during}
    figures = replace(NVLINK, visit_s=visit_s, free_bytes=free_bytes, **copies, **gathers)
    choice: weights.PlacementChoice = weights.choose_weight_placement(figures)
    fetches = [concurrent, max(shard, during)] + [gather] * (figures.shards_bytes <= free_bytes)
    assert block_seconds(choice, figures) <= max(visit_s, min(fetches)) + weights.MIN_GAIN * visit_s
    if choice.placement == "sharded in VRAM":
        assert figures.shards_bytes <= free_bytes
