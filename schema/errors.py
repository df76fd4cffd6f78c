"""Errors raised by several packages."""


class StateError(RuntimeError):
    """Call in the wrong order. The message names the object, its state and the call."""


class Cancelled(Exception):
    """The caller requested a stop."""
