"""Errors that several packages raise."""

from __future__ import annotations


class StateError(RuntimeError):
    """A call in the wrong order; the message names the object, its state and the call."""


class Cancelled(Exception):
    """The caller requested a stop."""
