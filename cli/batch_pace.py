"""How far the jobs of a batch are that run now, so that the time left does not stand still for a whole job. Pure.

A job counts as far as its time is spent. How long each of its nodes takes is known from the job before; the first one
is as far as the steps of the node that has most of them.
"""

from __future__ import annotations

_MOST = 0.99
"""No job is at its end before it has ended."""


class Pace:
    """The share of one job after another that is over. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._before: dict[str, float] = {}
        """Seconds of each node of the job before; under "", what no node reports."""
        self._spent: dict[str, float] = {}
        self._node, self._since = "", 0.0
        self._done, self._total, self._most_steps = 0, 1, 1
        self._reached = 0.0

    def begin(self, job: str, now: float) -> None:
        """This job runs now; nothing happens if it does already."""
        if job == self._job:
            return
        self._job, self._spent, self._reached = job, {}, 0.0
        self._node, self._since = "", now
        self._done, self._total, self._most_steps = 0, 1, 1

    def report(self, node: str, done: int, total: int, now: float) -> None:
        """A node of the job is so far."""
        self._leave_node(node, now)
        self._done, self._total = done, total

    def end(self, now: float) -> None:
        """The job has ended, and is what the next one is measured by."""
        if self._job is None:
            return
        self._leave_node(None, now)
        self._before, self._job = self._spent, None

    def share(self, now: float) -> float:
        """How much of the job is over, 0 to 1; never less than before. 0 while none runs."""
        if self._job is None:
            return 0.0
        self._reached = max(self._reached, min(self._by_time(now) if self._before else self._by_steps(), _MOST))
        return self._reached

    def _by_time(self, now: float) -> float:
        whole = sum(self._before.values())
        over = sum(self._before.get(node, 0.0) for node in self._spent if node != self._node)
        of_node = self._before.get(self._node, 0.0)
        part = of_node * self._done / self._total if self._total > 1 else min(now - self._since, of_node)
        return (over + part) / whole if whole else 0.0

    def _by_steps(self) -> float:
        if self._total < max(self._most_steps, 2):
            return self._reached
        self._most_steps = self._total
        return self._done / self._total

    def _leave_node(self, node: str | None, now: float) -> None:
        if node != self._node:
            self._spent[self._node] = self._spent.get(self._node, 0.0) + now - self._since
            self._node, self._since = node or "", now
