from __future__ import annotations

import gc
import mmap
import platform
import subprocess
import sys

import psutil
import pytest

from wanstream.offload.host_memory.pages import HUGE_PAGE, in_pages, map_huge, map_memory

FAULTS_OF_TEN_ROUNDS = """
import resource, sys, torch
from wanstream.offload.host_memory.pages import keep_freed_memory
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
    ("nbytes", "pages"), [(0, 0), (1, 1), (mmap.PAGESIZE, 1), (mmap.PAGESIZE + 1, 2)], ids=["0", "1", "page", "page+1"]
)
def test_bytes_are_rounded_up_to_pages(nbytes, pages):
    assert in_pages(nbytes) == pages * mmap.PAGESIZE


def test_mapped_memory_has_exactly_its_size():
    assert map_memory(12_345).numel() == 12_345


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
@pytest.mark.parametrize("nbytes", [4096, HUGE_PAGE, HUGE_PAGE + 4096, 3 * HUGE_PAGE])
def test_huge_memory_starts_at_a_huge_page_and_can_be_written(nbytes):
    memory = map_huge(nbytes)
    memory[:] = 7
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % HUGE_PAGE == 0
    assert int(memory.sum(dtype="int64")) == 7 * nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_huge_memory_goes_with_its_last_view():
    process = psutil.Process()
    memory = map_huge(64 * HUGE_PAGE)
    memory[:] = 1
    gc.collect()  # memory that earlier tests have left must not go later
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
    assert faults < 10 * count * megabytes * 2**20 // 4096 / 10, "a tenth of the pages that were written"
