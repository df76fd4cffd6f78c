"""All legal and illegal calls on a buffer in every state."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.core.buffers import BlockBuffer, BufferState
from wanstream.plan.programs import BlockKey
from wanstream.schema import StateError

KEY = BlockKey("high", 3)
OTHER = BlockKey("low", 4)
ABSENT = BufferState.ABSENT
EMPTY = BufferState.EMPTY
FILLING = BufferState.FILLING
ISSUED = BufferState.ISSUED
IN_USE = BufferState.IN_USE
IDLE = BufferState.IDLE
DONE = BufferState.DONE

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
    ABSENT: "release_memory",
    EMPTY: "",
    FILLING: "begin_fill",
    ISSUED: "begin_fill issued",
    IN_USE: "begin_fill issued acquire",
    IDLE: "begin_fill issued acquire release",
    DONE: "begin_fill issued acquire release_last",
}

LEGAL = {
    (EMPTY, "begin_fill"): FILLING,
    (DONE, "begin_fill"): FILLING,
    (FILLING, "issued"): ISSUED,
    (ISSUED, "acquire"): IN_USE,
    (IDLE, "acquire"): IN_USE,
    (IN_USE, "release"): IDLE,
    (IN_USE, "release_last"): DONE,
    (DONE, "keep"): IDLE,
    (DONE, "invalidate"): EMPTY,
    (EMPTY, "release_memory"): ABSENT,
    (ABSENT, "restore"): EMPTY,
}

AFTER_A_RUN = {FILLING: EMPTY, ISSUED: EMPTY, IN_USE: DONE, IDLE: DONE}


def buffer_in(state: BufferState) -> BlockBuffer:
    buffer = BlockBuffer(7, torch.empty(0, dtype=torch.uint8))
    for call in ROAD[state].split():
        CALLS[call](buffer)
    assert buffer.state is state
    return buffer


@pytest.mark.parametrize("state", BufferState)
def test_every_call_in_every_state(state):
    for call, made in CALLS.items():
        buffer = buffer_in(state)
        if (state, call) in LEGAL:
            made(buffer)
            assert buffer.state is LEGAL[state, call]
            assert (buffer.key is None) == (buffer.state in (EMPTY, ABSENT))
        else:
            with pytest.raises(StateError, match=f"buffer 7 is {state.value}"):
                made(buffer)
            assert buffer.state is state, call


@pytest.mark.parametrize(
    ("state", "call"), [(ISSUED, "acquire"), (IDLE, "acquire"), (DONE, "keep")]
)
def test_another_block_cannot_be_acquired_or_kept(state, call):
    with pytest.raises(StateError, match=f"but {call} needs"):
        getattr(buffer_in(state), call)(OTHER)


@pytest.mark.parametrize("state", list(BufferState))
def test_the_end_of_a_run_leaves_only_whole_blocks(state):
    buffer = buffer_in(state)
    buffer.end_run()
    after = AFTER_A_RUN.get(state, state)
    assert (buffer.state, buffer.key) == (after, KEY if after is DONE else None)


def test_views_go_with_their_memory_and_new_memory_is_empty():
    buffer = BlockBuffer(7, torch.empty(3, dtype=torch.uint8))
    buffer.views[KEY] = {}
    assert buffer.nbytes == 3
    assert buffer.release_memory() == 3
    assert (buffer.nbytes, buffer.views) == (0, {})
    with pytest.raises(AssertionError, match="buffer 7 has no memory"):
        _ = buffer.memory
    buffer.restore(torch.empty(5, dtype=torch.uint8))
    assert (buffer.nbytes, buffer.memory.numel()) == (5, 5)
