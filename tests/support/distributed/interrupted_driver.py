"""Job for `processes.py`: a driver with its own workers, possibly killed in the middle of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from wanstream.distributed.driver import driver as driver_module
from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.messages import RunTask
from wanstream.sampling.steps import StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef

Driven = tuple[torch.Tensor, tuple[str, ...], list[int]]
"""An uninterrupted run's latents, changes, and `done` in every reported step."""


def drive(
    here: SimpleNamespace, task: RunTask, mesh: Mesh, states: Path, options: Mapping[str, Any]
) -> Driven:
    """Run a task on workers, with these options.

    handover_s: interval between two states.
    dies_at: step in which this process is killed, or None.
    """
    driver_module.handover_interval_s = lambda nbytes, groups: options["handover_s"]
    ref = WorkersRef(count=mesh.size, threads=1, timeout_s=60.0)
    done: list[int] = []

    def on_step(step: StepProgress) -> None:
        done.append(step.done)
        if step.done == options["dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    with _pool(here, mesh.size) as pool:
        ran = Driver(pool, ref, mesh).denoise(
            task.experts, task.request, task.policy, on_step=on_step, states=states
        )
    return ran.latents, ran.timeline.changes, done


def _pool(here: SimpleNamespace, count: int) -> Any:
    folder = Path(__file__).parent
    module = here.load(str(folder / "processes.py"))
    # Separate processes, which end with this one.
    processes = module.Processes(module.Source(here.source))
    return here.load(str(folder / "process_pool.py")).ProcessPool(processes, count)
