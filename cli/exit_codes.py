"""Exit codes of the commands."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""A node, a row or a measurement failed."""
INVALID = 2
"""The workflow or the arguments are invalid; nothing ran."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""
