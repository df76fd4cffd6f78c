"""What the command's exit codes mean."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""A node failed while it ran."""
INVALID = 2
"""The workflow or the arguments are wrong; nothing ran."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""
