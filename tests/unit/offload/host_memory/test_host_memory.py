from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import platform
import subprocess
import sys

import psutil
import pytest
import torch

from wanstream.offload.core import pages
from wanstream.offload.core.pages import HUGE_PAGE, in_pages, map_memory

FAULTS_OF_TEN_ROUNDS = """
import resource, sys, torch
from wanstream.offload.core.pages import keep_freed_memory
count, megabytes = map(int, sys.argv[1:])
keep_freed_memory()
def block():
    tensors = [torch.ones(megabytes * 2**20, dtype=torch.uint8) for _ in range(count)]
torch.set_num_threads(1)
for _ in range(2):  # the first tensors of a process leave small things between them
    block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("nbytes", "pages"),
    [(0, 0), (1, 1), (mmap.PAGESIZE, 1), (mmap.PAGESIZE + 1, 2)],
    ids=["0", "1", "page", "page+1"],
)
def test_bytes_are_rounded_up_to_pages(nbytes, pages):
    assert in_pages(nbytes) == pages * mmap.PAGESIZE


@pytest.mark.parametrize("advice", [pages.TAKES_ADVICE, False], ids=["here", "other systems"])
@pytest.mark.parametrize("nbytes", [0, 1, 12_345, HUGE_PAGE, HUGE_PAGE + 4096, 3 * HUGE_PAGE])
def test_mapped_memory_has_exactly_its_size_and_starts_at_a_page(monkeypatch, nbytes, advice):
    monkeypatch.setattr(pages, "TAKES_ADVICE", advice)
    memory = map_memory(nbytes).fill_(7)
    assert (memory.shape, memory.dtype, memory.is_inference()) == ((nbytes,), torch.uint8, False)
    assert int(memory.sum()) == 7 * nbytes
    if nbytes:
        assert (
            memory.data_ptr() % (HUGE_PAGE if advice and nbytes >= HUGE_PAGE else mmap.PAGESIZE)
            == 0
        )


def test_memory_is_mapped_where_the_system_refuses_all_advice(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert int(map_memory(HUGE_PAGE + 5).fill_(1).sum()) == HUGE_PAGE + 5


@pytest.mark.skipif(
    sys.platform != "linux", reason="memory apart from forked processes on Linux only"
)
@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 2 * HUGE_PAGE])
def test_a_forked_process_finds_zeros_and_its_end_changes_nothing(nbytes):
    memory = map_memory(nbytes).fill_(7)
    seen, written = os.pipe()
    if (child := os.fork()) == 0:
        os.write(written, bytes([ctypes.string_at(memory.data_ptr() + nbytes - 1, 1)[0]]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(seen, 1) == b"\0"
    assert memory.eq(7).all()
    os.close(seen)
    os.close(written)


@pytest.mark.skipif(sys.platform != "linux", reason="counts of Linux")
def test_memory_goes_with_its_last_view():
    process = psutil.Process()
    memory = map_memory(64 * HUGE_PAGE).fill_(1)
    gc.collect()  # memory left by earlier tests must not go later
    rss, view = process.memory_info().rss, memory[:10]
    del memory
    gc.collect()
    assert process.memory_info().rss > rss - 32 * HUGE_PAGE, "a view keeps it"
    del view
    gc.collect()
    assert process.memory_info().rss < rss - 32 * HUGE_PAGE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize(("count", "megabytes"), [(3, 9), (6, 17), (8, 9), (7, 31)])
@pytest.mark.integration
def test_freed_activations_are_not_faulted_in_again(count, megabytes):
    command = [sys.executable, "-c", FAULTS_OF_TEN_ROUNDS, str(count), str(megabytes)]
    faults = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults < 10 * count * megabytes * 2**20 // 4096 / 10, (
        "a tenth of the pages that were written"
    )
