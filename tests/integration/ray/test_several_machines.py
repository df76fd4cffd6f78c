"""Runs in a cluster with two machines in Linux namespaces.

A third machine joins the cluster, and a machine is lost. The first machine has the driver and Ray's
server. Each machine has places for two workers. The other machines have their models at another
path. Ray requires a token.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from wanstream.tests.support.distributed import machines as namespaces
from wanstream.tests.support.rounding import ROUNDING

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
LIMIT_S = 240.0
PORT = 6379
PLACES = ("/srv", "/media", "/media")
MAP = "/srv -> /media"
HOME = "home"
"""Home for programs on a machine, in a separate /tmp, with Ray's token."""
HEADS = 4
WORKERS = 4
SMALL_RAY = f"--num-cpus 1 --num-gpus 0 --object-store-memory {128 << 20} --block"


class RefusedError(Exception):
    """A driver command ended in an error visible to a user."""


class Program:
    """A program on a machine. Lines are read as they come."""

    def __init__(self, machine, command, **environment):
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        given = {**kept, "HOME": f"/tmp/{HOME}", "OMP_NUM_THREADS": "1", **environment}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = machine.start(command, given, **pipes)
        self._lines = queue.SimpleQueue[str]()
        self.output: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def wait_for(self, words: str) -> None:
        """Until a line has them."""
        while words not in self._next():
            pass

    def call(self, job, on_step=lambda step: None, **given):
        """Let `machine_driver.py` do a job. Raises RefusedError."""
        self._process.stdin.write(json.dumps([job, given]) + "\n")
        self._process.stdin.flush()
        while True:
            line = self._next()
            message = json.loads(line) if line.startswith("{") else {}
            if "step" in message:
                on_step(message["step"])
            if "error" in message:
                raise RefusedError(f"{message['error']}: {message['message']}")
            if "answer" in message:
                return message["answer"]

    def end(self) -> None:
        """Close the input, which ends the program, and wait.

        A program on an ended machine is gone already.
        """
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait(LIMIT_S)
            self._reading.join(LIMIT_S)
            self._process.stdout.close()

    def _next(self) -> str:
        try:
            line = self._lines.get(timeout=LIMIT_S)
        except queue.Empty:
            pytest.fail(f"nothing for {LIMIT_S:g} s after:\n{''.join(self.output[-40:])}")
        if not line:
            pytest.fail(f"it ended after:\n{''.join(self.output[-40:])}")
        self.output.append(line)
        return line

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@pytest.fixture(scope="module")
def machines(tiny_expert_folder, tmp_path_factory):
    if why := namespaces.refusal():
        pytest.skip(f"no machines can be made here: {why}")
    folder = tmp_path_factory.mktemp("machines")
    with namespaces.Machines(folder, PLACES) as every:
        for machine in every:
            for seed, name in enumerate(("high", "low"), 1):
                expert = tiny_expert_folder(seed=seed, heads=HEADS)
                shutil.copytree(expert, folder / machine.name / "models" / name)
            machine.write(f"{HOME}/.ray/auth_token", "ab" * 32)
        yield every


@pytest.fixture(scope="module")
def join(machines):
    """`join(number)`: that machine joins the first one's cluster.

    Returns the cluster's address.
    """
    head = f"{machines[0].address}:{PORT}"
    started: list[Program] = []

    def start(number: int) -> str:
        first = f"--head --port {PORT} --include-dashboard false --disable-usage-stats".split()
        where = ("--address", head) if number else first
        command = [str(Path(sys.executable).with_name("ray")), "start", *SMALL_RAY.split(), *where]
        machine = machines[number]
        # No process in advance, as every worker starts its own.
        settings = {"RAY_AUTH_MODE": "token", "RAY_prestart_worker_first_driver": "0"}
        command += ["--node-ip-address", machine.address]
        started.append(Program(machine, command, **settings))
        started[-1].wait_for("Ray runtime started.")
        return head

    yield start
    for machine in machines:
        machine.end()
    for program in started:
        program.end()


@pytest.fixture(scope="module")
def address(join):
    """Address of a cluster with the first two machines."""
    join(0)
    return join(1)


@pytest.fixture(scope="module")
def driver(machines, address):
    """With four workers, two on the first machine and two on another."""
    command = [sys.executable, str(HERE / "machine_driver.py"), str(machines[0].models)]
    program = Program(machines[0], command)
    yield program
    program.end()


@pytest.fixture(scope="module")
def begun(driver, address):
    given = {"count": WORKERS, "address": address, "mesh": {"data": 2, "cfg": 2}}
    return driver.call("begin", **given, beyond_loopback=True, token_file="~/.ray/auth_token")


def test_workers_are_on_two_machines_and_listen_there(begun, machines):
    one, other = begun["nodes"][::2]
    assert begun["nodes"] == [one, one, other, other], "ranks of a machine follow each other"
    assert {one, other} == {"machine-0", "machine-1"}
    at = {machine.name: machine.address for machine in machines}
    assert begun["addresses"] == [at[name] for name in begun["nodes"]]


def test_what_is_missing_is_told_with_its_machine(begun, driver):
    said = r"^MissingPathError: /srv/high does not exist on machine-1; /srv/low does"
    with pytest.raises(RefusedError, match=said):
        driver.call("run", mesh={"data": 2, "stage": 2}, videos=1, steps=2, path_map="")


@pytest.fixture(scope="module")
def alone(driver):
    """The digest of four videos that the driver's process computes, and compares others with."""
    return driver.call("alone", videos=4, steps=4)


@pytest.mark.parametrize(
    "mesh", [{"data": 2, "stage": 2}, {"cfg": 2, "ulysses": 2}, {"data": 2, "cfg": 2}], ids=str
)
def test_several_machines_make_what_one_worker_makes(mesh, begun, alone, driver):
    ran = driver.call("run", mesh=mesh, videos=4, steps=4, path_map=MAP)
    if "ulysses" in mesh:
        assert ran["difference"] <= ROUNDING
    else:
        assert ran["digest"] == alone["digest"]
    assert ran["ranks"] == list(range(WORKERS))
    # A group of four is on two machines.
    assert ran["apart"] == ([list(range(WORKERS))] if "ulysses" in mesh else [])
    assert (ran["gathered_bytes"] > 0) == ("cfg" in mesh)
    assert ran["max_restarts"] == 0


def test_a_machine_that_is_switched_off_is_made_good_by_another(begun, machines, driver, join):
    join(2)
    driver.call("alone", videos=1, steps=8)
    given = {"mesh": {"cfg": 2, "ulysses": 2}, "videos": 1, "steps": 8, "path_map": MAP}

    def on_step(step: int) -> None:
        if step == 3:
            machines[1].end()

    ran = driver.call("run", on_step, **given)
    assert ran["difference"] <= ROUNDING
    assert ran["max_restarts"] == 1
    assert "its video goes on from step" in ran["changes"][0]
    assert ran["nodes"] == [{"machine-1": "machine-2"}.get(node, node) for node in begun["nodes"]]
