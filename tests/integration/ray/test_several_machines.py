"""Runs in a cluster with two machines in Linux namespaces.

A third machine joins the cluster, and a machine is lost. The first machine has the driver and Ray's
server. Each machine has places for two workers. The other machines have their models at another
path. Ray requires a token.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from wanstream.tests.support.distributed import machines as namespaces
from wanstream.tests.support.distributed.programs import started
from wanstream.tests.support.rounding import ROUNDING

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DRIVER = Path(__file__).with_name("machine_driver.py")
PORT = 6379
PLACES = ("/srv", "/media", "/media")
MAP = "/srv -> /media"
HOME = "home"
"""Home for programs on a machine, in a separate /tmp, with Ray's token."""
RANKS = list(range(4))
SMALL_RAY = f"--num-cpus 1 --num-gpus 0 --object-store-memory {128 << 20} --block"


def started_on(machine, command, **changes):
    """Start a program on a machine, as `programs.started`."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    given = {**kept, "HOME": f"/tmp/{HOME}", "OMP_NUM_THREADS": "1", **changes}
    return started([*machine.enter, *command], env=given, cwd="/", stderr=subprocess.STDOUT)


def answer(driver, on_step=lambda step: None):
    """Return the next answer from `machine_driver.py`."""
    output = []
    for line in driver.stdout:
        output.append(line)
        message = json.loads(line) if line.startswith("{") else {}
        if "step" in message:
            on_step(message["step"])
        if "answer" in message:
            return message["answer"]
    pytest.fail(f"it ended after:\n{''.join(output[-40:])}")


def run(driver, on_step=lambda step: None, **given):
    """Let the driver compute a run with 8 steps."""
    driver.stdin.write(json.dumps(given) + "\n")
    driver.stdin.flush()
    return answer(driver, on_step)


@pytest.fixture(scope="module")
def machines(tiny_expert_folder, tmp_path_factory):
    if why := namespaces.refusal():
        pytest.skip(f"no machines can be made here: {why}")
    folder = tmp_path_factory.mktemp("machines")
    with namespaces.started_machines(folder, PLACES) as every:
        for machine in every:
            for seed, name in enumerate(("high", "low"), 1):
                expert = tiny_expert_folder(seed=seed, heads=4)
                shutil.copytree(expert, folder / machine.name / "models" / name)
            machine.write(f"{HOME}/.ray/auth_token", "ab" * 32)
        yield every


@pytest.fixture(scope="module")
def join(machines):
    """`join(number)`: that machine joins the first one's cluster.

    Returns the cluster's address.
    """
    head = f"{machines[0].address}:{PORT}"
    with ExitStack() as programs:

        def start(number: int) -> str:
            first = f"--head --port {PORT} --include-dashboard false --disable-usage-stats".split()
            where = ("--address", head) if number else first
            command = [Path(sys.executable).with_name("ray"), "start", *SMALL_RAY.split(), *where]
            machine = machines[number]
            # No process in advance: every worker starts one.
            settings = {"RAY_AUTH_MODE": "token", "RAY_prestart_worker_first_driver": "0"}
            command += ["--node-ip-address", machine.address]
            ray = programs.enter_context(started_on(machine, command, **settings))
            assert any("Ray runtime started." in line for line in ray.stdout)
            return head

        yield start
        for machine in machines:
            machine.end()


@pytest.fixture(scope="module")
def driver(machines, join):
    """A driver in a cluster with the first two machines, with two workers on each."""
    join(0)
    command = [sys.executable, DRIVER, machines[0].models, join(1), "~/.ray/auth_token"]
    with started_on(machines[0], command) as program:
        yield program


@pytest.fixture(scope="module")
def begun(driver):
    return answer(driver)


def test_workers_are_on_two_machines_and_listen_there(begun, machines):
    one, other = begun["nodes"][::2]
    assert begun["nodes"] == [one, one, other, other], "ranks of a machine follow each other"
    assert {one, other} == {"machine-0", "machine-1"}
    at = {machine.name: machine.address for machine in machines}
    assert begun["addresses"] == [at[name] for name in begun["nodes"]]


def test_what_is_missing_is_told_with_its_machine(begun, driver):
    refused = run(driver, mesh={"data": 2, "stage": 2}, videos=1, path_map="")
    said = "MissingPathError: /srv/high does not exist on machine-1; /srv/low does"
    assert refused["error"].startswith(said)


@pytest.mark.parametrize(
    "mesh", [{"data": 2, "stage": 2}, {"cfg": 2, "ulysses": 2}, {"data": 2, "cfg": 2}], ids=str
)
def test_several_machines_make_what_one_worker_makes(mesh, begun, driver):
    ran = run(driver, mesh=mesh, videos=4, path_map=MAP)
    assert ran["difference"] <= (ROUNDING if "ulysses" in mesh else 0)
    assert ran["ranks"] == RANKS
    # A group of four is on two machines.
    assert ran["apart"] == ([RANKS] if "ulysses" in mesh else [])
    assert (ran["gathered_bytes"] > 0) == ("cfg" in mesh)
    assert ran["restarts"] == 0


def test_a_machine_that_is_switched_off_is_made_good_by_another(begun, machines, driver, join):
    join(2)

    def on_step(step: int) -> None:
        if step == 3:
            machines[1].end()

    ran = run(driver, on_step, mesh={"cfg": 2, "ulysses": 2}, videos=1, path_map=MAP)
    assert ran["difference"] <= ROUNDING
    assert ran["restarts"] == 1
    assert "its video goes on from step" in ran["changes"][0]
    assert ran["nodes"] == [{"machine-1": "machine-2"}.get(node, node) for node in begun["nodes"]]
