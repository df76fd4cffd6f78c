"""The engine alone: random runs and changes in 80 orders, and every allocation out of memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from wanstream.offload import GatherBrokenError
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator, checked_accelerator
from wanstream.tests.support.offload.device_scenarios import (
    BLOCK_SWAP,
    COUNT,
    DEEP,
    KINDS,
    LAYERWISE,
    PARTLY_PINNED,
    PINNED,
    PLACES,
    RESIDENT,
    Case,
    Ranks,
    ruin,
)

pytestmark = pytest.mark.checked

FROM_DISK = (LAYERWISE, OffloadPolicy.layerwise(0), DEEP, BLOCK_SWAP, RESIDENT)
POLICIES = (*FROM_DISK, PINNED, PARTLY_PINNED)
PARTS = 4


def random_course(gpu: Accelerator, choose: random.Random) -> None:
    """Make runs and changes between them. Every visit checks the bits it finds."""
    case = Case(gpu, choose.choice(POLICIES), **choose.choice([*KINDS.values()]))

    def apart() -> None:
        with gpu.runtime.on_stream(gpu.runtime.stream()):
            case.run(choose.randint(1, 2), delay=choose.randint(1, 4))

    actions: list[Callable[[], object]] = [
        lambda: case.run(choose.randint(1, 3), delay=choose.randint(1, 4)),
        apart,
        lambda: case.stop(choose.randrange(2 * COUNT)),
        lambda: case.run(delay=1, stop_at=choose.randrange(2 * COUNT), leave=True),
        lambda: case.engine.set_policy(choose.choice(POLICIES)),
        lambda: case.patch(choose.randint(0, 2)),
        lambda: case.engine.release_memory(choose.choice((1, 1 << 60))),
        lambda: ruin(gpu, COUNT),
    ]
    for _ in range(choose.randint(3, 6)):
        choose.choice(actions)()
    if choose.random() < 0.3:
        case.drop()
    else:
        case.detach()


@pytest.mark.parametrize("part", range(PARTS))
def test_random_courses(part):
    for seed in range(part, 80, PARTS):
        try:
            with checked_accelerator(seed) as gpu:
                random_course(gpu, random.Random(seed))
        except Exception as err:
            raise AssertionError(f"seed {seed}") from err


FROM_FILE_AND_RAM = [*zip(KINDS, [DEEP, PARTLY_PINNED] * 2, strict=True)]


@pytest.mark.parametrize(("kind", "policy"), FROM_FILE_AND_RAM, ids=KINDS)
def test_every_allocation_may_fail(kind, policy):
    """In any thread: a recognised error, nothing left from the run, and the engine runs again."""
    failed = 0
    number = 0
    while failed == number:
        number += 1
        with checked_accelerator(number) as gpu:
            gpu.need_fake("").devices[0].fail_at = number
            case = None
            try:
                case = Case(gpu, policy, **KINDS[kind])
                case.run()
                case.run()
            except torch.OutOfMemoryError:
                failed += 1
                if case is None:
                    continue
            gpu.need_fake("").devices[0].fail_at = None
            case.check()
            case.run()
            case.detach()
            del case
    assert number > 5, "buffers, slots, factors, scales"


@pytest.mark.parametrize("place", ["raw", "patched_fp8", "on_device_patched_fp8"])
def test_every_allocation_of_two_ranks_may_fail(place):
    """A rank out of memory ends the other one's run too, and both meet again."""
    failed = 0
    number = 0
    while failed == number:
        number += 1
        with checked_accelerator(number) as gpu:
            gpu.need_fake("").devices[0].fail_at = number
            try:
                ranks = Ranks(gpu, DEEP, **PLACES[place])
            except torch.OutOfMemoryError:
                failed += 1
                continue
            errors = ranks.try_run(hows=({}, {}))
            if any(errors):
                failed += 1
                assert any(isinstance(error, torch.OutOfMemoryError) for error in errors)
                expected = torch.OutOfMemoryError | GatherBrokenError | None
                assert all(isinstance(error, expected) for error in errors)
                ranks.meet()
            gpu.need_fake("").devices[0].fail_at = None
            ranks.run()
            ranks.detach()
            del ranks, errors
    assert number > 10, "buffers, slots, factors, scales of both ranks"


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_lock_may_be_refused(kind, caplog):
    """The same bits from ordinary memory, and one warning."""
    for limit in range(0, 6 * 1024, 1024):
        with checked_accelerator(limit) as gpu:
            gpu.need_fake("").refuse_locks_beyond = limit
            caplog.clear()
            case = Case(gpu, PINNED, **KINDS[kind])
            case.run()
            case.detach()
            assert sum("page-locked for the device" in message for message in caplog.messages) <= 2
