"""Workers in a Ray started elsewhere, and errors when Ray does not start."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from wanstream.distributed import RayPool
from wanstream.distributed.ray.environment import RaySetupError, on_loopback, token_of_cluster
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.distributed.programs import LIMIT_S, environment, started

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A Ray for several tests, with the address. The last test kills it."""
    folder = tmp_path_factory.mktemp("ray")
    program = [sys.executable, HERE / "ray_head.py", folder]
    with started(program, cwd=folder, env=environment(**TOKEN)) as process:
        yield process, process.stdout.readline().strip()
        children = psutil.Process(process.pid).children(recursive=True)
        process.communicate(timeout=LIMIT_S)
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()


def test_a_cluster_is_joined_and_left_as_it_was(head, token_file):
    _, address = head
    one = WorkersRef(count=1, threads=1, address=address, token_file=str(token_file))
    said = f"this process has workers at {address}: close those before starting others at local"
    with RayPool(one):
        for other, message in (
            (WorkersRef(count=3, address=address), "3 workers on CPUs, but Ray has slots for 2"),
            (WorkersRef(count=1), said),
        ):
            with pytest.raises(RaySetupError, match=message):
                RayPool(other)
    assert not ray.is_initialized()
    with on_loopback(), token_of_cluster(str(token_file)):
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    with pytest.raises(RaySetupError, match=f"the Ray at {address} already.* add {address} to"):
        RayPool(WorkersRef(count=1))
    pids = {os.getpid()}
    with RayPool(one) as pool:
        pids.add(pool.workers[0].call("facts").result(LIMIT_S).pid)
    assert len(pids) == 2
    assert ray.is_initialized(), "a Ray that others made was ended"
    ray.shutdown()


def test_without_its_token_a_cluster_refuses_in_words(head, monkeypatch):
    _, address = head
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    # Another process joins first, and is refused.
    with pytest.raises(RaySetupError, match="as token_file in the list") as refused:
        RayPool(WorkersRef(count=1, threads=1, address=address))
    # No token was sent.
    assert f"the Ray cluster at {address} does not accept this process" in str(refused.value)


def output_of(name, folder, argument):
    """Run a program in this folder, and return the JSON in the last output line."""
    program = [sys.executable, HERE / name, argument]
    output = subprocess.check_output(program, text=True, cwd=folder, env=environment())
    return json.loads(output.splitlines()[-1])


def test_a_ray_that_does_not_start_says_so_and_leaves_nothing(tmp_path):
    found = output_of("ray_refused.py", tmp_path, tmp_path)
    why = {"no room": "the minimum allowed is", "long name": "AF_UNIX path"}
    for case, reason in {**why, "no folder": "No such file or directory"}.items():
        assert "does not start on this machine: " in found[case]
        assert reason in found[case]
        assert "Check that disk, RAM and shared memory have free space" in found[case]
    assert (found["left"], found["left at the end"], found["folders"]) == ([], [], [])


def test_groups_are_reserved_on_one_machine_or_not_at_all(tmp_path):
    """A cluster with two machines, A and B, with 5 and 3 GPUs."""
    with tempfile.TemporaryDirectory() as folder:  # a short name, as Ray makes sockets there
        found = output_of("ray_placement.py", tmp_path, folder)
    refused = found.pop("refused")
    machines = {layout: each["machines"] for layout, each in found.items()}
    of_eight = dict.fromkeys(("data 2 x ulysses 4", "data 8"), "AAAAABBB")
    assert machines == {**of_eight, "data 2 x ulysses 3": "AAABBB"}
    assert {each["free after it"] for each in found.values()} == {8}
    assert found["data 2 x ulysses 3"]["shared"] == [3, 3]
    assert "no free slots for 6 workers within 1 s: at first 4 of 8 GPUs" in refused["message"]
    assert refused["free after it"] == 4


SURVIVOR = """
import os, sys, time
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed import RayPool
from wanstream.distributed.ray.environment import RaySetupError, on_loopback, token_of_cluster
from wanstream.schema.refs import WorkersRef
pool = RayPool(WorkersRef(count=1, threads=1, address=sys.argv[1], token_file=sys.argv[2]))
print("joined", pool.usable, flush=True)
input()
time.sleep(6)
try:
    pool.workers[0].call("facts").result(60)
except WorkerLostError:
    print("lost", flush=True)
try:
    pool.replace(0)
except RaySetupError as err:
    print(err, flush=True)
print("usable", pool.usable, flush=True)
os._exit(7)
"""


def test_a_cluster_that_ends_takes_nobody_with_it(head, tmp_path, token_file):
    """By default Ray ends every process after a timeout without the server (here 3 s).

    The last test in this file, because it ends the Ray.
    """
    server, address = head
    children = psutil.Process(server.pid).children(recursive=True)
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
    program = [sys.executable, "-c", SURVIVOR, address, token_file]
    with started(program, cwd=tmp_path, env=environment(**limit)) as guest:
        assert guest.stdout.readline() == "joined True\n"
        server.kill()
        for process in children:
            with suppress(psutil.NoSuchProcess):  # the parent was the head too
                process.kill()
        output, _ = guest.communicate("\n", timeout=LIMIT_S)
        assert guest.returncode == 7
        lost, refused, usable = output.splitlines()
        assert (lost, usable) == ("lost", "usable False")
        assert refused.startswith(f"the Ray at {address} has ended or cannot be reached")
