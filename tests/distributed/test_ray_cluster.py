"""Workers in a Ray that somebody else has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 150
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ray")
    head = subprocess.Popen(
        [sys.executable, str(HERE / "ray_head.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(**TOKEN),
    )
    assert head.stdout is not None
    yield head.stdout.readline().strip()
    children = psutil.Process(head.pid).children(recursive=True)
    head.communicate(timeout=LIMIT_S)
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()


def guest(address: str, folder: Path, **changes: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_guest.py"), address],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
        cwd=folder,
        env=environment(**changes),
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_cluster_is_joined_and_left_as_it_was(address: str, tmp_path: Path) -> None:
    found = guest(address, tmp_path, **TOKEN)
    assert "3 workers on CPUs, but Ray has slots for 2" in found["too many"]
    assert f"this process has workers at {address}, and can have others at local only when" in found["other Ray"]
    assert found["left"] is True
    assert f"this process is connected to the Ray at {address} already" in found["foreign"]
    assert f"give {address} as the address" in found["foreign"]
    assert found["kept"] is True, "a Ray that others made was ended"
    assert len({*found["pids"], found["own pid"]}) == 2


def test_without_its_token_a_cluster_refuses_in_words(address: str, tmp_path: Path) -> None:
    found = guest(address, tmp_path)
    assert f"the Ray cluster at {address} does not take this process in" in found["refused"]
    assert "RAY_AUTH_MODE=token" in found["refused"]
