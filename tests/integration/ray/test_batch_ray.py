"""`wanstream batch --ray` on real actors on this machine.

The files equal one process's, whatever is killed.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from wanstream.batch.backend import Unknown
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INTERRUPTED
from wanstream.cli.batch.row_messages import PATH
from wanstream.distributed import WorkerLostError, open_services
from wanstream.distributed.ray.connection import FOLDER_PREFIX
from wanstream.schema.refs import WorkersRef
from wanstream.testing.model import model_names, write_tiny_model
from wanstream.tests.support.batch.command import command_line, shipped, videos
from wanstream.tests.support.distributed.programs import environment, started
from wanstream.tests.support.polling import eventually

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 400
ROWS = 12
SIZE = {"width": 32, "height": 32, "frames": 5}
SMALL = {"latent": SIZE, "sampler": {"steps": 2}, "save": {"crf": 30}}
ACTOR = "ray::WanStreamWorker"
ON_TWO = ("--ray", "--device", "cpu", "--workers", "2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The workflow's files, two blocks deep."""
    names = model_names(shipped())
    return write_tiny_model(tmp_path_factory.mktemp("models"), layers=2, names=names).folder


@pytest.fixture(scope="module")
def command(tmp_path_factory, models):
    """`command(out, *more)`: the words for a batch with the tiny model."""
    folder = tmp_path_factory.mktemp("batch")
    seeds = [{"sampler.seed": number} for number in range(ROWS)]
    places = ["--models", models, "--input", folder]
    given = command_line(folder, shipped(**SMALL), *seeds, options=places)
    return lambda out, *more: [*given, "--out", str(out), *more]


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """The files from this process alone."""
    out = tmp_path_factory.mktemp("alone")
    assert main(command(out)) == DONE
    return videos(out)


@pytest.fixture
def start(command, tmp_path):
    """Start the batch on two actors. Each call starts the same command."""
    program = [sys.executable, "-m", "wanstream.cli", *command(tmp_path, *ON_TWO)]
    given = {"stderr": subprocess.PIPE, "env": environment()}
    with ExitStack() as undo:
        yield lambda: undo.enter_context(started(program, **given))


def actors(driver):
    children = psutil.Process(driver.pid).children(recursive=True)
    return [each for each in children if "".join(each.cmdline()[:1]).startswith(ACTOR)]


def wait_for_files(driver, out, count):
    until = time.monotonic() + LIMIT_S
    while len(videos(out)) < count:
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_same_command_continues_after_each_kind_of_loss(start, tmp_path, alone):
    driver = start()
    wait_for_files(driver, tmp_path, 1)
    children = psutil.Process(driver.pid).children(recursive=True)
    (raylet,) = [process for process in children if process.name() == "raylet"]
    # The actors, too: they would compute on for some seconds.
    for process in [raylet, *actors(driver)]:
        process.kill()
    ended = time.monotonic()
    output, errors = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 1
    assert "failed: Ray has ended on this machine: run the same command again to go on\n" in errors
    assert not re.search("state-dump|is gone|trying again|has been marked dead", output + errors)
    assert time.monotonic() - ended < 30
    assert 1 <= len(videos(tmp_path)) < ROWS

    driver = start()
    wait_for_files(driver, tmp_path, len(videos(tmp_path)) + 1)
    children = psutil.Process(driver.pid).children(recursive=True)
    words = " ".join(word for process in children for word in process.cmdline())
    folder = Path(tempfile.gettempdir(), re.search(rf"{FOLDER_PREFIX}\w+", words).group())
    assert folder.exists()
    driver.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert eventually(lambda: not folder.exists()), "the files of Ray"
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")}
    assert 2 <= len(times) <= ROWS - 4, "enough rows are left for the actors of the next command"

    driver = start()
    wait_for_files(driver, tmp_path, len(times) + 1)
    before = actors(driver)
    assert len(before) == 2
    before[0].kill()
    output, errors = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == DONE, errors
    assert f"{ROWS} of {ROWS} rows are done" in output
    assert videos(tmp_path) == alone
    # No row is made twice.
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in times} == times
    assert not any((tmp_path / ".wanstream" / "made").iterdir())


def test_ctrl_c_lets_the_running_rows_finish(start, tmp_path, alone):
    driver = start()
    wait_for_files(driver, tmp_path, 1)
    for process in (driver, *actors(driver)):  # as a terminal does
        process.send_signal(signal.SIGINT)
    output, errors = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == INTERRUPTED, errors
    assert "are left: run the same command again to resume" in output
    assert "lost" not in errors
    made = videos(tmp_path)
    assert 1 < len(made) < ROWS
    assert made.items() <= alone.items()


def test_restarted_process_gets_no_calls_of_the_old_one(models):
    settings = {"strict": False, "models": str(models), "input": "", "marked": ""}
    given = {"device": "cpu", "count": 1, "paths": [models]}
    opened = open_services(WorkersRef(count=1), (PATH, settings), **given)
    with opened as ((actor,), check_machine):
        assert actor.serve("outcome", "row").result(LIMIT_S) == Unknown()
        actor.serve("end")
        actor.wait_for_end(LIMIT_S)
        until = time.monotonic() + LIMIT_S
        # No call is running now, so none fails when Ray starts the next process.
        while (started := restarted(actor)) is None:
            assert time.monotonic() < until
            time.sleep(0.5)
        with pytest.raises(WorkerLostError, match="Ray has started another process for it"):
            actor.serve("outcome", "row").result(LIMIT_S)
        actor.restarted(started)
        check_machine(actor)
        assert actor.serve("outcome", "row").result(LIMIT_S) == Unknown()


def restarted(actor):
    """The report from an actor's new process, or None while there is none."""
    with suppress(WorkerLostError):
        return actor.call("started").result(LIMIT_S)
    return None
