"""Batch failures: of each row by backend, of each backend in a row, and of requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_LOSSES = 5
"""Most losses of a row while it runs. Such a row may crash the servers."""

MAX_FAILURES = 2
"""Most backends to try a row on. A backend may fail every row, for example without a GPU."""

MAX_STREAK = 3
"""Rows that a backend may fail in a row. It has one less at a time, and one fault may fail them
together."""


@dataclass(kw_only=True)
class Streak:
    """Failed rows of a backend since it last finished one, without failures elsewhere."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Reasons by row hash."""
    finished_by: str = ""
    """Another backend, which has finished one of them."""

    @property
    def is_long(self) -> bool:
        """True if the backend is suspected, and gets only rows that others have failed."""
        return len(self.reasons) >= MAX_STREAK


class FailureLog:
    """Failures on the backends with these names. Used under the queue's lock."""

    def __init__(self, names: Iterable[str]) -> None:
        self._streaks = {name: Streak() for name in names}
        self._losses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Losses of each row while it ran, by row hash and backend name."""
        self._reasons: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Last failure reason, by row hash and backend name."""

    def suits(self, name: str, digest: str, alive: Iterable[str]) -> bool:
        """Return True if a backend may try this row: none has failed or lost it less often.

        A suspected one tries only rows that others have failed. So two suspected ones do not wait
        for each other.
        """
        reasons = self._reasons[digest]
        others = [other for other in alive if other != name]
        if others and self._streaks[name].is_long and not reasons:
            return False
        tries = self._losses[digest] + Counter(reasons.keys())
        return all(tries[name] <= tries[other] for other in others)

    def retries(self, name: str, digest: str, alive: Iterable[str]) -> bool:
        """Return True if a failure on this backend calls for a try on another one."""
        tried = {name, *self._reasons[digest]}
        return len(tried) < MAX_FAILURES and not tried.issuperset(alive)

    def fail(self, name: str, digest: str, reason: str) -> None:
        """Record that a backend has failed a row."""
        self._reasons[digest][name] = reason
        self._streaks[name].reasons[digest] = reason

    def fail_everywhere(self, name: str | None, digest: str, reason: str) -> str:
        """Count a row as failed for good. Return the reason, with reasons from other backends."""
        for streak in self._streaks.values():
            streak.reasons.pop(digest, None)
        before = {other: text for other, text in self._reasons[digest].items() if other != name}
        if not before:
            return reason
        if name is None:
            return f"{reason}; {merged_reasons(before)}"
        return merged_reasons({name: reason, **before})

    def finish(self, name: str, digest: str) -> None:
        """Record that a backend has finished a row."""
        self._streaks[name] = Streak()
        for streak in self._streaks.values():
            if digest in streak.reasons:
                streak.finished_by = name

    def lose(self, name: str, digest: str, reason: str) -> str:
        """Count a loss of a running row on a backend.

        Return the row's fault if it was lost too often, else "".
        """
        losses = self._losses[digest]
        losses[name] += 1
        if losses.total() < MAX_LOSSES:
            return ""
        return ": ".join(filter(None, [f"lost {MAX_LOSSES} times while running", reason]))

    def restart(self, name: str) -> None:
        """Suspect a backend no more: it may have been restarted."""
        self._streaks[name] = Streak()

    def fault_of(self, name: str) -> str:
        """Return why a backend gets no more rows: it fails rows that another one finishes.

        Empty if it does not.
        """
        streak = self._streaks[name]
        if not (streak.is_long and streak.finished_by):
            return ""
        last = [*streak.reasons.values()][-1].partition("\n")[0]
        return (
            f"{name} failed {len(streak.reasons)} rows in a row, of which {streak.finished_by} has "
            f"finished one: restart it, or leave it out of the next batch; its last error: {last}"
        )


def merged_reasons(reasons: Mapping[str, str]) -> str:
    """Return reasons by backend name as one text, with equal reasons merged."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"on {' and '.join(sorted(who))}: {reason}" for reason, who in names.items())


_MAX_TRIES = 5
"""Most failed requests for a row while the same requests succeed for other rows."""


@dataclass(kw_only=True)
class Setback:
    """Failed requests of one kind for a row."""

    succeeded_before: int
    """Number of successful requests before the first failure."""
    tries: int = 0
    waited_s: float = 0.0


class Setbacks:
    """Requests of one kind to one backend: the number of successes, and setbacks by row hash."""

    def __init__(self) -> None:
        self._succeeded = 0
        self._by_row: dict[str, Setback] = {}

    def fail(self, digest: str) -> Setback:
        """Count a failed request for a row, and return its setback."""
        setback = self._by_row.setdefault(digest, Setback(succeeded_before=self._succeeded))
        setback.tries += 1
        return setback

    def succeed(self, digests: Iterable[str]) -> None:
        """Count a successful request for these rows."""
        self._succeeded += 1
        for digest in digests:
            self.forget(digest)

    def forget(self, digest: str) -> None:
        """Remove a row's setback."""
        self._by_row.pop(digest, None)

    def of(self, digest: str) -> Setback:
        """Return the setback of a failed row."""
        return self._by_row[digest]

    def is_row_fault(self, setback: Setback) -> bool:
        """Return True if the row is to blame.

        It had enough tries, and requests for others have succeeded since.
        """
        return setback.tries >= _MAX_TRIES and self._succeeded > setback.succeeded_before
