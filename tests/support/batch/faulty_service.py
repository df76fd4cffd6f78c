"""A Ray actor's service that computes nothing.

One process's device or disk fails for each file in the input folder.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch

from wanstream.cli.batch.row_service import RowService
from wanstream.host.embedded.run import History, NodeFailedError, Workflow
from wanstream.tests.faults.replaced import run_replaced

PATH = "tests.support.batch.faulty_service:FaultyRowService"
DEVICE, DISK = "device fails", "disk fails"
"""File names. The first process that runs a row takes one away, and fails from then on."""


class FaultyRowService(RowService):
    """A service on a machine without the driver's folder."""

    def __init__(self, device: str, processes: int, **settings: Any) -> None:
        marked = str(Path(settings["input"], "not on this machine", "mark"))
        super().__init__(device, processes, **{**settings, "marked": marked})
        self._fault: Exception | None = None
        Workflow.run = lambda workflow, **given: self._run_row(workflow, **given)

    def _run_row(self, workflow: Workflow, **given: Any) -> History:
        for name in (DEVICE, DISK) if self._fault is None else ():
            try:
                (workflow.folders.input / name).unlink()
            except FileNotFoundError:
                continue
            device = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            self._fault = (
                device if name == DEVICE else OSError(errno.ENOSPC, "No space left on device")
            )
            break
        if self._fault is not None:
            raise NodeFailedError("save", "WanStreamSaveVideo", self._fault) from self._fault
        return run_replaced(workflow, **given)
