"""Runs stopped early: blocks fetched for skipped visits serve the next run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch, attach_offload
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import checked_accelerator

BLOCKS, WIDTH = 6, 32
LIMIT_S = 60.0
"""Timeout in seconds for hung tests."""
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", pytest.param("checked", marks=pytest.mark.checked), CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "checked":
        yield request.param
        return
    with checked_accelerator(sum(request.node.name.encode())):
        yield "checked:0"
        request.node.funcargs.clear()  # the test's other fixtures have tensors on the device


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(BLOCKS, width=WIDTH)


@pytest.fixture
def handle(stack: nn.ModuleList, device: str) -> Iterator[OffloadEngine]:
    policy = OffloadPolicy.layerwise(2)
    with attach_offload(
        {"high": stack}, policy=policy, device=device, follow_forward=False
    ) as attached:
        yield attached


def stop_after(
    handle: OffloadEngine, stack: nn.ModuleList, blocks: int, value: torch.Tensor, fetched: int
) -> int:
    """Visit some blocks, wait until `fetched` fetches were issued, and stop early.

    Return the bytes moved.
    """
    recorder = Recorder(handle.device)
    with recorder.step(0, "high"):
        with handle.run(step_visits(["high"] * 2, handle.block_counts), recorder=recorder) as run:
            for block in range(blocks):
                with run.visit(0, "high", block):
                    value = stack[block](value)
            until = time.monotonic() + LIMIT_S
            while len(run.fetched) < fetched:
                assert time.monotonic() < until, "the fetches were not issued"
                time.sleep(0.001)
            run.leave()
        recorder.cached(lanes=1, visits=BLOCKS - blocks)
    assert (recorder.last.skipped_lanes, recorder.last.skipped_visits) == (1, BLOCKS - blocks)
    return recorder.last.bytes_moved


def patches() -> dict[BlockKey, BlockPatch]:
    """Patches for all blocks. On a CPU the compute thread adds them before a block is complete."""
    weight = WeightPatch(up=torch.full((3 * WIDTH, 2), 0.1), down=torch.ones(2, WIDTH))
    return {
        BlockKey("high", block): BlockPatch(identity=1, weights={"up.weight": weight})
        for block in range(BLOCKS)
    }


def whole_pass(
    handle: OffloadEngine, stack: nn.ModuleList, value: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return the last block's output and the fetch count."""
    with handle.run(step_visits(["high"], handle.block_counts)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                value = stack[visit.block](value)
    return value, len(run.fetched)


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("patched", [False, True])
def test_what_was_issued_is_whole_and_is_not_fetched_again(
    handle: OffloadEngine, stack: nn.ModuleList, device: str, blocks: int, patched: bool
) -> None:
    if patched:
        handle.set_patches(patches())
    value = torch.ones(1, WIDTH, device=device)
    expected, fetched = whole_pass(handle, stack, value)
    assert fetched == BLOCKS
    ahead = blocks + 3  # as many as there are buffers
    handle.release_memory(handle.loaded_bytes)
    moved = stop_after(handle, stack, blocks, value, ahead)
    key = BlockKey("high", 0)
    assert moved == ahead * (handle.route.sizes[key] + handle.patches.nbytes(key))
    held = {BlockKey("high", block) for block in range(blocks, ahead)}
    assert set(handle.contents().values()) == held
    again, fetched = whole_pass(handle, stack, value)
    assert torch.equal(again, expected)
    assert fetched == BLOCKS - sum(key.block < 3 for key in held)


def test_a_run_that_ends_by_an_error_keeps_nothing_that_nobody_has_waited_for(
    handle: OffloadEngine, stack: nn.ModuleList, device: str
) -> None:
    with pytest.raises(KeyError), handle.run(step_visits(["high"], handle.block_counts)) as run:
        run.leave()
        raise KeyError
    assert handle.contents() == {}


def test_a_run_is_left_while_it_goes_on(handle: OffloadEngine, device: str) -> None:
    run = handle.run(step_visits(["high"], handle.block_counts))
    with pytest.raises(AssertionError, match="before the run has ended"):
        run.leave()
