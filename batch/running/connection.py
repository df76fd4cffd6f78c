"""Connection of a runner to a backend: state in words, and time since the last response."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ...schema import StateError

FIRST_RETRY = 0.5
"""Seconds until the first retry."""


class Contact(Enum):
    """Response of a backend to the runner's requests."""

    responding = "responding"
    partial = "partial"
    """It responds, but not to the last post, or not with a row's files. It may take rows, and
    the silence goes on."""
    silent = "silent"
    """No response for some time. It keeps the rows."""
    away = "away"
    """Other backends take the rows, or it has not responded since the batch started. Check it
    before the next row."""


@dataclass(kw_only=True)
class Connection:
    """Backend state between the runner's polls.

    A method in the wrong state raises StateError.
    """

    contact: Contact = Contact.responding
    silence_s: float = 0.0
    """Seconds since the last response, in requests without one and between them."""
    post_unanswered: bool = False
    """True if the last post got no response. Only the next post can change it."""
    gave_rows: bool = False
    """True if other backends have taken rows in this silence."""

    @property
    def may_take(self) -> bool:
        """True if the backend may take rows."""
        return self.contact in {Contact.responding, Contact.partial}

    def check_passed(self) -> None:
        """Use the backend again. The silence goes on until a poll is answered."""
        if self.contact is not Contact.away:
            raise StateError(f"a backend was checked that is {self.contact.value}")
        self.contact = Contact.silent

    def answered(self) -> None:
        """End the silence after a poll with all its posts, unless the last post is unanswered."""
        if self.contact is Contact.away:
            raise StateError(f"a poll was answered by a backend that is {self.contact.value}")
        self.contact = Contact.partial
        if not self.post_unanswered:
            self.contact = Contact.responding
            self.silence_s = 0.0
            self.gave_rows = False

    def unanswered(self, hung_s: float) -> None:
        """Begin or extend the silence, after `hung_s` without a response to a request."""
        if self.contact is not Contact.away:
            self.contact = Contact.silent
        self.silence_s += hung_s

    def unsent(self) -> None:
        """Begin the silence again: the backend responds, but not with a row's files."""
        if self.contact is Contact.responding:
            self.contact = Contact.partial
        if not self.post_unanswered:
            self.silence_s = 0.0
        self.silence_s = max(self.silence_s, FIRST_RETRY)

    def give_rows(self) -> None:
        """Record the loss of rows to other backends."""
        if self.contact is Contact.responding:
            raise StateError("rows of a backend that responds were given to others")
        self.contact = Contact.away
        self.gave_rows = True


class RequestClock:
    """Time since the backend's last response, for the thread that shows the progress.

    It stands still before the first request, and after `stop`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._answered_at = math.inf

    @property
    def waited_s(self) -> float:
        """Seconds since the last response; 0 unless the runner waits for one."""
        return max(0.0, self.now() - self._answered_at)

    def hung_s(self, began: float) -> float:
        """Return the seconds since the last response, or since `began` if this is later."""
        return self.now() - max(began, self._answered_at)

    def answered(self) -> None:
        """Note a response, or the begin of the requests."""
        self._answered_at = self.now()

    def stop(self) -> None:
        """Wait for no response."""
        self._answered_at = math.inf
