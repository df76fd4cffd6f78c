"""Engine scenarios, in several execution orders."""

import pytest

from wanstream.offload.core import pages
from wanstream.tests.support.offload.device_scenarios import (
    COUNT,
    DEEP,
    KEYS,
    KINDS,
    LAYERWISE,
    PINNED,
    RESIDENT,
    SCENARIOS,
    Case,
)


# On the checked device a test's name is its seed.
@pytest.mark.parametrize("order", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_visit_finds_its_block(gpu, name, order):
    if order:
        gpu.need_fake("a real device takes no order from us")
    SCENARIOS[name](gpu)


@pytest.mark.parametrize("kind", ["raw", "fp8", "patched"])
def test_blocks_locked_in_pieces_are_copied_without_a_wait(gpu, monkeypatch, kind):
    machine = gpu.need_fake("it makes the pieces small, and logs host waits")
    monkeypatch.setattr(pages, "LOCK_BYTES", 64)
    pinned = Case(gpu, PINNED, **KINDS[kind])
    pinned.run()
    pinned.detach()
    assert "offload/core/pages.py copy_to_device" not in machine.host_waits


def test_engines_after_each_other_use_the_same_streams(gpu):
    machine = gpu.need_fake("it counts streams")
    counts = list[int]()
    for _ in range(40):
        case = Case(gpu, patched=True, fp8=True)
        case.run(1)
        case.detach()
        counts.append(len(machine.devices[0].streams))
    assert counts[3] == counts[-1]


def test_engines_side_by_side_share_no_stream(gpu):
    Case(gpu).detach()  # the streams are idle
    cases = [Case(gpu), Case(gpu, fp8=True)]
    streams = [stream for case in cases for stream in case.engine.backend._streams]
    assert len(set(map(id, streams))) == len(streams) == 4
    for case in cases:
        case.run()
    for case in cases:
        case.detach()


@pytest.mark.parametrize(("policy", "residents"), [(LAYERWISE, 0), (DEEP, 0), (RESIDENT, COUNT)])
def test_engines_in_turns_need_the_buffers_of_one(gpu, policy, residents):
    device = gpu.need_fake("it counts memory").devices[0]
    cases = [Case(gpu, policy), Case(gpu, policy)]
    cases[0].run()
    cases[0].check()
    kept, reserved = residents * cases[0].source.formats[KEYS[0]].computed.nbytes, device.reserved
    for at in (1, 0, 1):
        other = cases[1 - at].engine
        assert other.loaded_bytes - other.release_idle_buffers() == other.loaded_bytes == kept
        cases[at].run(delay=1)
        assert device.reserved == reserved + kept
        cases[at].check()
    cases[0].engine.allocate_buffers()
    assert cases[0].engine.release_idle_buffers() == 0, "they are for the next run"
    for case in cases:
        case.detach()
