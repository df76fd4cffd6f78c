"""Rate at which RAM is filled from the page cache while a driver page-locks it, compared with another version.

The driver is simulated: it sleeps for the time of a lock at 14 GB/s, without the interpreter lock.

python benchmarks/ram_filling.py [checkout of the version to compare with] [folder for a file of 1.4 GB]
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from record import record
from safetensors.torch import save_file

from wanstream.offload import FileSource, read_header
from wanstream.offload.host_memory.ram_run import RamRun
from wanstream.offload.host_memory.ram_slots import RamSlots
from wanstream.plan import BlockKey, compile_program, compile_ram, plan_ram, step_visits
from wanstream.schema import OffloadPolicy, Residency

# A block of Wan2.2 A14B in fp8.
BLOCKS = 4
MATRICES = 10
MATRIX_BYTES = 35_127_296
LOCK_BYTES_PER_S = 14e9
ROUNDS = 5


class SleepingLock:
    """Driver that takes the time of a page-lock, and records its spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def lock_pages(self, memory: torch.Tensor) -> None:
        start = time.perf_counter()
        time.sleep(memory.numel() / LOCK_BYTES_PER_S)
        self.spans.append((start, time.perf_counter()))

    def unlock_pages(self, memory: torch.Tensor) -> None: ...


class TimedSource:
    """Source that records the spans of its reads."""

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
            f"{block}.{matrix}": torch.frombuffer(bytearray(values.bytes(MATRIX_BYTES)), dtype=torch.uint8)
            for block in range(BLOCKS)
            for matrix in range(MATRICES)
        },
        path,
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())


def seconds_of(spans: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the spans is active."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def warm_free_memory(nbytes: int) -> None:
    """Touch and free as much memory as the run will map.

    A virtual machine returns free pages to its host, and faults them in again at 0.4 GB/s in any process.
    """
    memory = mmap.mmap(-1, nbytes + 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def measure(path: Path) -> dict[str, float]:
    """Fill the slots of all blocks once."""
    places = read_header(path).tensors
    blocks = {
        BlockKey("high", block): {str(matrix): places[f"{block}.{matrix}"] for matrix in range(MATRICES)}
        for block in range(BLOCKS)
    }
    source = TimedSource(FileSource(blocks, computed_dtypes=torch.uint8, direct=False))
    counts = {"high": BLOCKS}
    visits = step_visits(["high"], counts)
    residents = plan_ram(OffloadPolicy.layerwise(1, source="pinned"), Residency(residents={}), counts)
    program = compile_ram(compile_program(visits, Residency(residents={}), 2), residents, staging=2)
    driver = SleepingLock()
    slots = RamSlots({key: each.stored.nbytes for key, each in source.formats.items()}, lock=driver)
    slots.resize(residents, 2)
    warm_free_memory(BLOCKS * MATRICES * MATRIX_BYTES)
    run = RamRun(slots, program, source, None, device=torch.device("cpu"))
    cpu_before = psutil.Process().cpu_times()
    start = time.perf_counter()
    run.start()
    first_s = 0.0
    for fetch in range(BLOCKS):
        run.take(fetch)
        run.leave(fetch)
        first_s = first_s or time.perf_counter() - start
    wall = time.perf_counter() - start
    cpu = psutil.Process().cpu_times()
    run.join()
    run.end()
    nbytes = slots.nbytes
    slots.close()
    source.close()
    read_s = seconds_of(source.spans)
    lock_s = seconds_of(driver.spans)
    return {
        "gb_per_s": nbytes / wall / 1e9,
        "first_block_s": first_s,
        "read_s": read_s,
        "lock_s": lock_s,
        "read_and_lock_at_once_s": read_s + lock_s - seconds_of([*source.spans, *driver.spans]),
        "cpu_s_per_gb": (cpu.user + cpu.system - cpu_before.user - cpu_before.system) / nbytes * 1e9,
    }


def run_once(checkout: Path, path: Path) -> dict[str, float]:
    """Measure one version in a new process, with the file in the page cache."""
    with tempfile.TemporaryDirectory() as folder, path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass
        (Path(folder) / "wanstream").symlink_to(checkout.resolve())
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, __file__, "--measure", str(path)]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(output))


def main(before: Path | None, folder: str | None) -> None:
    versions = {"now": Path(__file__).parent.parent} | ({} if before is None else {"before": before})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "blocks.safetensors"
        write_blocks(path)
        load_before = psutil.getloadavg()[0]
        for number in range(ROUNDS):
            for name in sorted(versions, reverse=bool(number % 2)):
                runs[name].append(run_once(versions[name], path))
                print(name, runs[name][-1], flush=True)
    fastest = {name: max(of_version, key=lambda run: run["gb_per_s"]) for name, of_version in runs.items()}
    figures: dict[str, Any] = {
        name: {key: round(value, 3) for key, value in best.items()} for name, best in fastest.items()
    }
    for name, of_version in runs.items():
        figures[name]["gb_per_s_of_each_run"] = [round(run["gb_per_s"], 2) for run in of_version]
    if before is not None:
        figures["ratio of the fastest runs"] = round(fastest["now"]["gb_per_s"] / fastest["before"]["gb_per_s"], 2)
        pairs = zip(runs["now"], runs["before"], strict=True)
        figures["ratio of each round"] = [round(now["gb_per_s"] / then["gb_per_s"], 2) for now, then in pairs]
    figures["load average before and after"] = [round(load, 1) for load in (load_before, psutil.getloadavg()[0])]
    nbytes = MATRICES * MATRIX_BYTES
    method = (
        f"RamRun fills {BLOCKS} RAM-resident slots of {nbytes / 1e6:.0f} MB from a file in the page cache into memory "
        "that the host of this virtual machine has backed, and page-locks them with a driver that sleeps at "
        f"{LOCK_BYTES_PER_S / 1e9:g} GB/s; from the start of the run to the last block taken; a process per run, the "
        f"versions alternate, figures of the fastest of {ROUNDS} runs each; read_s and lock_s: seconds in which at "
        "least one read or lock is active"
    )
    print(record("ram-filling", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2] if len(sys.argv) > 2 else None)
