"""Rows per minute in `wanstream batch` on several servers.

Also measures a lost and a slow server, and the cost of queue and journal.

python benchmarks/workers/fleet.py [real simulated faults costs]

`real` needs a ComfyUI (see tools/comfyui.py) and runs one and two servers on this machine. In
`simulated` and `faults`, servers with ComfyUI's protocol wait instead of computing. Client, HTTP,
files and processes are real. In `costs`, backends in memory take no time.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from wanstream.batch.backend import (
    BatchBackend,
    Ended,
    MadeFile,
    Outcome,
)
from wanstream.batch.journal.entry import KeptFile, State
from wanstream.batch.journal.journal import Journal
from wanstream.batch.output_store import OutputStore
from wanstream.batch.progress import BatchBar
from wanstream.batch.resume import resume
from wanstream.batch.rows.rows import BatchJob, Row, workflow_digest
from wanstream.batch.running.fleet import run_all
from wanstream.batch.running.job_queue import (
    JobQueue,
)
from wanstream.batch.running.runner import (
    Runner,
)
from wanstream.batch.running.stop_request import StopRequest
from wanstream.benchmarks.record import record
from wanstream.cli import main as command_line
from wanstream.testing import write_tiny_model
from wanstream.tests.faults import comfy_like
from wanstream.tests.faults.campaign import small_workflow
from wanstream.tests.faults.comfy_like import forked_server
from wanstream.tests.faults.replaced import named_models
from wanstream.tools.comfyui import PACK, ROOT, find_comfyui, free_port, running_server

REAL_ROWS = 12
REAL_STEPS = 12
REPEATS = 3
WAIT_S = 5.0
ROWS_PER_SERVER = 4
SIMULATED = (4, 8, 16, 32, 64)
FAULT_SERVERS = 4
FAULT_ROWS = 48
FAULT_WAIT_S = 2.0
SLOWER = 4
COST_ROWS = 400
COST_RUNNERS = (1, 4, 16, 64)
JOURNAL_ROWS = (100, 1000, 10_000)
JOURNAL_SAMPLE = 100


def run_batch(
    folder: Path, urls: Sequence[str], workflow: Mapping[str, Any], seeds: Sequence[int]
) -> float:
    """Run a batch on these servers in this process.

    Return the seconds from the command line to the summary.
    """
    folder.mkdir()
    rows = "\n".join(json.dumps({"sampler.seed": seed}) for seed in seeds)
    (folder / "jobs.jsonl").write_text(rows, encoding="utf-8")
    (folder / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    servers = [word for url in urls for word in ("--server", url)]
    files = [
        str(folder / "jobs.jsonl"),
        "--workflow",
        str(folder / "workflow.json"),
        "--out",
        str(folder / "out"),
    ]
    began = time.perf_counter()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
        code = command_line(["batch", *files, *servers])
    seconds = time.perf_counter() - began
    assert code == 0, told.getvalue()[-3000:]
    assert len([*(folder / "out").glob("*.mp4")]) == len(seeds)
    return seconds


def shares(folder: Path) -> list[int]:
    """Return row counts by server for a finished batch, in descending order."""
    with Journal(folder / "out" / "journal.sqlite", workflow=_workflow_of(folder)) as journal:
        backends = [
            entry.backend for entry in journal.entries.values() if entry.state is State.done
        ]
    return sorted((backends.count(backend) for backend in {*backends}), reverse=True)


def _workflow_of(folder: Path) -> str:
    return workflow_digest(json.loads((folder / "workflow.json").read_text(encoding="utf-8")))


def real(folder: Path) -> dict[str, Any]:
    """Measure one and two ComfyUI servers by turns, on the test model."""
    workflow = small_workflow()
    workflow["sampler"]["inputs"]["steps"] = REAL_STEPS
    models = write_tiny_model(folder / "models").folder
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as opened:
        urls = []
        for number in (1, 2):
            base = folder / f"base{number}"
            for name in ("custom_nodes", "input", "output"):
                (base / name).mkdir(parents=True)
            (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
            (base / "models").symlink_to(models, target_is_directory=True)
            urls.append(opened.enter_context(running_server(find_comfyui(), base)).url)
        # A warm-up: both servers open the experts.
        run_batch(folder / "warm", urls, workflow, range(4))
        for repeat in range(REPEATS):
            for count in (1, 2):
                # Other seeds each time, because a server returns cached results for an equal
                # workflow.
                first = 100 * (2 * repeat + count)
                run = run_batch(
                    folder / f"run{first}", urls[:count], workflow, range(first, first + REAL_ROWS)
                )
                seconds[count].append(round(run, 2))
    per_minute = {
        count: 60 * REAL_ROWS / statistics.median(runs) for count, runs in seconds.items()
    }
    return {
        "rows": REAL_ROWS,
        "seconds": {f"{count} servers": runs for count, runs in seconds.items()},
        "rows_per_minute": {
            f"{count} servers": round(rate, 1) for count, rate in per_minute.items()
        },
        "two_servers_to_one": round(per_minute[2] / per_minute[1], 2),
    }


@contextmanager
def waiting_servers(
    folder: Path, waits: Sequence[float], models: Path
) -> Iterator[tuple[list[str], list[int]]]:
    """Run a server for each of these seconds per row. Yield addresses and process ids."""
    folder.mkdir()
    urls: list[str] = []
    pids: list[int] = []
    try:
        for number, seconds in enumerate(waits):
            port = free_port()
            output = folder / f"served{number}"
            output.mkdir()
            pids.append(forked_server(port, output, models, seconds=seconds))
            urls.append(f"http://127.0.0.1:{port}")
        yield urls, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            # Killed children stay zombies until their parent waits for them.
            os.waitpid(pid, 0)


def models_of(folder: Path) -> Path:
    """Return a folder with empty models, and let the servers describe their nodes at once."""
    models = named_models(folder / "named", small_workflow())
    info = comfy_like.object_info(models)
    # Replaced before the fork, so every server has it.
    comfy_like.object_info = lambda models: info
    return models


def simulated(folder: Path) -> list[dict[str, Any]]:
    models = models_of(folder)
    figures = []
    for count in SIMULATED:
        rows = count * ROWS_PER_SERVER
        with waiting_servers(folder / f"servers{count}", [WAIT_S] * count, models) as (urls, _):
            # `process_time` counts this process only, without the servers.
            cpu = time.process_time()
            seconds = run_batch(folder / f"of{count}", urls, small_workflow(), range(rows))
            cpu = time.process_time() - cpu
        ideal = ROWS_PER_SERVER * WAIT_S
        figures.append(
            {
                "servers": count,
                "rows": rows,
                "seconds": round(seconds, 1),
                "rows_per_minute": round(60 * rows / seconds, 1),
                "share_of_ideal": round(ideal / seconds, 3),
                "client_cpu_ms_per_row": round(1000 * cpu / rows, 1),
            }
        )
        print(figures[-1], file=sys.stderr, flush=True)
    return figures


def faults(folder: Path) -> dict[str, Any]:
    """Run batches: calm, with a server lost after a third of the rows, and with a slow server."""
    models = models_of(folder)
    waits = [FAULT_WAIT_S] * FAULT_SERVERS

    def measure(
        name: str, waits: Sequence[float], disturb: Callable[[Path, list[int]], None] | None = None
    ) -> float:
        with waiting_servers(folder / f"servers-{name}", waits, models) as (urls, pids):
            out = folder / name / "out"
            thread = (
                threading.Thread(target=disturb, args=[out, pids], daemon=True) if disturb else None
            )
            if thread:
                thread.start()
            return run_batch(folder / name, urls, small_workflow(), range(FAULT_ROWS))

    def kill_one(out: Path, pids: list[int]) -> None:
        # The moment is a number of finished files, so it does not depend on the machine's speed.
        while len([*out.glob("*.mp4")]) < FAULT_ROWS // 3:
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)

    calm = measure("calm", waits)
    lost = measure("lost", waits, kill_one)
    slow = measure("slow", [FAULT_WAIT_S * SLOWER, *waits[1:]])
    # With one of four servers lost after a third of the rows, the others need 2/3 * 4/3 of the calm
    # time for the rest.
    ideal_lost = FAULT_ROWS * FAULT_WAIT_S * (1 / 3 / FAULT_SERVERS + 2 / 3 / (FAULT_SERVERS - 1))
    ideal_slow = FAULT_ROWS * FAULT_WAIT_S / (FAULT_SERVERS - 1 + 1 / SLOWER)
    return {
        "servers": FAULT_SERVERS,
        "rows": FAULT_ROWS,
        "seconds_per_row": FAULT_WAIT_S,
        "calm": {"seconds": round(calm, 1), "ideal": FAULT_ROWS * FAULT_WAIT_S / FAULT_SERVERS},
        "one_lost_after_a_third": {"seconds": round(lost, 1), "ideal": round(ideal_lost, 1)},
        f"one_{SLOWER}_times_slower": {
            "seconds": round(slow, 1),
            "ideal": round(ideal_slow, 1),
            "rows_per_server": shares(folder / "slow"),
        },
    }


class Instant(BatchBackend):
    """Backend that finishes each workflow at once."""

    window = 2
    sockets: Mapping[str, Any] = {}

    def __init__(self, number: int) -> None:
        self.name = self.address = f"http://{number}"

    def faults(self, prompt: Mapping[str, Any]) -> list[str]:
        return []

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        return

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        return

    def outcome(self, prompt_id: str) -> Outcome:
        return Ended(files=(MadeFile(node_id="1", filename="a.txt", subfolder=""),))

    def fetch(self, file: MadeFile, part: Path) -> None:
        part.write_text("content", encoding="utf-8")

    def withdraw(self, prompt_id: str) -> None:
        return

    def release(self, prompt_id: str) -> None:
        return


def plan(rows: Sequence[Row]) -> list[BatchJob]:
    return [BatchJob(prompt={}, rows=(row,), saves={row.hash: None}) for row in rows]


def rows_of(count: int) -> list[Row]:
    return [
        Row(line=number, position=number, hash=f"hash {number}") for number in range(1, count + 1)
    ]


def journal_cost(folder: Path, count: int) -> float:
    """Return the seconds for a row's three entries, in a journal with `count` rows."""
    folder.mkdir()
    with Journal(folder / "journal.sqlite", workflow="w") as journal:
        journal.enter(rows_of(count), compared=list)
        began = time.perf_counter()
        for number in range(1, JOURNAL_SAMPLE + 1):
            journal.post({f"hash {number}": None}, f"id-{number}", "http://0")
            journal.place(f"hash {number}", [KeptFile(name=f"{number:05}.mp4", size=1, sha256="0")])
            journal.finish(f"hash {number}")
        return (time.perf_counter() - began) / JOURNAL_SAMPLE


def runner_cost(folder: Path, runners: int) -> float:
    """Return seconds per row outside the backends: queue, journal, checks, file renames."""
    store = OutputStore(folder)
    rows = rows_of(COST_ROWS)
    with (
        redirect_stderr(StringIO()),
        BatchBar(rows=COST_ROWS, ended=0, backends=runners) as bar,
        Journal(folder / "journal.sqlite", workflow="w") as journal,
    ):
        resume(journal, store, rows)
        backends = [Instant(number) for number in range(runners)]
        queue = JobQueue(
            journal=journal, planner=plan, reporter=bar, stop=StopRequest(), backends=backends
        )
        queue.enter(rows)
        each = [
            Runner(backend=backend, queue=queue, store=store, sleep=time.sleep)
            for backend in backends
        ]
        began = time.perf_counter()
        run_all(each, queue, lambda: time.sleep(0.01))
        seconds = time.perf_counter() - began
        assert all(entry.state is State.done for entry in journal.entries.values())
    return seconds / COST_ROWS


def costs(folder: Path) -> dict[str, Any]:
    return {
        "journal_ms_per_row": {
            f"{count} rows": round(1000 * journal_cost(folder / f"journal{count}", count), 2)
            for count in JOURNAL_ROWS
        },
        "client_ms_per_row": {
            f"{count} backends": round(1000 * runner_cost(folder / f"runners{count}", count), 2)
            for count in COST_RUNNERS
        },
    }


PARTS: dict[str, Callable[[Path], Any]] = {
    "costs": costs,
    "simulated": simulated,
    "faults": faults,
    "real": real,
}

METHOD = (
    f"real, measured: {REAL_ROWS} rows of {REAL_STEPS} steps on the small test model, on one and "
    f"on two ComfyUI servers on this machine by turns, {REPEATS} times each, the median, from the "
    f"command line to its summary, after a warm-up. simulated: {ROWS_PER_SERVER} rows for each "
    f"server, on servers in processes of their own that wait {WAIT_S:g} s instead of computing and "
    "write a video of three frames; the client, HTTP on loopback and files are real; ideal is "
    f"{ROWS_PER_SERVER} times the wait. faults, simulated in the same way: {FAULT_ROWS} rows of "
    f"{FAULT_WAIT_S:g} s on {FAULT_SERVERS} servers; one is killed after a third of the rows and "
    f"does not return, or takes {SLOWER} times as long. costs, measured: the journal's three "
    f"entries of a row, for {JOURNAL_SAMPLE} rows; and {COST_ROWS} rows on backends that end each "
    "row at once, with queue, journal, and checks, syncs and renames of one small file. The load "
    "average at the start and at the end shows how busy the machine was"
)


def main(parts: Sequence[str]) -> None:
    torch.set_num_threads(1)  # servers are forked, and a child would wait for threads that it lacks
    figures: dict[str, Any] = {}
    loaded = os.getloadavg()[0]
    for name in parts:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = PARTS[name](Path(folder))
        print(name, json.dumps(figures[name]), file=sys.stderr, flush=True)
    figures["load_average"] = [round(loaded, 1), round(os.getloadavg()[0], 1)]
    print(record("fleet", method=METHOD, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:] or [*PARTS])
