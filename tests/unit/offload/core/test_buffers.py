"""All legal and illegal calls on a buffer in every state."""

from __future__ import annotations

import itertools

import pytest
import torch

from wanstream.offload.core.buffers import BlockBuffer, BufferState
from wanstream.plan.programs import BlockKey
from wanstream.schema import StateError

KEY, OTHER = BlockKey("high", 3), BlockKey("low", 4)

CALLS = {
    "begin_fill": lambda buffer: buffer.begin_fill(KEY),
    "issued": lambda buffer: buffer.issued(),
    "keep": lambda buffer: buffer.keep(KEY),
    "acquire": lambda buffer: buffer.acquire(KEY),
    "release": lambda buffer: buffer.release(last=False),
    "release_last": lambda buffer: buffer.release(last=True),
    "invalidate": lambda buffer: buffer.invalidate(),
    "release_memory": lambda buffer: buffer.release_memory(),
    "restore": lambda buffer: buffer.restore(torch.empty(5, dtype=torch.uint8)),
}

ROAD = {
    BufferState.ABSENT: ["release_memory"],
    BufferState.EMPTY: [],
    BufferState.FILLING: ["begin_fill"],
    BufferState.ISSUED: ["begin_fill", "issued"],
    BufferState.IN_USE: ["begin_fill", "issued", "acquire"],
    BufferState.IDLE: ["begin_fill", "issued", "acquire", "release"],
    BufferState.DONE: ["begin_fill", "issued", "acquire", "release_last"],
}

LEGAL = {
    (BufferState.EMPTY, "begin_fill"): BufferState.FILLING,
    (BufferState.DONE, "begin_fill"): BufferState.FILLING,
    (BufferState.FILLING, "issued"): BufferState.ISSUED,
    (BufferState.ISSUED, "acquire"): BufferState.IN_USE,
    (BufferState.IDLE, "acquire"): BufferState.IN_USE,
    (BufferState.IN_USE, "release"): BufferState.IDLE,
    (BufferState.IN_USE, "release_last"): BufferState.DONE,
    (BufferState.DONE, "keep"): BufferState.IDLE,
    (BufferState.DONE, "invalidate"): BufferState.EMPTY,
    (BufferState.EMPTY, "release_memory"): BufferState.ABSENT,
    (BufferState.ABSENT, "restore"): BufferState.EMPTY,
}

AFTER_A_RUN = {
    BufferState.ABSENT: (BufferState.ABSENT, None),
    BufferState.EMPTY: (BufferState.EMPTY, None),
    BufferState.FILLING: (BufferState.EMPTY, None),
    BufferState.ISSUED: (BufferState.EMPTY, None),
    BufferState.IN_USE: (BufferState.DONE, KEY),
    BufferState.IDLE: (BufferState.DONE, KEY),
    BufferState.DONE: (BufferState.DONE, KEY),
}


def buffer_in(state: BufferState) -> BlockBuffer:
    buffer = BlockBuffer(7, torch.empty(0, dtype=torch.uint8))
    for call in ROAD[state]:
        CALLS[call](buffer)
    assert buffer.state is state
    return buffer


@pytest.mark.parametrize(("state", "call"), list(itertools.product(BufferState, CALLS)))
def test_every_call_in_every_state(state: BufferState, call: str) -> None:
    buffer = buffer_in(state)
    if (state, call) in LEGAL:
        CALLS[call](buffer)
        assert buffer.state is LEGAL[state, call]
    else:
        with pytest.raises(StateError, match=f"buffer 7 is {state.value}"):
            CALLS[call](buffer)
        assert buffer.state is state


@pytest.mark.parametrize("state", [BufferState.ISSUED, BufferState.IDLE])
def test_another_block_cannot_be_acquired(state: BufferState) -> None:
    with pytest.raises(StateError, match="but acquire needs"):
        buffer_in(state).acquire(OTHER)


def test_another_block_cannot_be_kept() -> None:
    with pytest.raises(StateError, match="but keep needs"):
        buffer_in(BufferState.DONE).keep(OTHER)


@pytest.mark.parametrize("state", list(BufferState))
def test_a_run_that_ends_anywhere_leaves_only_what_is_whole(state: BufferState) -> None:
    buffer = buffer_in(state)
    buffer.end_run()
    assert (buffer.state, buffer.key) == AFTER_A_RUN[state]


def test_what_was_forgotten_has_no_name():
    buffer = buffer_in(BufferState.DONE)
    buffer.invalidate()
    assert buffer.key is None


def test_memory_and_its_views_go_together_and_new_memory_starts_empty():
    buffer = BlockBuffer(7, torch.empty(3, dtype=torch.uint8))
    buffer.views[KEY] = {}
    assert buffer.nbytes == 3
    assert buffer.release_memory() == 3
    assert (buffer.nbytes, buffer.views) == (0, {})
    with pytest.raises(AssertionError, match="buffer 7 has no memory"):
        _ = buffer.memory
    buffer.restore(torch.empty(5, dtype=torch.uint8))
    assert (buffer.nbytes, buffer.memory.numel()) == (5, 5)
