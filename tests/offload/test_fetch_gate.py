"""The gate that keeps fetches out of a part of each visit: no piece starts while it is closed, and nobody hangs."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from wanstream.metrics import clock_for
from wanstream.offload import OffloadHandle, attach_offload
from wanstream.offload.fetch_gate import FetchGate, GateOrderError, GateState, Held, Holding, behind_visit
from wanstream.offload.file_source import FileSource
from wanstream.offload.gather import Sharded
from wanstream.offload.module_source import ModuleSource
from wanstream.offload.progress import RunProgress, RunStopped
from wanstream.offload.safetensors_header import read_header
from wanstream.plan import AT_ONCE, BlockKey, Fetch, OffloadPolicy, compile_program, plan_residency, step_visits

CPU = torch.device("cpu")
BLOCKS, WIDTH = 5, 32
PIECE = 4096
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ("high", "high", "low")
LIMIT_S = 60
QUIET_S = 0.2
"""How long a thread that should be held is given to do what it should not."""
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "two ahead": OffloadPolicy.layerwise(2),
    "one buffer": OffloadPolicy.layerwise(0),
    "block swap": OffloadPolicy.block_swap(3, 2),
    "pinned": OffloadPolicy.layerwise(1, source="pinned"),
}


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(2 * BLOCKS, width=WIDTH)


class PieceSource(ModuleSource):
    """Tells which pieces are read, and waits in the first one of block `slow` until it may go on."""

    def __init__(self, stacks: dict[str, Sequence[nn.Module]], *, slow: BlockKey | None = None) -> None:
        super().__init__(stacks)
        self.slow = slow
        self.pieces: list[tuple[BlockKey, int]] = []
        self.whole: list[BlockKey] = []
        self.inside, self.go_on, self.next = threading.Event(), threading.Event(), threading.Event()

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self.whole.append(key)
        super().read_block(key, into)

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        if self.inside.is_set():
            self.next.set()
        self.pieces.append((key, wanted.start))
        if key == self.slow and not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(LIMIT_S)
        super().read_range(key, wanted, into)


def split(stack: nn.ModuleList) -> dict[str, nn.ModuleList]:
    own = copy.deepcopy(stack)
    return {"high": own[:BLOCKS], "low": own[BLOCKS:]}


def attach(stacks: dict[str, nn.ModuleList], policy: str, *, hold: bool = True, **how: Any) -> OffloadHandle:
    handle = attach_offload(stacks, policy=POLICIES[policy], device=CPU, follow_forward=False, **how)
    handle.hold_fetches(hold)
    if hold:
        handle.engine.gate = FetchGate(clock_for(CPU), piece_bytes=PIECE)
    return handle


def run_all(
    handle: OffloadHandle, stacks: dict[str, nn.ModuleList], *, before: Callable[[int], None] = lambda number: None
) -> torch.Tensor:
    """A run in which the computing of every block is the part that nothing is fetched in; `before` is inside it."""
    hidden, gate = torch.ones(3, WIDTH), handle.gate
    with handle.run(step_visits(STEPS, handle.counts)) as run:
        for number, visit in enumerate(run.program.visits):
            with run.visit(*visit):
                if gate is not None:
                    gate.close()
                before(number)
                hidden = stacks[visit.expert][visit.block](hidden) / 2
                if gate is not None:
                    gate.open()
    return hidden


def test_a_gate_is_closed_and_opened_in_turn() -> None:
    gate = FetchGate(clock_for(CPU))
    with pytest.raises(GateOrderError, match="the gate is open: open needs it to be closed"):
        gate.open()
    gate.close()
    assert gate.state is GateState.CLOSED
    assert gate.mark is None
    with pytest.raises(GateOrderError, match="the gate is closed: close needs it to be open"):
        gate.close()
    gate.open()
    first = gate.mark
    assert first is not None
    gate.close()
    gate.open()
    assert gate.mark > first
    gate.close()
    gate.end_run()
    assert (gate.state, gate.mark) == (GateState.OPEN, None)


@pytest.mark.parametrize("end", ["open", "end_run"])
def test_who_waits_at_a_gate_goes_on_when_it_opens_and_when_the_run_ends(end: str) -> None:
    gate, passed = FetchGate(clock_for(CPU), piece_bytes=3), list[range]()
    gate.close()
    waiting = threading.Thread(target=lambda: passed.extend(gate.pieces(7)), daemon=True)
    waiting.start()
    waiting.join(QUIET_S)
    assert waiting.is_alive()
    assert passed == []
    getattr(gate, end)()
    waiting.join(LIMIT_S)
    assert passed == [range(3), range(3, 6), range(6, 7)]


@pytest.mark.parametrize("policy", ["layerwise", "two ahead", "resident"])
def test_a_fetch_that_is_under_way_stops_at_the_next_piece_while_the_gate_is_closed(stack, policy) -> None:
    slow = BlockKey("high", 1)
    stacks = split(stack)
    source = PieceSource(stacks, slow=slow)
    begun: list[int] = []

    def look(number: int) -> None:
        if number == 0:
            assert source.inside.wait(LIMIT_S)
            source.go_on.set()
            assert not source.next.wait(QUIET_S), "a piece was begun behind a closed gate"
            begun.append(sum(key == slow for key, _ in source.pieces))

    with attach(stacks, policy, source=source) as handle:
        run_all(handle, stacks, before=look)
    assert begun == [1]
    assert BLOCK_BYTES > 3 * PIECE
    starts = [start for key, start in source.pieces if key == slow]
    assert starts[: -(-BLOCK_BYTES // PIECE)] == list(range(0, BLOCK_BYTES, PIECE))


def test_a_copy_out_of_ram_stops_at_the_next_piece_too(stack) -> None:
    stacks = split(stack)
    gate = FetchGate(clock_for(CPU), piece_bytes=PIECE)
    with attach(stacks, "pinned") as handle:
        streams = handle.engine.streams
        stored, into = torch.arange(256, dtype=torch.uint8).repeat(BLOCK_BYTES // 256), torch.zeros(BLOCK_BYTES).byte()
        key, held = BlockKey("high", 0), Held(gate=gate)
        gate.close()
        args = (key, stored, into, 0.0, lambda drained=None: None, held)
        copying = threading.Thread(target=streams.land, args=args, daemon=True)
        copying.start()
        copying.join(QUIET_S)
        assert copying.is_alive()
        assert not into.any()
        gate.open()
        copying.join(LIMIT_S)
        assert torch.equal(into, stored)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_back_arrives_bit_for_bit(stack, policy) -> None:
    plain = split(stack)
    with attach(plain, policy, hold=False) as handle:
        expected = [run_all(handle, plain), run_all(handle, plain)]
    stacks = split(stack)
    with attach(stacks, policy) as handle:
        for value in expected:
            assert torch.equal(run_all(handle, stacks), value)
        handle.hold_fetches(False)
        assert handle.gate is None
        assert torch.equal(run_all(handle, stacks), expected[0])


@pytest.mark.parametrize("direct", [False, True])
def test_files_are_read_in_pieces_bit_for_bit(stack, tmp_path: Path, direct: bool) -> None:
    names = ("up.weight", "down.weight")
    save_file({f"{i}.{w}": stack[i].get_parameter(w) for i in range(2 * BLOCKS) for w in names}, tmp_path / "x.st")
    tensors = read_header(tmp_path / "x.st").tensors
    keys = [BlockKey(name, i) for name in ("high", "low") for i in range(BLOCKS)]
    places = {key: {w: tensors[f"{n}.{w}"] for w in names} for n, key in enumerate(keys)}
    plain, stacks = split(stack), split(stack)
    with attach(plain, "layerwise", hold=False) as handle:
        expected = run_all(handle, plain)
    source = FileSource(places, computed_dtypes=torch.float32, direct=direct)
    with attach(stacks, "layerwise", source=source) as handle:
        assert torch.equal(run_all(handle, stacks), expected)


@pytest.mark.parametrize("policy", ["layerwise", "pinned", "resident"])
def test_gathered_blocks_are_held_back_by_every_rank(stack, thread_group, policy) -> None:
    plain = split(stack)
    with attach(plain, policy, hold=False) as handle:
        expected = run_all(handle, plain)
    group, results = thread_group(2), dict[int, torch.Tensor]()

    def run(rank: int, sharded: Sharded) -> None:
        stacks = split(stack)
        with attach(stacks, policy, sharded=sharded) as handle:
            results[rank] = run_all(handle, stacks)

    ranks = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(group.ranks())]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
        assert not rank.is_alive(), "a rank hangs"
    assert all(torch.equal(results[rank], expected) for rank in range(2))


def test_nothing_is_gathered_behind_a_closed_gate(stack, thread_group) -> None:
    group, stacks = thread_group(1), split(stack)
    (sharded,) = group.ranks()
    with attach(stacks, "layerwise", sharded=sharded) as handle:
        handle.gate.close()
        with handle.run(step_visits(STEPS, handle.counts)) as run:
            time.sleep(QUIET_S)
            assert group.gathers == [0]
            handle.gate.open()
            for visit in run.program.visits:
                with run.visit(*visit):
                    pass
        assert group.gathers == [len(run.program.fetches)]


def test_an_error_behind_a_closed_gate_ends_the_run_and_the_next_one_is_whole(stack) -> None:
    stacks = split(stack)
    source = PieceSource(stacks, slow=BlockKey("high", 1))

    def fail(number: int) -> None:
        if number == 0:
            assert source.inside.wait(LIMIT_S)
            source.go_on.set()
            raise MemoryError("no room")

    with attach(stacks, "layerwise", source=source) as handle:
        with pytest.raises(MemoryError):
            run_all(handle, stacks, before=fail)
        assert [thread for thread in threading.enumerate() if thread.name == "wanstream-fetch"] == []
        assert handle.gate.state is GateState.OPEN
        value = run_all(handle, stacks)
    plain = split(stack)
    with attach(plain, "layerwise", hold=False) as handle:
        assert torch.equal(value, run_all(handle, plain))


def test_without_a_gate_blocks_are_read_whole(stack) -> None:
    stacks = split(stack)
    source = PieceSource(stacks)
    with attach(stacks, "layerwise", hold=False, source=source) as handle:
        run_all(handle, stacks)
    assert source.pieces == []
    assert source.whole[:2] == [BlockKey("high", 0), BlockKey("high", 1)]


def test_a_gate_comes_and_goes_between_runs_only(stack) -> None:
    stacks = split(stack)
    with attach(stacks, "layerwise") as handle:
        gate = handle.gate
        with handle.run(step_visits(STEPS, handle.counts)):
            with pytest.raises(RuntimeError, match="already running"):
                handle.hold_fetches(False)
            handle.hold_fetches(True)
        assert handle.gate is gate


class AheadStreams:
    """Streams of a device that is told ahead of time: what they are asked to issue, behind which mark."""

    ahead = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.held: list[tuple[BlockKey, Held]] = []

    def land(self, key: BlockKey, stored: Any, into: Any, after: Any, leave: Any, held: Held) -> Any:
        self.held.append((key, held))
        return self.inner.land(key, stored, into, after, leave)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_device_that_is_told_ahead_a_copy_comes_behind_the_visit_that_begins_when_its_buffer_is_free(
    stack, policy
) -> None:
    plain = split(stack)
    with attach(plain, policy, hold=False) as handle:
        expected = run_all(handle, plain)
    stacks, opened = split(stack), list[float]()
    with attach(stacks, policy) as handle:
        handle.engine.streams = ahead = AheadStreams(handle.engine.streams)
        hidden = torch.ones(3, WIDTH)
        with handle.run(step_visits(STEPS, handle.counts)) as run:
            for visit in run.program.visits:
                with run.visit(*visit):
                    for _ in range(2):  # lanes
                        handle.gate.close()
                        handle.gate.open()
                    opened.append(handle.gate.mark)
                    hidden = stacks[visit.expert][visit.block](hidden) / 2
        assert torch.equal(hidden, expected)
        assert len(ahead.held) == len(run.program.fetches)
        for fetch, (key, held) in zip(run.program.fetches, ahead.held, strict=True):
            assert key == fetch.block
            behind = fetch.start_after + 1
            assert held.behind == (opened[behind] if behind < fetch.needed_by else None)


def test_a_fetch_never_comes_behind_the_visit_that_waits_for_it() -> None:
    at_once, tight, early = (
        Fetch(BlockKey("high", 0), 0, after, needed, needed) for after, needed in ((AT_ONCE, 0), (3, 4), (3, 6))
    )
    assert [behind_visit(fetch) for fetch in (at_once, tight, early)] == [None, None, 4]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.sampled_from(["high", "low"]), min_size=1, max_size=5),
    policy=st.one_of(
        st.just(OffloadPolicy.resident()),
        st.builds(OffloadPolicy.layerwise, st.integers(0, 4)),
        st.builds(OffloadPolicy.block_swap, st.integers(0, BLOCKS), st.integers(0, 3)),
    ),
)
def test_whoever_goes_through_the_fetches_in_their_order_is_never_behind_the_computing(steps, policy) -> None:
    """All fetches in front of one that a visit needs come behind earlier visits: so nobody waits in a circle."""
    counts = {"high": BLOCKS, "low": BLOCKS}
    residency, buffers = plan_residency(policy, counts)
    program = compile_program(step_visits(steps, counts), residency, buffers)
    for number, fetch in enumerate(program.fetches):
        behind = [behind_visit(each) for each in program.fetches[: number + 1]]
        assert all(visit is None or visit < fetch.needed_by for visit in behind)
    shared = [visit for visit in map(behind_visit, program.fetches) if visit]
    assert len(shared) == len(set(shared)), "each but the first visit is waited for once"


def test_who_waits_for_a_visit_that_never_comes_leaves_with_the_run() -> None:
    progress, gate = RunProgress(), FetchGate(clock_for(CPU))
    fetch = Fetch(BlockKey("high", 2), 0, 0, 2, 2)
    holding = Holding(gate, SimpleNamespace(fetches=(fetch,)), progress, ahead=True)
    progress.stop()
    with pytest.raises(RunStopped):
        holding.held(fetch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu_a_copy_begins_behind_the_part_of_the_visit_in_front_of_it(stack, policy) -> None:
    cuda = torch.device("cuda")
    hidden = torch.ones(3, WIDTH, device=cuda)
    plain = split(stack)
    handle = attach_offload(plain, policy=POLICIES[policy], device=cuda, follow_forward=False)
    with handle, handle.run(step_visits(STEPS, handle.counts)) as run:
        expected = hidden
        for visit in run.program.visits:
            with run.visit(*visit):
                expected = plain[visit.expert][visit.block](expected) / 2
        expected = expected.cpu()
    stacks, opened, issued = split(stack), list[Any](), list[Any]()
    with attach_offload(stacks, policy=POLICIES[policy], device=cuda, follow_forward=False) as handle:
        handle.hold_fetches(True)
        land = handle.engine.streams.land

        class Told:
            ahead = True

            def land(self, *args: Any) -> Any:
                issued.append(land(*args))
                return issued[-1]

            def __getattr__(self, name: str) -> Any:
                return getattr(land.__self__, name)

        handle.engine.streams = Told()
        with handle.run(step_visits(STEPS, handle.counts)) as run:
            for visit in run.program.visits:
                with run.visit(*visit):
                    handle.gate.close()
                    torch.cuda._sleep(2_000_000)
                    handle.gate.open()
                    opened.append(handle.gate.mark)
                    hidden = stacks[visit.expert][visit.block](hidden) / 2
        assert torch.equal(hidden.cpu(), expected)
        torch.cuda.synchronize()
        for fetch, arrival in zip(run.program.fetches, issued, strict=True):
            behind = behind_visit(fetch)
            if behind is not None:
                assert opened[behind].elapsed_time(arrival.copied[0]) >= 0
