"""Measured engine routes, against the kernel's counters and against known amounts."""

from __future__ import annotations

import gc
import json
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.devices import NvtxRanges
from wanstream.offload import OffloadEngine, attach_offload
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.sources.read_plan import ALIGNMENT, O_DIRECT
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import Timeline
from wanstream.telemetry import Recorder, TelemetryOptions
from wanstream.telemetry.step_events import ReadSpan

CPU = torch.device("cpu")
BLOCKS, WIDTH, STEPS = 4, 2048, 3
BLOCK_BYTES = WIDTH * WIDTH * 2
COUNTERS = Path("/proc/self/io")
LAYERWISE = OffloadPolicy.layerwise(1)

needs_counters = pytest.mark.skipif(
    not os.access(COUNTERS, os.R_OK), reason="this kernel does not count reads"
)


def counted(name: str) -> int:
    """Return a kernel counter for this process."""
    lines = dict(line.split(": ") for line in COUNTERS.read_text(encoding="ascii").splitlines())
    return int(lines[name])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks on the disk, each an 8 MB bf16 matrix."""
    path = tmp_path_factory.mktemp("weights") / "blocks.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file(
        {f"{i}": torch.randn(WIDTH, WIDTH, generator=generator).bfloat16() for i in range(BLOCKS)},
        path,
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def source_of(weights: Path, *, direct: bool, computed: torch.dtype) -> FileSource:
    places = read_header(weights).tensors
    blocks = {BlockKey("high", i): {"weight": places[f"{i}"]} for i in range(BLOCKS)}
    return FileSource(blocks, computed_dtypes=computed, direct=direct)


def stack(dtype: torch.dtype) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False, device="meta", dtype=dtype) for _ in range(BLOCKS)]


def measured(source: FileSource, policy: OffloadPolicy, dtype: torch.dtype) -> Timeline:
    """Run some steps through all blocks."""
    recorder = Recorder(CPU)
    blocks = {"high": stack(dtype)}
    with attach_offload(
        blocks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        visits = step_visits(["high"] * STEPS, handle.block_counts)
        with handle.run(visits, recorder=recorder) as run:
            for step in range(STEPS):
                with recorder.step(step, "high"):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            pass
    return recorder.timeline()


def disk_counts(weights: Path) -> bool:
    """Return True if direct reads are possible in this file system, and counted."""
    before = counted("read_bytes")
    try:
        file = os.open(weights, os.O_RDONLY | O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(file, [page], 0)
    except OSError:
        return False
    finally:
        os.close(file)
    return counted("read_bytes") > before


ROUTES = {
    "straight into buffers": (LAYERWISE, torch.bfloat16),
    "through staging": (LAYERWISE, torch.float32),
    "some at home": (replace(LAYERWISE, source="pinned", ram_blocks=2), torch.bfloat16),
}


@needs_counters
@pytest.mark.parametrize("route", ROUTES)
def test_bytes_through_the_page_cache_are_those_that_the_kernel_counts(
    weights: Path, route: str
) -> None:
    policy, computed = ROUTES[route]
    gc.collect()
    before = counted("rchar")
    timeline = measured(source_of(weights, direct=False, computed=computed), policy, computed)
    assert timeline.transfers.read_bytes == pytest.approx(counted("rchar") - before, rel=0.02)
    assert (
        timeline.transfers.read_bytes
        == (BLOCKS + (STEPS - 1) * (BLOCKS - 2 * (route == "some at home"))) * BLOCK_BYTES
    )


@needs_counters
@pytest.mark.parametrize("route", ROUTES)
def test_bytes_past_the_page_cache_are_those_that_the_kernel_counts(
    weights: Path, route: str
) -> None:
    if not disk_counts(weights):
        pytest.skip(
            f"the file system of {weights.parent} refuses O_DIRECT, or the kernel counts no reads "
            "of it"
        )
    policy, computed = ROUTES[route]
    before = counted("read_bytes")
    timeline = measured(source_of(weights, direct=True, computed=computed), policy, computed)
    assert timeline.transfers.read_bytes == pytest.approx(counted("read_bytes") - before, rel=0.02)


def test_a_route_is_busy_only_where_it_was_used(weights: Path) -> None:
    """A CPU copies RAM-resident blocks.

    Other blocks are read directly into buffers, or decoded from the slot.
    """
    straight = measured(
        source_of(weights, direct=False, computed=torch.bfloat16), LAYERWISE, torch.bfloat16
    )
    decoded = measured(
        source_of(weights, direct=False, computed=torch.float32), LAYERWISE, torch.float32
    )
    for timeline in (straight, decoded):
        assert (timeline.transfers.copy_s, timeline.transfers.copied_bytes) == (0, 0)
        assert timeline.transfers.read_s > 0
        assert 0 <= timeline.transfers.stall_on_read_s <= timeline.stall_s
    at_home = replace(LAYERWISE, source="pinned")
    homes = measured(
        source_of(weights, direct=False, computed=torch.bfloat16), at_home, torch.bfloat16
    )
    first, *later = homes.steps
    assert first.transfers.read_s > 0
    for step in later:
        assert (
            step.transfers.read_bytes,
            step.transfers.read_s,
            step.transfers.stall_on_read_s,
        ) == (0, 0, 0)
        assert step.transfers.copied_bytes == step.bytes_moved == BLOCKS * BLOCK_BYTES
        assert 0 < step.transfers.copy_s <= homes.wall_s
        assert (
            step.transfers.copy_bytes_per_s == step.transfers.copied_bytes / step.transfers.copy_s
        )


def test_every_fetch_of_a_run_is_counted_by_its_rate(weights: Path) -> None:
    """All blocks are read once into RAM slots, and copied from them in every step."""
    policy = replace(LAYERWISE, source="pinned")
    run = measured(
        source_of(weights, direct=False, computed=torch.bfloat16), policy, torch.bfloat16
    )
    assert sum(rates.fetches for rates in run.read_rates) == BLOCKS
    assert sum(rates.fetches for rates in run.copy_rates) == STEPS * BLOCKS
    assert sum(rates.nbytes for rates in run.copy_rates) == run.transfers.copied_bytes


def spans_held() -> int:
    """Count live ReadSpan objects in the process."""
    gc.collect()
    return sum(type(each) is ReadSpan for each in gc.get_objects())


@pytest.mark.parametrize(
    "computed", [torch.bfloat16, torch.float32], ids=["straight", "through staging"]
)
def test_a_long_run_keeps_no_reading_of_steps_that_are_over(
    weights: Path, computed: torch.dtype
) -> None:
    recorder, steps, blocks = Recorder(CPU), 6, {"high": stack(computed)}
    source = source_of(weights, direct=False, computed=computed)
    # Other tests in the process may still hold recorders.
    held_before = spans_held()
    with attach_offload(
        blocks, policy=LAYERWISE, device=CPU, source=source, follow_forward=False
    ) as handle:
        with handle.run(
            step_visits(["high"] * steps, handle.block_counts), recorder=recorder
        ) as run:
            for step in range(steps):
                with recorder.step(step, "high"):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            pass
            held = spans_held() - held_before
    assert recorder.timeline().transfers.read_bytes == steps * BLOCKS * BLOCK_BYTES
    assert held <= BLOCKS, "those of the last step"


class GatedSource:
    """Source with one block's read held until the test releases it."""

    def __init__(self, inner: ModuleSource, gated: BlockKey) -> None:
        self._inner, self._gated = inner, gated
        self.asked, self.through = threading.Event(), threading.Event()
        for name in ("formats", "scales", "file_bytes", "close"):
            setattr(self, name, getattr(inner, name))

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        if key == self._gated:
            self.asked.set()
            assert self.through.wait(30)
        self._inner.read_block(key, into)


def test_waiting_for_the_file_is_told_from_waiting_for_the_copy(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    """Block 2 is read only after the visit waits for it: most stall time is on the read."""
    blocks = {"high": make_stack(4)}
    source = GatedSource(ModuleSource(blocks), BlockKey("high", 2))
    recorder = Recorder(CPU)
    with attach_offload(
        blocks, policy=LAYERWISE, device=CPU, source=source, follow_forward=False
    ) as handle:
        with (
            handle.run(step_visits(["high"], handle.block_counts), recorder=recorder) as run,
            recorder.step(0, "high"),
        ):
            for block in range(4):
                if block == 2:
                    assert source.asked.wait(30)
                    threading.Timer(0.5, source.through.set).start()
                with run.visit(0, "high", block):
                    pass
    step = recorder.last
    assert 0 < step.transfers.stall_on_read_s <= step.stall_s
    assert step.transfers.read_s >= step.transfers.stall_on_read_s


class Noted(NvtxRanges):
    """Ranges with recorded calls from any thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open: set[int] = set()
        self._lock = threading.Lock()

    def start(self, name: str) -> int:
        with self._lock:
            self.names.append(name)
            self.open.add(len(self.names))
            return len(self.names)

    def end(self, number: int) -> None:
        with self._lock:
            self.open.remove(number)


@pytest.mark.parametrize("stop_at", [None, 3])
def test_visits_fetches_and_reads_are_ranges_that_all_end(
    make_stack: Callable[..., nn.ModuleList], stop_at: int | None
) -> None:
    ranges, blocks = Noted(), {"high": make_stack(4)}
    recorder = Recorder(CPU)
    recorder.ranges = ranges

    def run_all(handle: OffloadEngine) -> None:
        with handle.run(step_visits(["high"] * 2, handle.block_counts), recorder=recorder) as run:
            for step in range(2):
                with recorder.step(step, "high"):
                    for block in range(4):
                        with run.visit(step, "high", block):
                            if block == stop_at:
                                raise KeyboardInterrupt

    with attach_offload(blocks, policy=LAYERWISE, device=CPU, follow_forward=False) as handle:
        if stop_at is None:
            run_all(handle)
            names = ("high 2", "fetch high 2", "read high 2", "step 1 (high)")
            assert [ranges.names.count(name) for name in names] == [2, 2, 2, 1]
        else:
            with pytest.raises(KeyboardInterrupt):
                run_all(handle)
    assert ranges.names
    assert ranges.open == set()


def test_a_trace_has_every_visit_and_every_byte(weights: Path, tmp_path: Path) -> None:
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=tmp_path))
    source = source_of(weights, direct=False, computed=torch.float32)
    blocks = {"high": stack(torch.float32)}
    with attach_offload(
        blocks, policy=LAYERWISE, device=CPU, source=source, follow_forward=False
    ) as handle:
        with (
            recorder.watching(),
            handle.run(step_visits(["high"] * 2, handle.block_counts), recorder=recorder) as run,
        ):
            for step in range(2):
                with recorder.step(step, "high"):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            pass
    (file,) = tmp_path.iterdir()
    events = [
        event
        for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        if event["ph"] == "X"
    ]
    rows = {
        name: [event for event in events if event["cat"] == name]
        for name in ("compute", "wait", "decode", "read")
    }
    assert {name: len(row) for name, row in rows.items()} == dict.fromkeys(rows, 2 * BLOCKS)
    assert (
        sum(event["args"]["bytes"] for event in rows["read"])
        == recorder.timeline().transfers.read_bytes
    )
    for step in recorder.timeline().steps:
        began, ended = step.start_s * 1e6, (step.start_s + step.wall_s) * 1e6
        assert len([event for event in rows["compute"] if began <= event["ts"] < ended]) == BLOCKS
