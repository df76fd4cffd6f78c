"""Bytes and seconds that the workers of a cell tell each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.plan import T2V_A14B, Links, Mesh, OffloadJob
from wanstream.plan.fleet_exchange import gather_exchange, handover_seconds, lane_exchange, step_exchange

TOKENS = 32_760
BLOCK = T2V_A14B.streamed_bytes()
JOB = OffloadJob(
    expert=T2V_A14B,
    tokens=TOKENS,
    lanes={"high": 2, "low": 2},
    experts_of_steps=("high", "low"),
    stored_bytes=BLOCK,
    file_bytes=BLOCK,
    computed_bytes=BLOCK,
    staying_bytes=0,
)
TENSOR = TOKENS * 5120 * 2
LATENT = 16 * 21 * 60 * 104 * 4
LINKS = Links(
    name="test",
    origin="made up",
    peer_bytes_per_s=1e9,
    shares_bus=False,
    ram_bytes_per_s=1e12,
    network_bytes_per_s=8e8,
    workers_per_machine=8,
    latency_s=0.0,
)


@pytest.mark.parametrize(
    ("mesh", "nbytes"),
    [
        (Mesh(), 0),
        (Mesh(cfg=2), 0),
        (Mesh(data=4, stage=2), 0),
        # 335 MB of queries, keys, values and output per worker, of which it has a quarter itself.
        (Mesh(ulysses=4), 4 * TENSOR / 4 * 3 / 4),
        (Mesh(ulysses=8), 4 * TENSOR / 8 * 7 / 8),
        # Keys and values of all others.
        (Mesh(ring=4), 2 * TENSOR * 3 / 4),
        (Mesh(ring=2, ulysses=2), 4 * TENSOR / 4 / 2 + 2 * TENSOR / 4),
    ],
)
def test_tokens_and_heads_change_hands(mesh: Mesh, nbytes: float) -> None:
    told = lane_exchange(JOB, mesh, LINKS)
    assert told.nbytes == pytest.approx(nbytes)
    assert told.seconds == pytest.approx(nbytes / 1e9)


def test_335_megabytes_are_sent_for_four_workers() -> None:
    assert pytest.approx(335e6, rel=0.01) == 4 * TENSOR / 4


@pytest.mark.parametrize(
    ("mesh", "near", "far"),
    [
        # Of 15 others 8 stand on the other machine, whose wire all 8 workers share.
        (Mesh(ulysses=16), 4 * TENSOR / 16 * 7 / 16, 4 * TENSOR / 16 * 8 / 16),
        # A ring over two machines, Ulysses inside each.
        (Mesh(ring=2, ulysses=8), 4 * TENSOR / 16 * 7 / 8, 2 * TENSOR / 16),
        # Two machines, but no cell over both.
        (Mesh(data=2, ulysses=8), 4 * TENSOR / 8 * 7 / 8, 0.0),
    ],
)
def test_the_network_is_shared_by_the_workers_of_a_machine(mesh: Mesh, near: float, far: float) -> None:
    told = lane_exchange(JOB, mesh, LINKS)
    assert told.nbytes == pytest.approx(near + far)
    within, between = near / 1e9, far / (8e8 / 8)
    assert told.seconds == pytest.approx(max(within, between) if mesh.ring == 1 else within + between)


def test_groups_that_do_not_fill_machines_reach_over_two() -> None:
    """Of three in a row, some stand on two machines of eight."""
    alone = lane_exchange(JOB, Mesh(ring=3), LINKS)
    among_many = lane_exchange(JOB, Mesh(data=8, ring=3), LINKS)
    assert alone.nbytes == pytest.approx(among_many.nbytes)
    assert alone.seconds == pytest.approx(alone.nbytes / 1e9)
    assert among_many.seconds > alone.seconds


def test_each_exchange_has_its_latency() -> None:
    slow = replace(LINKS, latency_s=1.0)
    assert lane_exchange(JOB, Mesh(ulysses=2), slow).seconds - lane_exchange(JOB, Mesh(ulysses=2), LINKS).seconds == 4.0
    assert lane_exchange(JOB, Mesh(), slow).seconds == 0.0


def test_velocities_are_put_together_once_per_step() -> None:
    assert step_exchange(JOB, Mesh(), LINKS).nbytes == 0
    assert step_exchange(JOB, Mesh(cfg=2), LINKS).nbytes == LATENT
    assert step_exchange(JOB, Mesh(ulysses=4), LINKS).nbytes == pytest.approx(LATENT * 3 / 4)
    assert step_exchange(JOB, Mesh(ring=2, ulysses=4), LINKS).nbytes == pytest.approx(LATENT * 7 / 8)


def test_a_block_is_gathered_from_all_of_the_cell() -> None:
    assert gather_exchange(Mesh(data=8), LINKS, BLOCK).nbytes == 0
    told = gather_exchange(Mesh(cfg=2, ulysses=4), LINKS, BLOCK)
    assert told.nbytes == pytest.approx(BLOCK * 7 / 8)
    assert told.seconds == pytest.approx(BLOCK * 7 / 8 / 1e9)


def test_a_state_goes_to_the_driver_and_to_the_next_stage() -> None:
    assert handover_seconds(JOB, Mesh(data=2, ulysses=4), LINKS) == 0
    assert handover_seconds(JOB, Mesh(stage=2), LINKS) == pytest.approx(2 * 4 * LATENT / 8e8)
