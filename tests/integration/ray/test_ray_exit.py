"""Every Ray worker and process ends with the process that started them, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /dev/shm, and at signals of Linux"
)

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
GONE_S = 30


@pytest.fixture
def start(tmp_path, tiny_expert_folder):
    """`start(how)`: `comfy_like.py`, with the pack in a folder with another name."""
    folder = tmp_path / "pack with.dots-and spaces"
    folder.symlink_to(ROOT, target_is_directory=True)
    started: list[subprocess.Popen[str]] = []

    def run(how: str) -> subprocess.Popen[str]:
        program = [sys.executable, Path(__file__).with_name("comfy_like.py"), folder]
        experts = [tiny_expert_folder(seed=seed) for seed in (1, 2)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        given = {"cwd": ROOT, "env": {**environment, "OMP_NUM_THREADS": "1"}}
        command = [str(word) for word in (*program, *experts, how)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **given))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def next_message(process):
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait(LIMIT_S)}"
    return json.loads(line)


def alive(pids: list[int]) -> list[psutil.Process]:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["returns", "waits"])
def test_workers_end_with_the_process_that_has_them(how, start):
    """SIGTERM kills it as SIGKILL does: Ray's handler is not installed, as test_ray_pool checks."""
    process = start(how)
    begun = next_message(process)
    assert begun["worker"] in begun["children"]
    assert len(begun["children"]) > 3
    children = alive(begun["children"])
    if how == "waits":
        process.kill()
    process.wait(LIMIT_S)
    _, left = psutil.wait_procs(children, timeout=GONE_S)
    assert left == []
    assert how != "returns" or not [folder for folder in begun["folders"] if Path(folder).exists()]
