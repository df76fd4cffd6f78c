"""Rows, workflow and backends for a batch, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..host.embedded import InputError, Prompt, Sockets, api_prompt
from .backend import BatchBackend
from .errors import SetupError
from .output_store import stored_prompt
from .rows.lanes import digest_of_lane, lane_planner
from .rows.rows import (
    Planner,
    Row,
    apply_row,
    fail_dependents,
    lines_by_reason,
    workflow_digest,
    workflow_key,
)


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Rows, workflow and backends for a batch. Rows that do not fit the workflow have a fault."""

    rows: tuple[Row, ...]
    workflow: Prompt
    backends: tuple[BatchBackend, ...]
    """The first one responds. It stands for all when rows are checked."""
    lanes: int
    silent: frozenset[str] = frozenset()
    """Names of silent backends."""
    notes: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls, rows: Sequence[Row], workflow: Prompt, backends: Sequence[BatchBackend], lanes: int
    ) -> BatchSpec:
        """Return the batch. A row has a fault if the first backend lacks one of the inputs.

        Raises SetupError for a fault in all rows, such as a misspelled column: none can run.
        """
        checked = []
        for row in rows:
            try:
                apply_row(workflow, row, backends[0].sockets)
            except InputError as err:
                row = replace(row, fault=str(err))
            checked.append(row)
        faults = lines_by_reason((row.line, row.fault) for row in checked if row.fault is not None)
        for fault, (count, lines) in faults.items():
            if count == len(checked):
                raise SetupError(f"no row can run: {lines}: {fault}")
        return cls(
            rows=tuple(fail_dependents(checked)),
            workflow=workflow,
            backends=tuple(backends),
            lanes=lanes,
        )

    @property
    def sockets(self) -> Sockets:
        """Inputs of all node classes."""
        return self.backends[0].sockets

    def planner(self, report: Callable[[str], None]) -> Planner:
        """Return the function for grouping rows into jobs.

        It calls `report` with rows that cannot share one.
        """
        return lane_planner(self.workflow, self.sockets, self.lanes, report)

    def faults_of(self, row: Row) -> list[str]:
        """Return a row's faults, without running it."""
        if row.fault:
            return [row.fault]
        # The latent to continue does not exist yet.
        return self.backends[0].faults(
            apply_row(self.workflow, replace(row, source=None), self.sockets)
        )

    def find_rows(self, path: Path) -> list[str]:
        """Return the hashes of rows with the workflow in a file's metadata."""
        try:
            stored, node_id = stored_prompt(path)
            prompt = api_prompt(stored)
        except ValueError:
            return []
        by_lane = self._hashes_by_key.get(str(digest_of_lane(prompt, str(node_id))))
        return by_lane or self._hashes_by_key.get(workflow_key(prompt, self.sockets), [])

    @cached_property
    def _hashes_by_key(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.fault is None:
                prompt = apply_row(self.workflow, row, self.sockets)
                for key in (workflow_key(prompt, self.sockets), workflow_digest(prompt)):
                    found.setdefault(key, []).append(row.hash)
        return found
