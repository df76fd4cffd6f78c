"""Watching a run: cold files, memory limits, and samples from outside."""

import sys
from pathlib import Path

import pytest

from wanstream.benchmarks.offload_case import linux
from wanstream.benchmarks.offload_case.watch import watch

LINUX = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads the counters of Linux")
MB = 2**20


@LINUX
def test_dropped_files_are_read_from_the_disk_again(tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(bytes(8 * MB + 5))
    assert linux.cached_bytes([file]) >= 8 * MB
    linux.drop([file])
    if linux.cached_bytes([file]):
        pytest.skip("this file system keeps its files in memory")
    before = linux.process_usage()
    file.read_bytes()
    assert linux.process_usage().since(before).read_bytes >= 8 * MB
    assert linux.cached_bytes([file]) >= 8 * MB


@LINUX
@pytest.mark.integration
def test_process_is_seen_from_outside(tmp_path):
    def run(program, timeout_s=60):
        command = [sys.executable, "-c", program]
        return watch(command, log=tmp_path / "log", environment={"A": "b"}, timeout_s=timeout_s)

    usual = run("import time; held = bytearray(b'x' * 60_000_000); time.sleep(0.5); print('done')")
    assert (usual.exit_code, usual.output_end) == (0, "")
    assert usual.anonymous_peak_bytes > 60_000_000
    assert (tmp_path / "log").read_text() == "done\n"
    failed = run("raise OSError('no')")
    assert failed.exit_code == 1
    assert failed.output_end.strip().endswith("OSError: no")
    late = run("import time; time.sleep(60)", timeout_s=1)
    assert late.exit_code < 0
    assert late.wall_s < 30


@LINUX
def test_figures_of_this_process():
    assert linux.memory_bytes("VmHWM") >= linux.memory_bytes("RssAnon") > MB
    assert linux.memory_bytes("VmRSS", pid=2**22 + 1) == 0
    assert linux.machine_time().busy_s > 0


@LINUX
def test_process_above_its_limit_is_killed(tmp_path):
    given = {"log": tmp_path / "log", "environment": {}, "timeout_s": 60}
    python = [sys.executable, "-c"]
    try:
        with linux.limited_group(100 * MB) as group:
            large = watch(group.command([*python, "x = bytearray(b'x' * 300_000_000)"]), **given)
            kills = group.kills
            peak = group.peak_bytes
            small = watch(group.command([*python, ""]), **given)
    except linux.NoMemoryLimitError as err:
        pytest.skip(f"NO MEMORY LIMIT HERE: {err}")
    assert large.exit_code != 0
    assert kills == 1
    assert peak <= 100 * MB
    assert small.exit_code == 0
    assert not group.folder.exists()
