"""Session: a series of runs, each in a process with a cold page cache, appended to a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wanstream.bench import hardware, versions

from .linux import LimitedGroup, cached_bytes, drop, limited_group
from .model_files import COMPLETE, expert_folders, weight_files
from .shapes import SHAPES
from .task import Task
from .watch import Watched, watch

PROGRAM = Path(__file__).parent.parent / "offload.py"
DISTURBED = 0.04
"""Share of the machine's processor time. Above this share in other processes, a run counts as
disturbed."""
RUN_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run in the session plan."""

    variant: str
    repetition: int = 0
    limited: bool = False
    """True to run inside the session's memory limit."""

    @property
    def label(self) -> str:
        return f"{self.variant}{' (limited)' if self.limited else ''} #{self.repetition + 1}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for all runs in a session."""

    shape: str
    work: Path
    device: str = "cpu"
    threads: int = 2
    limit_bytes: int | None = None
    vram_gb: float | None = None
    measured: bool = True
    """True to measure the machine before each round, so that WanStream's runs can be predicted."""
    cold: bool = True
    """True to drop the files from the page cache before each run."""


class Session:
    """Series of runs, with one JSON line per run in `file`."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self.file = file
        self._settings = settings
        self._machine: str | None = None
        file.parent.mkdir(parents=True, exist_ok=True)

    def write_experts(self) -> None:
        """Write the expert files unless they exist, before anything is timed."""
        expert_folders(
            self._settings.work, SHAPES[self._settings.shape], device=self._settings.device
        )

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs so far, including runs from an earlier call."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]

    def make(
        self, rounds: Sequence[Sequence[Planned]], *, retries: int, minutes: float | None = None
    ) -> None:
        """Make the missing runs. After each round, repeat disturbed ones, at most `retries` times.

        With `minutes`, no run begins after this time. A later call resumes the session.
        """
        until = None if minutes is None else time.monotonic() + 60 * minutes
        for number, planned in enumerate(rounds):
            if self._settings.measured and self.missing(planned, 0):
                self._measure_machine(number)
            for attempt in range(retries + 1):
                for run in self.missing(planned, attempt):
                    if until is not None and time.monotonic() > until:
                        print(f"out of time before {run.label}; call again to resume", flush=True)
                        return
                    self._make_one(run, attempt)

    def missing(self, planned: Iterable[Planned], attempt: int) -> list[Planned]:
        """Return runs without a result, or with only disturbed results of earlier attempts."""
        runs = [run for run in self.runs() if run["report"] is not None or run_out_of_memory(run)]
        return [
            plan
            for plan in planned
            if not any(
                is_of(run, plan) and (not run["disturbed"] or run["attempt"] >= attempt)
                for run in runs
            )
        ]

    def _measure_machine(self, number: int) -> None:
        """Measure this machine before a round. A resumed round reuses its first measurement."""
        file = self._folder / f"machine-{number}.json"
        if not file.exists():
            # The disk rate is measured with one of these files, so none may be in the page cache.
            drop(weight_files(self._settings.work))
            task = Task(
                variant="layerwise",
                shape=self._settings.shape,
                work=str(self._settings.work),
                report=str(file),
                device=self._settings.device,
                threads=self._settings.threads,
                wanted="machine",
            )
            subprocess.run([sys.executable, str(PROGRAM), "run", task.to_json()], check=True)
        self._machine = str(file)

    def _make_one(self, planned: Planned, attempt: int) -> None:
        task = self._task(planned, attempt)
        self.prepare(planned.variant)
        files = [*weight_files(task.experts_folder), *weight_files(task.variant_folder)]
        if self._settings.cold:
            drop(files)
        # Pages mapped by another process cannot be dropped, so the rest is recorded.
        still_cached = cached_bytes(files) if self._settings.cold else None
        limit = self._settings.limit_bytes if planned.limited else None
        with nullcontext() if limit is None else limited_group(limit) as group:
            watched = self._watch(task, group)
            usage = (
                None
                if group is None
                # Read inside the `with`, because the group's files do not outlive it.
                else {"limit": limit, "peak": group.peak_bytes, "kills": group.kills}
            )
        report = Path(task.report)
        disturbed = watched.disturbance > DISTURBED
        line = {
            **asdict(planned),
            "hardware": hardware(),
            "versions": versions(),
            "attempt": attempt,
            "began": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "shape": task.shape,
            "device": task.device,
            "vram_gb": task.vram_gb,
            "cached_before_bytes": still_cached,
            "group_bytes": usage,
            "watched": asdict(watched),
            "disturbed": disturbed,
            "latents": str(task.latents),
            "report": json.loads(report.read_text(encoding="utf-8"))
            if watched.exit_code == 0
            else None,
        }
        line["reason"] = None if line["report"] is not None else failure_reason(line)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"{planned.label}: {describe(line)}", flush=True)

    def _watch(self, task: Task, group: LimitedGroup | None) -> Watched:
        command = [sys.executable, str(PROGRAM), "run", task.to_json()]
        environment = {
            # OpenMP reads this once, so it must be set before the process starts.
            "OMP_NUM_THREADS": str(task.threads),
            "HF_HUB_OFFLINE": "1",
            **task.case_variant.environment,
        }
        return watch(
            command if group is None else group.command(command),
            log=Path(task.report).with_suffix(".log"),
            environment=environment,
            timeout_s=RUN_LIMIT_S,
        )

    def _task(self, planned: Planned, attempt: int) -> Task:
        name = (
            f"{planned.variant}{'-limited' if planned.limited else ''}"
            f"-{planned.repetition}-{attempt}"
        )
        settings = self._settings
        return Task(
            variant=planned.variant,
            shape=settings.shape,
            work=str(settings.work),
            report=str(self._folder / f"{name}.json"),
            device=settings.device,
            threads=settings.threads,
            machine=self._machine,
            vram_gb=settings.vram_gb,
        )

    @property
    def _folder(self) -> Path:
        """Folder for the session's reports, latents and logs."""
        folder = self.file.with_suffix("")
        folder.mkdir(exist_ok=True)
        return folder

    def prepare(self, variant: str) -> None:
        """Write the files needed before a variant's first run, once per variant."""
        task = self._task(Planned(variant=variant), 0)
        complete = task.variant_folder / COMPLETE
        if not task.case_variant.prepares or complete.exists():
            return
        print(f"{task.variant}: writes its files", flush=True)
        preparation = replace(task, wanted="files")
        subprocess.run([sys.executable, str(PROGRAM), "run", preparation.to_json()], check=True)
        complete.write_text("{}", encoding="utf-8")


def is_of(run: dict[str, Any], planned: Planned) -> bool:
    """Return True if a session line is this run."""
    return all(run[name] == value for name, value in asdict(planned).items())


def run_out_of_memory(run: dict[str, Any]) -> bool:
    """Return True if the memory limit was too small for a run.

    This is a result, so it is not repeated.
    """
    usage = run["group_bytes"]
    return run["report"] is None and usage is not None and usage["kills"] > 0


def describe(line: dict[str, Any]) -> str:
    """Format one run as a line of text."""
    watched = line["watched"]
    report = line["report"]
    noise = f", others {watched['others_s'] + watched['stolen_s']:.1f} s" + (
        " DISTURBED" if line["disturbed"] else ""
    )
    if report is None:
        return f"failed after {watched['wall_s']:.1f} s ({line['reason']}){noise}"
    steps = " / ".join(f"{seconds:.2f}" for seconds in report["step_s"])
    return (
        f"load {report['load_s']:.2f}, steps {steps}, total {report['total_s']:.2f} s; "
        f"peak {report['peak_rss_bytes'] / 1e9:.2f} GB, read {report['read_bytes'] / 1e9:.2f} GB, "
        f"{report['checksum'][:8]}{noise}"
    )


def failure_reason(line: dict[str, Any]) -> str:
    """Return the reason why a run has no report."""
    watched = line["watched"]
    if run_out_of_memory(line):
        return "killed: out of memory"
    if watched["wall_s"] >= RUN_LIMIT_S:
        return f"not finished within {RUN_LIMIT_S:.0f} s"
    last = watched["output_end"].strip().splitlines()[-1:]
    return last[0] if last else f"exit code {watched['exit_code']}"
