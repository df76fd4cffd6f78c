"""Engine scenarios on a device with streams, each as small as it can be.

Every visit checks the bits it finds.

`SCENARIOS` has them by name. They run unchanged on the checked device and on a real one. The test
of removed waits runs them with one wait, event or unlock missing.
"""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from wanstream.devices import Event, clock_for
from wanstream.offload import BlockPatch, LockedTensors, OffloadEngine, attach_offload, map_memory
from wanstream.offload.core.pages import host_bytes
from wanstream.offload.engine.run import PACE
from wanstream.offload.formats.layout import BlockFormat, allocate_flat, block_format, tensor_views
from wanstream.offload.sharding.group import GatherBrokenError, Sharded, StoppedTogether
from wanstream.offload.sources.base import RangeSource
from wanstream.offload.sources.module import TensorSource
from wanstream.offload.transfers.weight_patch import ComputedPatch, WeightPatch
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import HAS_REAL, Accelerator
from wanstream.tests.support.offload.fixtures import ThreadGroup, in_threads
from wanstream.tests.support.polling import eventually

COUNT = 4
WIDTH = 1024 if HAS_REAL else 16
KEYS = [BlockKey("high", index) for index in range(COUNT)]
RANK = 4

LAYERWISE = OffloadPolicy.layerwise(1)
DEEP = OffloadPolicy.layerwise(3)
BLOCK_SWAP = OffloadPolicy.block_swap(3, 1)
RESIDENT = OffloadPolicy.resident()
PINNED = OffloadPolicy.layerwise(1, source="pinned")
PARTLY_PINNED = replace(PINNED, ram_blocks=2)

ENGINES: WeakSet[OffloadEngine] = WeakSet()
"""Engines in scenarios, not deleted yet."""

Scenario = Callable[[Accelerator], None]
SCENARIOS: dict[str, Scenario] = {}


class Interrupted(Exception):
    """Ends a run before the last visit."""


class StoppedEarly(StoppedTogether):
    """Ends a run on all ranks before the same visit."""


class MemorySource(RangeSource):
    """Blocks with one random matrix each, as fp32 or as fp8 with a scale.

    Reads take up to `longest_s`.

    Args:
        fp8: blocks are fp8.
        growing: each block has more rows than the one before.
        longest_s: longest time for a read.
    """

    def __init__(self, *, fp8: bool, growing: bool, longest_s: float = 0.0) -> None:
        random = torch.Generator().manual_seed(0)
        stored = torch.float8_e4m3fn if fp8 else torch.float32
        computed = torch.bfloat16 if fp8 else torch.float32
        shapes = {key: (WIDTH * (1 + growing * key.block), WIDTH) for key in KEYS}
        self.formats: Mapping[BlockKey, BlockFormat] = {
            key: block_format({"weight": (shape, stored)}, computed, ["weight"] * fp8)
            for key, shape in shapes.items()
        }
        self._scales: dict[BlockKey, dict[str, torch.Tensor]] = {key: {} for key in KEYS}
        for scales in self._scales.values() if fp8 else ():
            scales["weight"] = torch.rand((), generator=random) + 0.5
        self._blocks = {key: allocate_flat(self.formats[key].stored.nbytes, "cpu") for key in KEYS}
        self._sleeps = [longest_s * sleep for sleep in torch.rand(97, generator=random).tolist()]
        for key, block in self._blocks.items():
            matrix = tensor_views(block, self.formats[key].stored)["weight"]
            matrix.copy_(torch.randn(shapes[key], generator=random))

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self._scales[key]

    def file_bytes(self, key: BlockKey) -> int:
        return self._blocks[key].numel()

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        return len(wanted)

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        self._sleeps.append(self._sleeps.pop(0))
        time.sleep(self._sleeps[0])
        stored = host_bytes(self._blocks[key])[wanted.start : wanted.stop]
        np.copyto(host_bytes(into[: len(wanted)]), stored)

    def close(self) -> None:
        """Keep the blocks: they are needed for comparison."""

    def in_place(self) -> TensorSource:
        """Return a source with the same blocks, to copy them in place."""
        layouts = {key: fmt.stored for key, fmt in self.formats.items()}
        return TensorSource({key: tensor_views(self._blocks[key], layouts[key]) for key in KEYS})

    def decoded(self, key: BlockKey) -> torch.Tensor:
        fmt = self.formats[key]
        stored = tensor_views(self._blocks[key], fmt.stored)["weight"]
        if fmt.is_raw:
            return stored
        return (stored.float() * self._scales[key]["weight"]).to(torch.bfloat16)


class Case:
    """An engine on `gpu`, and the weights that visits must find.

    Args:
        gpu: the engine's device.
        policy: policy to start with.
        fp8: blocks must be decoded on arrival.
        patched: every second block has a patch.
        computed: the patches are functions, whose results stay in the RAM slots.
        growing: each block is larger than the one before.
        sharded: the group of ranks, if this engine is one of several.
        in_place: blocks are copied from source memory, not from slots.
    """

    def __init__(
        self,
        gpu: Accelerator,
        policy: OffloadPolicy = LAYERWISE,
        *,
        fp8: bool = False,
        patched: bool = False,
        computed: bool = False,
        growing: bool = False,
        sharded: Sharded | None = None,
        in_place: bool = False,
    ) -> None:
        self.gpu = gpu
        self.source = MemorySource(fp8=fp8, growing=growing)
        rows = [self.source.formats[key].computed.tensors[0].shape[0] for key in KEYS]
        self.blocks = [nn.Linear(WIDTH, count, bias=False, device="meta") for count in rows]
        self.seen: list[tuple[BlockKey, int, torch.Tensor]] = []
        """Block, patch strength, and contents at every visit."""
        self.ends: list[Event] = []
        """Every run's end on its stream."""
        self.strength = 0
        self.computed = computed
        self.computations: list[str] = []
        self.engine: OffloadEngine = attach_offload(
            {"high": self.blocks},
            policy=policy,
            device=gpu.device,
            source=self.source.in_place() if in_place else self.source,
            follow_forward=False,
            sharded=sharded,
        )
        ENGINES.add(self.engine)
        if patched:
            self.patch(1)

    def patch(self, strength: int) -> None:
        """Patch every second block with this strength, or 0 for no patches."""
        patches = {}
        for key in KEYS[::2] if strength else ():
            weight = self._patch(key, strength)
            if self.computed:
                # Without the case, which has the engine: a dropped engine must be freed at once.
                compute = partial(add_product, self.computations)
                weight = ComputedPatch(parts=weight.parts, compute=compute)
            patches[key] = BlockPatch(identity=strength, weights={"weight": weight})
        self.engine.set_patches(patches)
        self.strength = strength

    def run(
        self,
        passes: int = 2,
        *,
        delay: int = 2,
        pause_s: float = 0.0,
        stop_at: int | None = None,
        issued: int = 0,
        leave: bool = False,
        error: type[Exception] = Interrupted,
        recorder: Recorder | None = None,
    ) -> None:
        """Stream some passes without waiting for the device at the end.

        Args:
            passes: passes through the blocks.
            delay: every visit at a multiple of this number keeps the device busy before it reads
                a block.
            pause_s: host compute time between two visits.
            stop_at: visit before whose end `error` is raised.
            issued: fetches issued by then.
            leave: end the run before the visit `stop_at`, without an error, and keep the blocks
                under way.
            error: raised at `stop_at`.
            recorder: the run's recorder.
        """
        visits = step_visits(["high"] * passes, self.engine.block_counts)
        with self._ended(), torch.inference_mode(), self.engine.run(visits, recorder) as run:
            for number, visit in enumerate(visits):
                if number == stop_at:
                    assert eventually(lambda: len(run.fetched) >= issued, limit_s=5)
                if number == stop_at and leave:
                    run.leave()
                    return
                step = recorder.step(visit.step, "high") if recorder is not None else nullcontext()
                with step, run.visit(*visit):
                    if number % delay == 0:
                        self.gpu.delay()
                    weight = self.blocks[visit.block].weight.clone()
                    self.seen.append((visit.key, self.strength, weight))
                    if number == stop_at:
                        raise error
                time.sleep(pause_s)
        assert tuple(run.fetched) == run.program.fetches

    def run_apart(self, passes: int = 2, **how: Any) -> None:
        """Run on a new stream."""
        with self.gpu.runtime.on_stream(self.gpu.runtime.stream()):
            self.run(passes, **how)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ends.append(self.gpu.runtime.event())
            self.ends[-1].record(self.gpu.runtime.current_stream())

    def stop(self, at: int, **how: Any) -> None:
        """Run until the visit `at`."""
        try:
            self.run(delay=1, stop_at=at, **how)
        except Interrupted:
            return
        raise AssertionError("the run was not stopped")

    def check(self) -> None:
        """Wait for the device and compare what all visits have seen."""
        for end in self.ends:
            end.synchronize()
        for number, (key, strength, weight) in enumerate(self.seen):
            is_expected = torch.equal(weight.cpu(), self._expected(key, strength))
            assert is_expected, f"visit {number} saw other bits of {key}"
        self.seen.clear()

    def detach(self) -> None:
        """Detach while the device still computes, and compare."""
        self.engine.detach()
        assert self.engine.pinned_bytes == 0, "memory of a detached engine is still locked"
        assert self.engine.loaded_bytes == 0, "a detached engine still has device memory"
        self.check()

    def drop(self) -> None:
        """Delete the engine without detaching it, as after an unhandled error."""
        del self.engine
        gc.collect()
        self.check()

    def _patch(self, key: BlockKey, strength: int) -> WeightPatch:
        """Return factors whose rank grows with the strength, and for one block a difference too."""
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(key.block))
        up = strength * draw(WIDTH, strength * RANK)
        full = draw(WIDTH, WIDTH) if key.block and not self.computed else None
        return WeightPatch(up=up, down=draw(strength * RANK, WIDTH), full=full)

    def _expected(self, key: BlockKey, strength: int) -> torch.Tensor:
        matrix = self.source.decoded(key)
        if strength == 0 or key not in KEYS[::2]:
            return matrix
        matrix = matrix.to(self.gpu.device)
        patch = self._patch(key, strength)
        if patch.full is not None:
            matrix = matrix + patch.full.to(matrix)
        return torch.addmm(matrix, patch.up.to(matrix), patch.down.to(matrix)).cpu()


def add_product(calls, matrix, parts) -> Mapping[str, torch.Tensor]:
    calls.extend(matrix)
    whole = matrix[""]
    whole.addmm_(parts["up"].to(whole), parts["down"].to(whole))
    return {}


def scenario(function, name=None, **how) -> Callable[..., None]:
    """Add a function to the scenarios. `how` are the arguments after the device."""
    SCENARIOS[name or function.__name__] = lambda gpu: function(gpu, **how)
    return function


def scenarios(**variants) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function once for each set of arguments."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name, how in variants.items():
            scenario(function, f"{function.__name__} {name.replace('_', ' ')}", **how)
        return function

    return add


KINDS: dict[str, Mapping[str, Any]] = {"raw": {}, "patched": {"patched": True}}
KINDS |= {"fp8": {"fp8": True}, "patched_fp8": {"patched": True, "fp8": True}}
"""Block kinds."""
IN_PLACE = {"in_place": True}


@scenarios(
    layerwise={"policy": LAYERWISE},
    one_buffer={"policy": OffloadPolicy.layerwise(0)},
    deep={"policy": DEEP},
    block_swap={"policy": BLOCK_SWAP},
    resident={"policy": RESIDENT},
    pinned={"policy": PINNED},
    partly_pinned={"policy": PARTLY_PINNED},
    fp8={"fp8": True},
    deep_fp8={"policy": DEEP, "fp8": True},
    pinned_fp8={"policy": PARTLY_PINNED, "fp8": True},
    patched={"patched": True},
    deep_patched={"policy": DEEP, "patched": True},
    patched_fp8={"patched": True, "fp8": True},
    deep_patched_fp8={"policy": DEEP, "patched": True, "fp8": True},
)
def streamed(gpu: Accelerator, **how: Any) -> None:
    """Two runs, the second while the first one still computes."""
    case = Case(gpu, **how)
    case.run(delay=1)
    case.run()
    case.detach()


@scenarios(**KINDS)
def recorded(gpu: Accelerator, **how: Any) -> None:
    """All times of a run are read."""
    case = Case(gpu, **how)
    recorder = Recorder(gpu.device)
    form = case.source.formats[KEYS[0]]
    case.run(recorder=recorder)
    raw_slots = 0 if form.is_raw else 2 * form.stored.nbytes
    assert case.engine.loaded_bytes >= 2 * form.computed.nbytes + raw_slots
    for step in recorder.timeline().steps:
        assert step.transfers.copy_s > 0
        assert step.decode_s > 0 or form.is_raw
        assert step.compute_s + step.stall_s <= step.wall_s + 1e-3  # tolerance between two clocks
    case.detach()


@scenario
def copied_once(gpu: Accelerator) -> None:
    """Tensors are unlocked behind their copies, not with the locking object."""
    memory = map_memory(2 * mmap.PAGESIZE).fill_(7)
    clock = clock_for(gpu.device)
    locked = LockedTensors([memory], gpu.runtime)
    gpu.delay()
    copy = locked.copy(memory)
    clock.wait_for(clock.mark())
    locked.release()
    assert not gpu.is_locked(memory)
    assert copy.cpu().eq(7).all()


@scenario
def pace(gpu: Accelerator) -> None:
    """The host is at most `PACE` visits ahead of the device, to be able to cancel."""
    case = Case(gpu, RESIDENT)
    ends = []
    case.run()
    with case.engine.run(step_visits(["high"] * 2, case.engine.block_counts)) as run:
        for number, visit in enumerate(run.program.visits):
            with run.visit(*visit):
                assert number < PACE or ends[number - PACE].query(), "the host is further ahead"
                gpu.delay()
                ends.append(gpu.runtime.event())
                ends[-1].record(gpu.runtime.current_stream())
    case.detach()


@scenarios(
    **{
        f"{kind}_{at}": {**how, "at": at}
        for kind, how in {**KINDS, "in_place": IN_PLACE}.items()
        for at in (0, 2, 5)
    }
)
def cut_short(gpu: Accelerator, at: int, **how: Any) -> None:
    """A run with copies under way ends with an error. The next one is on another stream."""
    case = Case(gpu, DEEP, **how)
    case.stop(at)
    case.run_apart()
    case.detach()


@scenario
def patched_cut_short(gpu: Accelerator) -> None:
    """The next run fetches into buffers whose blocks are still being patched.

    No visit has waited for these blocks.
    """
    case = Case(gpu, RESIDENT, patched=True)
    case.stop(0, issued=COUNT)
    case.run_apart(1)
    case.detach()


@scenarios(**KINDS)
def stopped_early(gpu: Accelerator, **how: Any) -> None:
    """A run that skips visits keeps the blocks under way for the next run."""
    case = Case(gpu, DEEP, **how)
    case.run(delay=1, stop_at=2, leave=True, issued=COUNT)
    case.run_apart()
    case.detach()


@scenarios(**KINDS, in_place=IN_PLACE, in_place_patched={**IN_PLACE, "patched": True})
def policy_changes(gpu: Accelerator, **how: Any) -> None:
    """The policy changes while the device computes."""
    case = Case(gpu, RESIDENT, **how)
    for policy in (PINNED, BLOCK_SWAP, PARTLY_PINNED, LAYERWISE, RESIDENT):
        case.run(1, delay=1)
        case.engine.set_policy(policy)
        ruin(gpu, COUNT)
        assert how.get("in_place") or case.engine.pinned_bytes <= case.engine.host_bytes
    case.detach()


@scenarios(
    raw={"passes": 3, "computations": 2},
    in_place={"passes": 2, "computations": 4, "in_place": True},
    partly={"policy": replace(PINNED, ram_blocks=3), "passes": 2, "computations": 3},
    deep={"policy": replace(DEEP, source="pinned"), "passes": 3, "computations": 2},
    from_disk={"first": LAYERWISE, "passes": 3, "computations": 4},
)
def computed_patches(gpu, passes, computations, policy=PINNED, first=None, **how) -> None:
    """A block that stays in RAM is patched once, and read again for another patch.

    With the policy `first`, a pass before leaves blocks in staging slots.
    """
    case = Case(gpu, first or policy, patched=True, computed=True, **how)
    if first is not None:
        case.run(1)
        case.engine.set_policy(policy)
    case.run(passes)
    assert len(case.computations) == computations
    case.stop(COUNT + 1)
    case.patch(2)
    case.stop(1)
    case.run(passes)
    case.patch(0)
    case.run(passes)
    case.detach()


@scenario
def patches_change(gpu: Accelerator) -> None:
    """Patches are replaced while the device computes."""
    case = Case(gpu, BLOCK_SWAP)
    for strength in (1, 2, 0, 1):
        case.patch(strength)
        case.run(1, delay=1)
    case.patch(0)
    locked = case.engine.ram.locked_bytes
    assert case.engine.pinned_bytes == locked, "patches that were replaced are still locked"
    case.detach()


def ruin(gpu: Accelerator, count: int) -> None:
    """Write into all free block-sized memory, as another user of the device would."""
    for nbytes in (4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH, WIDTH * WIDTH):
        each = {"size": (nbytes,), "fill_value": 255, "dtype": torch.uint8, "device": gpu.device}
        ruins = [torch.full(**each) for _ in range(count)]
        del ruins


@scenarios(**KINDS)
def memory_released(gpu: Accelerator, **how: Any) -> None:
    """Memory is released while a stream computes on which it was not allocated."""
    case = Case(gpu, DEEP, **how)
    case.engine.allocate_buffers()
    for nbytes in (1, 1 << 60):
        case.run_apart(1, delay=1)
        loaded = case.engine.loaded_bytes
        allocated = gpu.runtime.active_bytes()
        released = case.engine.release_memory(nbytes)
        assert loaded - case.engine.loaded_bytes == released
        assert allocated - gpu.runtime.active_bytes() >= released, "the allocator lacks some of it"
        ruin(gpu, COUNT)
    case.run()
    case.detach()


@scenarios(**KINDS)
def passing_blocks_released(gpu: Accelerator, **how: Any) -> None:
    """Non-resident blocks are released while another stream computes."""
    case = Case(gpu, BLOCK_SWAP, **how)
    case.engine.allocate_buffers()
    for _ in range(2):
        case.run_apart(1, delay=1)
        loaded = case.engine.loaded_bytes
        case.engine.release_passing_blocks()
        assert case.engine.loaded_bytes < loaded
        ruin(gpu, COUNT)
    case.run()
    case.detach()


@scenarios(
    **{
        f"{kind}{end}": {**how, "cycle": bool(end)}
        for kind, how in KINDS.items()
        for end in ("", "_in_a_cycle")
    },
    in_place={**IN_PLACE, "cycle": False},
)
def dropped(gpu: Accelerator, cycle: bool, **how: Any) -> None:
    """An engine is deleted without `detach` while copies are under way.

    The memory is used again at once.
    """
    case = Case(gpu, DEEP, **how)
    with gpu.runtime.on_stream(gpu.runtime.stream()):
        case.stop(1, passes=1, issued=COUNT)
    if cycle:
        case.engine.cycle = case.engine  # type: ignore[attr-defined]
    case.drop()
    ruin(gpu, COUNT)


class Ranks:
    """Two engines that keep one shard of every block each.

    Their runs are threads in this process.
    """

    def __init__(self, gpu, policy=LAYERWISE, *, on_device=False, **how) -> None:
        self.gpu = gpu
        self.on_device = on_device
        self.cases = [Case(gpu, policy, sharded=each, **how) for each in self._new_group()]

    def run(self, passes: int = 2, *, apart: bool = False, **how: Any) -> None:
        """Run on both ranks. With `apart`, each runs on a new stream."""
        for error in self.try_run(passes, apart=apart, hows=(how, how)):
            if error is not None:
                raise error

    def try_run(self, passes=2, *, apart=False, hows) -> list[BaseException | None]:
        """Run with different `Case.run` arguments on the ranks, and return the errors."""

        def work(case: Case, how: Mapping[str, Any]) -> None:
            runtime = self.gpu.runtime
            runtime.enter_thread()
            with runtime.on_stream(runtime.stream()) if apart else nullcontext():
                case.run(passes, **how)

        pairs = zip(self.cases, hows, strict=True)
        return in_threads([partial(work, *each) for each in pairs], name="wanstream-rank")

    def stop(self, at: int, **how: Any) -> None:
        """Run until the visit `at` on both ranks, in step."""
        how = {"delay": 1, "stop_at": at, "error": StoppedEarly, **how}
        errors = self.try_run(hows=(how, how))
        if [type(error) for error in errors] != [StoppedEarly, StoppedEarly]:
            raise AssertionError(f"the ranks ended with {errors}")

    def meet(self) -> None:
        """Join another rendezvous."""
        for case, sharded in zip(self.cases, self._new_group(), strict=True):
            case.engine.meet(sharded)

    def detach(self) -> None:
        for case in self.cases:
            case.detach()

    def _new_group(self) -> list[Sharded]:
        return ThreadGroup(2, wait_s=5.0).ranks(on_device=self.on_device)


ON_DEVICE = {"on_device": True}
PLACES = KINDS | {"on_device": ON_DEVICE}
PLACES |= {"on_device_patched_fp8": {**ON_DEVICE, "patched": True, "fp8": True}}
"""Block kinds, and shards in RAM or on the device."""


@scenarios(
    **PLACES,
    deep={"policy": DEEP},
    deep_patched_fp8={"policy": DEEP, "patched": True, "fp8": True},
    block_swap={"policy": BLOCK_SWAP, "fp8": True},
    partly_pinned={"policy": PARTLY_PINNED, "patched": True},
)
def gathered(gpu: Accelerator, **how: Any) -> None:
    """Two runs on two ranks, the second while the first one still computes."""
    ranks = Ranks(gpu, **how)
    ranks.run(delay=1)
    ranks.run()
    ranks.detach()


@scenario
def gathered_growing(gpu: Accelerator) -> None:
    """Shards on the device pass through host memory that grows with them."""
    ranks = Ranks(gpu, on_device=True, growing=True)
    ranks.run(1)
    for ram in (case.engine.ram for case in ranks.cases):
        assert ram.locked_bytes <= ram.nbytes, "memory that was replaced is still locked"
    ranks.detach()


@scenarios(**PLACES)
def gathered_cut_short(gpu: Accelerator, **how: Any) -> None:
    """The ranks stop before the same visit with gathers under way, and go on."""
    ranks = Ranks(gpu, DEEP, **how)
    ranks.stop(1)
    ranks.run(apart=True)
    ranks.detach()


@scenarios(**PLACES)
def gathered_broken(gpu: Accelerator, **how: Any) -> None:
    """One rank fails with gathers under way, and both meet again."""
    ranks = Ranks(gpu, DEEP, **how)
    failed, other = ranks.try_run(hows=({"delay": 1, "stop_at": 1}, {"delay": 1}))
    assert isinstance(failed, Interrupted)
    assert isinstance(other, GatherBrokenError)
    ranks.meet()
    ruin(gpu, 2 * COUNT)
    ranks.run(apart=True)
    ranks.detach()


@scenario
def gathered_policy_changes(gpu: Accelerator) -> None:
    """The policy changes, and memory is released, while the ranks still compute."""
    ranks = Ranks(gpu, RESIDENT, fp8=True, patched=True)
    for policy in (PINNED, LAYERWISE):
        ranks.run(1, delay=1, apart=True)
        for case in ranks.cases:
            case.engine.set_policy(policy)
        ruin(gpu, 2 * COUNT)
    ranks.run(1, delay=1, apart=True)
    for case in ranks.cases:
        case.engine.release_memory(1 << 60)
    ruin(gpu, 2 * COUNT)
    ranks.run(1)
    ranks.detach()


@scenarios(**PLACES)
def gathered_dropped(gpu: Accelerator, **how: Any) -> None:
    """Engines are deleted without `detach` while gathers are under way.

    Their memory is used again at once.
    """
    ranks = Ranks(gpu, DEEP, **how)
    ranks.stop(1, pause_s=0.002)
    for case in ranks.cases:
        case.drop()
    ruin(gpu, 2 * COUNT)


@scenario
def gathered_recorded(gpu: Accelerator) -> None:
    """All times in a run on two ranks are read."""
    ranks = Ranks(gpu, patched=True, fp8=True)
    recorders = [Recorder(gpu.device) for _ in ranks.cases]
    errors = ranks.try_run(hows=[{"recorder": recorder} for recorder in recorders])
    assert errors == [None, None], errors
    for recorder in recorders:
        assert all(step.transfers.copy_s > 0 for step in recorder.timeline().steps)
    ranks.detach()
