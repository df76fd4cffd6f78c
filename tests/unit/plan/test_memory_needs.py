"""A policy's memory needs against sums by hand, and the error message with too little memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import Budgets, Machine
from wanstream.plan.memory import memory_budget
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import needs_of, predicted, run_shape

Rated = Callable[..., Machine]

LAYERWISE, BLOCK_SWAP = OffloadPolicy.layerwise, OffloadPolicy.block_swap
PINNED = OffloadPolicy.layerwise(1, source="pinned")
SOME = replace(PINNED, ram_blocks=8)


@pytest.mark.parametrize(
    ("policy", "buffers", "slots"),
    [
        (LAYERWISE(1), 2, 2),
        (LAYERWISE(3), 4, 2),
        (BLOCK_SWAP(6, 1), 4, 2),
        (BLOCK_SWAP(0, 1), 8, 2),
        (OffloadPolicy.resident(), 16, 2),
        (replace(PINNED, ram_blocks=5), 2, 7),
        (SOME, 2, 10),
        (PINNED, 2, 16),
    ],
)
def test_terms(rate_machine: Rated, policy: OffloadPolicy, buffers: int, slots: int) -> None:
    run = run_shape(sides={"high": 2, "low": 1})
    needs = needs_of(run, rate_machine(), policy)
    working = run.expert.working_bytes([run.tokens] * 2)
    assert (len(needs.buffers), len(needs.ram_slots)) == (buffers, slots)
    assert needs.device_bytes == buffers * run.blocks.computed_bytes + 1000 + working
    assert needs.host_bytes == slots * run.blocks.stored_bytes


def test_decoding_takes_two_raw_slots_on_a_gpu(rate_machine: Rated, rate_cpu: Rated) -> None:
    run = run_shape()
    fp8 = run_shape(stored_bytes=run.blocks.stored_bytes // 2)
    plain, decoded = (needs_of(work, rate_machine(), LAYERWISE(1)) for work in (run, fp8))
    assert decoded.device_bytes - plain.device_bytes == 2 * fp8.blocks.stored_bytes
    assert decoded.host_bytes == plain.host_bytes // 2
    # A CPU decodes from the slot, or reads straight into a buffer with nothing to decode.
    assert needs_of(fp8, rate_cpu(), LAYERWISE(1)).raw_bytes == 0
    assert needs_of(fp8, rate_cpu(), LAYERWISE(1)).ram_slots == (fp8.blocks.stored_bytes,) * 2
    assert needs_of(run, rate_cpu(), LAYERWISE(1)).ram_slots == ()
    assert needs_of(run, rate_cpu(), SOME).ram_slots == (run.blocks.stored_bytes,) * 8


def test_another_form_of_the_same_size_is_decoded_too(rate_machine: Rated, rate_cpu: Rated) -> None:
    run, fp16 = run_shape(), run_shape(decoded_bytes=run_shape().blocks.stored_bytes)
    plain, decoded = (needs_of(work, rate_machine(), LAYERWISE(1)) for work in (run, fp16))
    assert decoded.device_bytes - plain.device_bytes == 2 * run.blocks.stored_bytes
    plain, decoded = (needs_of(work, rate_cpu(), LAYERWISE(1)) for work in (run, fp16))
    assert decoded.host_bytes - plain.host_bytes == 2 * run.blocks.stored_bytes
    for machine in (rate_machine(), rate_cpu()):
        assert predicted(run, machine, LAYERWISE(1)).timeline.decode_s == 0
        assert predicted(fp16, machine, LAYERWISE(1)).timeline.decode_s > 0


def test_fewer_tokens_at_once_take_less(rate_machine: Rated) -> None:
    run = run_shape(tokens=100_000)
    every, some = (
        needs_of(run, rate_machine(), replace(LAYERWISE(1), chunk_tokens=n)) for n in (None, 4096)
    )
    assert some.working_bytes < every.working_bytes
    assert some.device_bytes - some.working_bytes == every.device_bytes - every.working_bytes


def test_a_shortage_lists_its_terms(rate_machine: Rated) -> None:
    run = run_shape(
        computed_bytes=702_545_920,
        stored_bytes=702_545_920,
        file_bytes=702_545_920,
        outside_bytes=520_530_048,
    )
    needs = needs_of(run, rate_machine(), LAYERWISE(1))
    exactly = Budgets(vram_bytes=needs.device_bytes, ram_bytes=needs.host_bytes)
    assert memory_budget(rate_machine(), exactly).shortage(needs) is None
    why = memory_budget(rate_machine(), replace(exactly, vram_bytes=1_500_000_000)).shortage(needs)
    assert why is not None
    assert why.startswith("needs 2 buffers of 0.70 GB + 0.52 GB resident + 0.0")
    assert why.endswith("; 1.50 GB given")
    why = memory_budget(rate_machine(), replace(exactly, ram_bytes=needs.host_bytes - 1)).shortage(
        needs
    )
    assert why == "needs 2 slots of 0.70 GB = 1.41 GB of RAM; 1.41 GB given"


def test_a_cpu_has_one_memory_for_both(rate_cpu: Rated) -> None:
    needs = needs_of(run_shape(), rate_cpu(), SOME)
    both = needs.device_bytes + needs.host_bytes
    assert memory_budget(rate_cpu(), Budgets(ram_bytes=both)).shortage(needs) is None
    why = memory_budget(rate_cpu(), Budgets(ram_bytes=both - 1)).shortage(needs)
    assert why is not None
    assert "2 buffers" in why
    assert "8 slots" in why


def test_missing_budgets_are_shares_of_the_machine(rate_machine: Rated, rate_cpu: Rated) -> None:
    machine = rate_machine(vram_bytes=16 * 2**30, ram_bytes=32 * 2**30)
    budget = memory_budget(machine, Budgets())
    assert 14e9 < budget.device < machine.vram_bytes
    assert budget.host == 16 * 2**30
    assert memory_budget(machine, Budgets(vram_bytes=5, ram_bytes=7)) == replace(
        budget, device=5, host=7
    )
    assert memory_budget(rate_cpu(), Budgets(vram_bytes=5)).device == 5


def test_a_budget_is_not_negative() -> None:
    with pytest.raises(ValueError, match="vram_bytes is -1, it must be 0 or more"):
        Budgets(vram_bytes=-1)
    with pytest.raises(ValueError, match="ram_bytes is -1"):
        Budgets(ram_bytes=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"high": 0, "low": 0}, "no steps"),
        ({"sides": {"high": 1}}, "no lanes for the 'low' expert"),
        ({"sides": {"high": 1, "low": 0}}, "each must be 1 or more"),
        ({"stored_bytes": 0}, "stored_bytes is 0"),
        ({"tokens": 0}, "video_tokens is 0"),
        ({"extra_tokens": (0, -1)}, "give 0 or more"),
    ],
)
def test_a_job_that_is_none(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_shape(**changes)
