"""Rate and CPU cost for reading blocks from a file: direct reads, and reads by the page cache.

A file with random bytes is read into memory with mapped pages, in the layout of a block: tensors
start at any byte after a header, and are written to multiples of 256 bytes. Cold: the file was
dropped from the page cache.

python benchmarks/file_reading.py [folder on the disk to measure]
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from record import record

from wanstream.offload.sources.read_plan import ALIGNMENT, EXTENT_BYTES, PIECE_BYTES, ReadPiece
from wanstream.offload.sources.reader import FileReader

FILE_BYTES = 1_000_000_000
# This is no multiple of 4096: in a real file, the tensors begin after a header of any length.
DATA_START = 4_712
TENSOR_BYTES = 52_428_800  # 5120 x 5120 in bf16
ROUNDS = 5
THREADS = (1, 2, 4, 8)
SIZES_MB = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class ReadCase:
    """Reading strategy.

    `size` is the size of a direct read, or of a piece read through the page cache, in bytes.
    """

    route: str
    threads: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.route}, {self.threads} threads, {self.size // 2**20} MiB"


def cases() -> Iterator[ReadCase]:
    """Yield thread counts at the default sizes, then sizes at four threads.

    Routes to compare follow each other.
    """
    for threads in THREADS:
        yield ReadCase(route="direct", threads=threads, size=EXTENT_BYTES)
        yield ReadCase(route="cold cache", threads=threads, size=PIECE_BYTES)
        yield ReadCase(route="warm cache", threads=threads, size=PIECE_BYTES)
    for size_mb in SIZES_MB:
        for route, used, more in (
            # A direct read starts at a page border, and needs one page more for the same bytes.
            ("direct", EXTENT_BYTES, ALIGNMENT),
            ("cold cache", PIECE_BYTES, 0),
        ):
            if size_mb * 2**20 + more != used:
                yield ReadCase(route=route, threads=4, size=size_mb * 2**20 + more)


def write_file(path: Path) -> None:
    """Write incompressible random bytes, and sync them to the disk."""
    values = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, FILE_BYTES, 2**24):
            file.write(values.bytes(min(2**24, FILE_BYTES - start)))
        file.flush()
        # Only clean pages can be dropped from the page cache.
        os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pieces(path: Path, size: int) -> list[ReadPiece]:
    """Return the file's tensors, cut as in `read_pieces`."""
    found = []
    for tensor in range(DATA_START, FILE_BYTES, TENSOR_BYTES):
        end = min(tensor + TENSOR_BYTES, FILE_BYTES)
        for offset in range(tensor, end, size):
            nbytes = min(size, end - offset)
            target = offset - DATA_START
            found.append(
                ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=("w",))
            )
    return found


def measure(case: ReadCase, path: Path, memory: memoryview) -> dict[str, float]:
    """Read the whole file once."""
    direct = case.route == "direct"
    # `case.size` is the size of a direct read, or of a piece on the other routes.
    reader = FileReader(
        readers=case.threads, direct=direct, extent_bytes=case.size if direct else EXTENT_BYTES
    )
    reads = [(piece, memory) for piece in pieces(path, PIECE_BYTES if direct else case.size)]
    # Warm-up: start the threads, allocate their buffers, open the file.
    reader.read(reads if case.route == "warm cache" else reads[:32])
    if case.route != "warm cache":
        drop(path)
    before = resource.getrusage(resource.RUSAGE_SELF)
    asked = reader.bytes_read
    # Linux counts only bytes from storage here, not from the page cache.
    disk_before = psutil.Process().io_counters().read_bytes
    began = time.perf_counter()
    reader.read(reads)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    from_disk = psutil.Process().io_counters().read_bytes - disk_before
    asked = reader.bytes_read - asked
    reader.close()
    wanted = sum(piece.nbytes for piece, _ in reads)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "gb_per_s": wanted / wall / 1e9,
        "cpu_s_per_gb": cpu / (wanted / 1e9),
        "asked": asked / wanted,
        "from_disk": from_disk / wanted,
    }


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        path = Path(folder) / "weights.bin"
        write_file(path)
        target = np.frombuffer(mmap.mmap(-1, FILE_BYTES), np.uint8)
        # Every page is touched first, so no page fault is measured.
        target[:: mmap.PAGESIZE] = 1
        load_before = psutil.getloadavg()[0]
        runs: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases()}
        for number in range(ROUNDS):
            # Shuffled each time: the previous case affects free memory and the machine's caches.
            for case in random.Random(number).sample(list(cases()), len(runs)):
                runs[case.name].append(measure(case, path, target.data))
    figures: dict[str, object] = {
        name: {key: round(statistics.median(run[key] for run in of_case), 3) for key in of_case[0]}
        | {
            "gb_per_s_range": [
                round(pick(run["gb_per_s"] for run in of_case), 2) for pick in (min, max)
            ]
        }
        for name, of_case in runs.items()
    }
    figures["load average before and after"] = [
        round(load, 1) for load in (load_before, psutil.getloadavg()[0])
    ]
    for name, of_case in figures.items():
        print(name, of_case)
    method = (
        f"FileReader reads {FILE_BYTES / 1e9:g} GB of one file into touched memory, tensors of "
        f"{TENSOR_BYTES / 1e6:.0f} MB from byte {DATA_START} on; medians of {ROUNDS} rounds "
        "through all cases in one process, shuffled; cold: dropped by posix_fadvise after fsync, "
        "the disk's own caches are not; warm: read once before; cpu_s_per_gb: user and system time "
        "of the process; asked: bytes asked of the file, from_disk: bytes that the system counts "
        "as read from storage, both per wanted byte"
    )
    print(record("file-reading", method=method, figures=figures))


if __name__ == "__main__":
    main()
