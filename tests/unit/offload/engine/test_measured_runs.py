"""Measured engine routes, against the kernel's counters and against known amounts."""

from __future__ import annotations

import gc
import json
import mmap
import os
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.devices import NvtxRanges
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.read_plan import ALIGNMENT, O_DIRECT
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import ReadSpan, Recorder, TelemetryOptions
from wanstream.tests.support.offload.fixtures import GatedSource
from wanstream.tests.support.offload.streaming import (
    CPU,
    IN_RAM,
    LAYERWISE,
    attach,
    keys,
    raise_at,
    stream,
)

BLOCKS = 4
WIDTH = 2048
STEPS = 3
BLOCK_BYTES = WIDTH * WIDTH * 2
HIDDEN = torch.ones(1, WIDTH)


def counted(name: str) -> int:
    """Return a kernel counter for this process."""
    return getattr(psutil.Process().io_counters(), name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Four blocks on the disk, each an 8 MB bf16 matrix."""
    path = tmp_path_factory.mktemp("weights") / "blocks.safetensors"
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(WIDTH, WIDTH, generator=generator).bfloat16() for _ in range(BLOCKS)]
    save_file({f"{i}": matrix for i, matrix in enumerate(matrices)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def measure(weights, policy, computed, *, direct=False, recorder=None, **how) -> Recorder:
    """Stream some steps through all blocks, and return the recorder."""
    recorder = recorder or Recorder(CPU)
    places = read_header(weights).tensors
    blocks = {key: {"weight": places[f"{key.block}"]} for key in sorted(keys("high", *range(4)))}
    source = FileSource(blocks, computed_dtypes=computed, direct=direct)
    form = {"bias": False, "device": "meta", "dtype": computed}
    stacks = {"high": [nn.Linear(WIDTH, WIDTH, **form) for _ in range(BLOCKS)]}
    with attach(stacks, policy, source=source) as engine, torch.no_grad():
        stream(engine, stacks, ["high"] * STEPS, HIDDEN.to(computed), recorder=recorder, **how)
    return recorder


def disk_counts(weights: Path) -> bool:
    """Return True if direct reads are possible in this file system, and counted."""
    before = counted("read_bytes")
    try:
        with os.fdopen(os.open(weights, os.O_RDONLY | O_DIRECT), "rb", 0) as file:
            file.readinto(mmap.mmap(-1, ALIGNMENT))
    except OSError:
        return False
    return counted("read_bytes") > before


WAYS = ["straight into buffers", "through staging", "some in RAM"]
ROUTES = [(LAYERWISE, torch.bfloat16, 0, True), (LAYERWISE, torch.float32, 0, False)]
ROUTES += [(replace(IN_RAM, ram_blocks=2), torch.bfloat16, 2, False)]


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="reads are not counted")
@pytest.mark.parametrize(("policy", "computed", "in_ram", "direct"), ROUTES, ids=WAYS)
def test_read_bytes_are_those_that_the_kernel_counts(weights, policy, computed, in_ram, direct):
    if direct and not disk_counts(weights):
        pytest.skip(f"O_DIRECT is refused or not counted in {weights.parent}")
    counter = "read_bytes" if direct else "read_chars"
    gc.collect()
    before = counted(counter)
    read = measure(weights, policy, computed, direct=direct).timeline().transfers.read_bytes
    assert read == pytest.approx(counted(counter) - before, rel=0.02)
    if not direct:
        assert read == (BLOCKS + (STEPS - 1) * (BLOCKS - in_ram)) * BLOCK_BYTES


RUNS = [(LAYERWISE, torch.bfloat16), (LAYERWISE, torch.float32)]
RUNS += [(OffloadPolicy.resident(), torch.float32)]


@pytest.mark.parametrize(("policy", "computed"), RUNS, ids=["straight", "decoded", "decoded once"])
def test_streamed_blocks_are_read_and_not_copied(weights, policy, computed):
    timeline = measure(weights, policy, computed).timeline()
    assert (timeline.transfers.copy_s, timeline.transfers.copied_bytes) == (0, 0)
    assert timeline.transfers.read_s > 0
    assert 0 <= timeline.transfers.stall_on_read_s <= timeline.stall_s
    assert timeline.first_block_s > 0
    for step in timeline.steps:
        moves = policy == LAYERWISE or step.index == 0
        assert step.bytes_moved == step.transfers.read_bytes == moves * BLOCKS * BLOCK_BYTES
        assert (step.decode_s > 0) == (moves and computed == torch.float32)
        assert step.wall_s >= step.compute_s + step.stall_s + step.decode_s


def test_blocks_in_ram_are_read_once_and_copied(weights):
    run = measure(weights, IN_RAM, torch.bfloat16).timeline()
    first, *later = run.steps
    assert first.transfers.read_s > 0
    for step in later:
        moved = step.transfers
        assert (moved.read_bytes, moved.read_s, moved.stall_on_read_s) == (0, 0, 0)
        assert moved.copied_bytes == step.bytes_moved == BLOCKS * BLOCK_BYTES
        assert 0 < moved.copy_s <= run.wall_s
        assert moved.copy_bytes_per_s == moved.copied_bytes / moved.copy_s
    assert sum(rates.fetches for rates in run.read_rates) == BLOCKS
    assert sum(rates.fetches for rates in run.copy_rates) == STEPS * BLOCKS
    assert sum(rates.nbytes for rates in run.copy_rates) == run.transfers.copied_bytes


def spans_held() -> int:
    """Count live ReadSpan objects in the process."""
    gc.collect()
    return sum(type(each) is ReadSpan for each in gc.get_objects())


def test_a_long_run_keeps_only_the_last_steps_reads(weights):
    held = []
    before = spans_held()  # other tests in the process may still hold recorders

    def count(visit: int) -> None:
        if visit == STEPS * BLOCKS - 1:
            held.append(spans_held() - before)

    recorder = measure(weights, LAYERWISE, torch.float32, during=count)
    assert recorder.timeline().transfers.read_bytes == STEPS * BLOCKS * BLOCK_BYTES
    assert held[0] <= BLOCKS


def test_waiting_for_the_file_counts_as_waiting_for_a_read(stacks):
    """Block 2 is read only after the visit waits for it: most stall time is on the read."""
    source = GatedSource(stacks, BlockKey("high", 2))

    def open_later(visit: int) -> None:
        if visit == 1:
            assert source.entered.wait(30)
            threading.Timer(0.5, source.opened.set).start()

    recorder = Recorder(CPU)
    with attach(stacks, source=source) as engine:
        stream(engine, stacks, ["high"], during=open_later, recorder=recorder)
    step = recorder.last
    assert 0 < step.transfers.stall_on_read_s <= step.stall_s
    # Events and the host's clock are compared: a busy machine may come in between.
    assert step.transfers.stall_on_read_s <= step.transfers.read_s + 0.1


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
def test_visits_fetches_and_reads_are_ranges_that_all_end(stacks, stop_at):
    recorder = Recorder(CPU)
    recorder.ranges = ranges = Noted()
    told = nullcontext() if stop_at is None else pytest.raises(KeyboardInterrupt)
    with attach(stacks) as engine, told:
        stream(engine, stacks, ["high"] * 2, during=raise_at(stop_at), recorder=recorder)
    if stop_at is None:
        names = ("high 2", "fetch high 2", "read high 2", "step 1 (high)")
        assert [ranges.names.count(name) for name in names] == [2, 2, 2, 1]
    assert ranges.names
    assert ranges.open == set()


def test_a_trace_has_every_visit_and_every_byte(weights, tmp_path):
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=tmp_path))
    with recorder.watching():
        measure(weights, LAYERWISE, torch.float32, recorder=recorder)
    (file,) = tmp_path.iterdir()
    trace = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in trace if event["ph"] == "X"]
    rows = Counter(event["cat"] for event in events)
    for name in ("compute", "wait", "decode", "read"):
        assert rows[name] == STEPS * BLOCKS
    timeline = recorder.timeline()
    read = sum(event["args"]["bytes"] for event in events if event["cat"] == "read")
    assert read == timeline.transfers.read_bytes
    computed = [event["ts"] for event in events if event["cat"] == "compute"]
    for step in timeline.steps:
        began = step.start_s * 1e6
        ended = (step.start_s + step.wall_s) * 1e6
        assert sum(began <= at < ended for at in computed) == BLOCKS
