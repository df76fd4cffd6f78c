"""RAM fill rate from the page cache while a driver page-locks it, compared with another version.

The driver is simulated: it sleeps as long as a lock at 14 GB/s, without the interpreter lock.

Both versions fill the same slots in processes that alternate, each several times. Fills are
repeated if others used the machine meanwhile, so start it when the machine is quiet.

python benchmarks/ram_filling.py [checkout of the other version] [folder for a 1.4 GB file]
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offload_case.linux import machine_time, process_usage
from record import record
from safetensors.torch import save_file

from wanstream.offload.formats import read_header
from wanstream.offload.host_memory.ram_run import RamRun
from wanstream.offload.host_memory.ram_slots import RamSlots
from wanstream.offload.sources import FileSource
from wanstream.plan.programs import BlockKey, compile_program, compile_ram, plan_ram, step_visits
from wanstream.schema import OffloadPolicy, Residency

# Wan2.2 A14B blocks in fp8.
BLOCKS = 4
MATRICES = 10
MATRIX_BYTES = 35_127_296  # a tenth of a block
LOCK_BYTES_PER_S = 14e9
FILLS = 3
"""Fills per process. The fastest counts."""
PAIRS = 7
"""Required pairs of undisturbed processes."""
MOST_PAIRS = 21
"""Maximum number of attempted pairs."""
DISTURBED = 0.1
"""A fill is disturbed if others use this share of the machine's processor time."""

Fill = dict[str, Any]


class SleepingLock:
    """Driver that sleeps as long as a page-lock takes, and records the spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def lock_pages(self, memory: torch.Tensor) -> None:
        start = time.perf_counter()
        time.sleep(memory.numel() / LOCK_BYTES_PER_S)
        self.spans.append((start, time.perf_counter()))

    def unlock_pages(self, memory: torch.Tensor) -> None: ...


class TimedSource:
    """Source that records read spans."""

    def __init__(self, inner: FileSource) -> None:
        self._inner = inner
        self.formats = inner.formats
        self.spans: list[tuple[float, float]] = []

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self._inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        start = time.perf_counter()
        self._inner.read_block(key, into)
        self.spans.append((start, time.perf_counter()))

    def close(self) -> None:
        self._inner.close()


def write_blocks(path: Path) -> None:
    """Write random blocks, and sync them to the disk."""
    values = np.random.default_rng(0)
    save_file(
        {
            f"{block}.{matrix}": torch.frombuffer(
                bytearray(values.bytes(MATRIX_BYTES)), dtype=torch.uint8
            )
            for block in range(BLOCKS)
            for matrix in range(MATRICES)
        },
        path,
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())


def seconds_of(spans: list[tuple[float, float]]) -> float:
    """Return the seconds with at least one active span."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def warm_free_memory(nbytes: int) -> None:
    """Touch and free as much memory as the run will map.

    A virtual machine returns free pages to the host, and faults them in again at 0.4 GB/s in any
    process.
    """
    memory = mmap.mmap(-1, nbytes + 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # `map_memory` gives the same advice, so the host backs the same kind of pages.
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def measure(path: Path) -> Fill:
    """Fill all block slots several times, and return the fastest undisturbed fill, or else any."""
    fills = [fill_once(path) for _ in range(FILLS)]
    calm = [fill for fill in fills if fill["others"] < DISTURBED]
    return max(calm or fills, key=lambda fill: float(fill["gb_per_s"]))


def fill_once(path: Path) -> Fill:
    places = read_header(path).tensors
    blocks = {
        BlockKey("high", block): {
            str(matrix): places[f"{block}.{matrix}"] for matrix in range(MATRICES)
        }
        for block in range(BLOCKS)
    }
    source = TimedSource(FileSource(blocks, computed_dtypes=torch.uint8, direct=False))
    counts = {"high": BLOCKS}
    visits = step_visits(["high"], counts)
    residents = plan_ram(
        OffloadPolicy.layerwise(1, source="pinned"), Residency(residents={}), counts
    )
    program = compile_ram(compile_program(visits, Residency(residents={}), 2), residents, staging=2)
    driver = SleepingLock()
    slots = RamSlots({key: each.stored.nbytes for key, each in source.formats.items()}, lock=driver)
    slots.resize(residents, 2)
    warm_free_memory(BLOCKS * MATRICES * MATRIX_BYTES)
    run = RamRun(slots, program, source, None, device=torch.device("cpu"))
    machine = machine_time()
    usage = process_usage()
    start = time.perf_counter()
    run.start()
    first_s = 0.0
    for fetch in range(BLOCKS):
        run.take(fetch)
        run.leave(fetch)
        # Only the first block sets the time.
        first_s = first_s or time.perf_counter() - start
    wall = time.perf_counter() - start
    used = process_usage().since(usage)
    machine_after = machine_time()
    # The threads end before the slots are freed.
    run.join()
    slots.end_run()
    nbytes = slots.nbytes
    slots.close()
    source.close()
    read_s = seconds_of(source.spans)
    lock_s = seconds_of(driver.spans)
    cpu_s = used.user_s + used.system_s
    others_s = (
        machine_after.busy_s + machine_after.stolen_s - machine.busy_s - machine.stolen_s - cpu_s
    )
    return {
        "gb_per_s": nbytes / wall / 1e9,
        "first_block_s": first_s,
        "read_s": read_s,
        "lock_s": lock_s,
        "read_and_lock_at_once_s": read_s + lock_s - seconds_of([*source.spans, *driver.spans]),
        "cpu_s_per_gb": cpu_s / nbytes * 1e9,
        "others": max(0.0, others_s) / (wall * (os.cpu_count() or 1)),
        "reads": [[at - start for at in span] for span in sorted(source.spans)],
        "locks": [[at - start for at in span] for span in sorted(driver.spans)],
    }


def run_once(checkout: Path, path: Path) -> Fill:
    """Measure one version in a new process, with the file in the page cache."""
    with tempfile.TemporaryDirectory() as folder, path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass
        # The link gives the checkout its import name, whatever the folder is called.
        (Path(folder) / "wanstream").symlink_to(checkout.resolve())
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, __file__, "--measure", str(path)]
        output = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
    return dict(json.loads(output))


def rounded(value: Any) -> Any:
    return [rounded(each) for each in value] if isinstance(value, list) else round(value, 3)


def main(before: Path | None, folder: str | None) -> None:
    versions = {"now": Path(__file__).parent.parent} | (
        {} if before is None else {"before": before}
    )
    pairs: list[dict[str, Fill]] = []
    tried = 0
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "blocks.safetensors"
        write_blocks(path)
        while len(pairs) < PAIRS and tried < MOST_PAIRS:
            # Each version is first in every second pair.
            order = sorted(versions, reverse=bool(tried % 2))
            pair = {name: run_once(versions[name], path) for name in order}
            tried += 1
            calm = all(fill["others"] < DISTURBED for fill in pair.values())
            shown = {
                name: f"{fill['gb_per_s']:.2f} GB/s, others {fill['others']:.0%}"
                for name, fill in pair.items()
            }
            print(shown, "" if calm else "disturbed", flush=True)
            pairs += [pair] * calm
    if len(pairs) < PAIRS:
        sys.exit(
            f"{len(pairs)} of {tried} pairs were not disturbed, {PAIRS} are needed: end other "
            "programs"
        )
    figures: dict[str, Any] = {}
    for name in versions:
        of_version = sorted(
            (pair[name] for pair in pairs), key=lambda fill: float(fill["gb_per_s"])
        )
        # All figures come from the one fill with the median rate, because they belong together.
        figures[name] = {key: rounded(value) for key, value in of_version[PAIRS // 2].items()}
        figures[name]["gb_per_s_of_each_pair"] = [
            round(pair[name]["gb_per_s"], 2) for pair in pairs
        ]
    if before is not None:
        ratios = [pair["now"]["gb_per_s"] / pair["before"]["gb_per_s"] for pair in pairs]
        figures["ratio, median of the pairs"] = round(statistics.median(ratios), 2)
        figures["ratio of each pair"] = [round(ratio, 2) for ratio in ratios]
    figures["pairs tried"] = tried
    nbytes = MATRICES * MATRIX_BYTES
    method = (
        f"RamRun fills {BLOCKS} RAM-resident slots of {nbytes / 1e6:.0f} MB from a file in the "
        "page cache into memory that the host of this virtual machine has backed, and page-locks "
        f"them with a driver that sleeps at {LOCK_BYTES_PER_S / 1e9:g} GB/s; from the start of the "
        f"run to the last block taken; the fastest of {FILLS} fills of a process; the versions "
        f"alternate; {PAIRS} pairs of processes in which others used less than {DISTURBED:.0%} of "
        "the processors; figures of the fill of median rate; read_s and lock_s: seconds in which "
        "at least one read or lock is active; reads and locks: their start and end in seconds"
    )
    print(record("ram-filling", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        main(
            Path(sys.argv[1]) if len(sys.argv) > 1 else None,
            sys.argv[2] if len(sys.argv) > 2 else None,
        )
