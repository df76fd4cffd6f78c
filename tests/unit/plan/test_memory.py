"""A policy's memory needs against sums by hand, and the error message with too little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.plan import Budgets, memory_budget
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import needs_of, predicted, rated, rated_cpu, run_shape

LAYERWISE = OffloadPolicy.layerwise(1)
PINNED = OffloadPolicy.layerwise(1, source="pinned")
SOME = replace(PINNED, ram_blocks=8)


@pytest.mark.parametrize(
    ("policy", "buffers", "slots"),
    [
        (LAYERWISE, 2, 2),
        (OffloadPolicy.layerwise(3), 4, 2),
        (OffloadPolicy.block_swap(6, 1), 4, 2),
        (OffloadPolicy.block_swap(0, 1), 8, 2),
        (OffloadPolicy.resident(), 16, 2),
        (SOME, 2, 10),
        (PINNED, 2, 16),
    ],
)
def test_buffers_and_slots(policy, buffers, slots):
    run = run_shape(sides={"high": 2, "low": 1})
    needs = needs_of(run, rated(), policy)
    working = run.expert.working_bytes([run.tokens] * 2)
    assert (len(needs.buffers), len(needs.ram_slots)) == (buffers, slots)
    assert needs.device_bytes == buffers * run.blocks.computed_bytes + 1000 + working
    assert needs.host_bytes == slots * run.blocks.stored_bytes


def test_decoding_takes_two_raw_slots_on_a_gpu():
    run = run_shape()
    fp8 = run_shape(stored_bytes=run.blocks.stored_bytes // 2)
    plain, decoded = (needs_of(work, rated(), LAYERWISE) for work in (run, fp8))
    assert decoded.device_bytes - plain.device_bytes == 2 * fp8.blocks.stored_bytes
    assert decoded.host_bytes == plain.host_bytes // 2
    # A CPU decodes from the slot, or reads straight into a buffer with nothing to decode.
    assert needs_of(fp8, rated_cpu(), LAYERWISE).raw_bytes == 0
    assert needs_of(fp8, rated_cpu(), LAYERWISE).ram_slots == (fp8.blocks.stored_bytes,) * 2
    assert needs_of(run, rated_cpu(), LAYERWISE).ram_slots == ()
    assert needs_of(run, rated_cpu(), SOME).ram_slots == (run.blocks.stored_bytes,) * 8


def test_another_form_of_the_same_size_is_decoded_too():
    run = run_shape()
    fp16 = run_shape(decoded_bytes=run.blocks.stored_bytes)
    for machine in (rated(), rated_cpu()):
        plain, decoded = (needs_of(work, machine, LAYERWISE) for work in (run, fp16))
        more = decoded.device_bytes + decoded.host_bytes - plain.device_bytes - plain.host_bytes
        assert more == 2 * run.blocks.stored_bytes
        assert (decoded.device_bytes > plain.device_bytes) == machine.has_bus
        assert predicted(run, machine, LAYERWISE).timeline.decode_s == 0
        assert predicted(fp16, machine, LAYERWISE).timeline.decode_s > 0


def test_a_shortage_lists_its_terms():
    sizes = dict.fromkeys(("computed_bytes", "stored_bytes", "file_bytes"), 702_545_920)
    run = run_shape(**sizes, outside_bytes=520_530_048)
    machine = rated()
    needs = needs_of(run, machine, LAYERWISE)

    def shortage(vram_bytes: int, ram_bytes: int) -> str:
        budgets = Budgets(vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        return memory_budget(machine, budgets).shortage(needs) or ""

    assert shortage(needs.device_bytes, needs.host_bytes) == ""
    why = shortage(1_500_000_000, needs.host_bytes)
    assert why.startswith("needs 2 buffers of 0.70 GB + 0.52 GB resident + 0.0")
    assert why.endswith("; 1.50 GB given")
    why = shortage(needs.device_bytes, needs.host_bytes - 1)
    assert why == "needs 2 slots of 0.70 GB = 1.41 GB of RAM; 1.41 GB given"


def test_a_cpu_has_one_memory_for_both():
    needs = needs_of(run_shape(), rated_cpu(), SOME)
    both = needs.device_bytes + needs.host_bytes
    assert memory_budget(rated_cpu(), Budgets(ram_bytes=both)).shortage(needs) is None
    why = memory_budget(rated_cpu(), Budgets(ram_bytes=both - 1)).shortage(needs) or ""
    assert "2 buffers" in why
    assert "8 slots" in why
    assert memory_budget(rated_cpu(), Budgets(vram_bytes=5)).device == 5


def test_missing_budgets_are_shares_of_the_machine():
    machine = rated(vram_bytes=16 * 2**30, ram_bytes=32 * 2**30)
    budget = memory_budget(machine, Budgets())
    assert 14e9 < budget.device < machine.vram_bytes
    assert budget.host == 16 * 2**30
    given = memory_budget(machine, Budgets(vram_bytes=5, ram_bytes=7))
    assert given == replace(budget, device=5, host=7)
    for name in ("vram_bytes", "ram_bytes"):
        with pytest.raises(ValueError, match=f"{name} is -1, it must be 0 or more"):
            Budgets(**{name: -1})


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
def test_impossible_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run_shape(**changes)
