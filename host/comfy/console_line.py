"""Progress line on ComfyUI's console, like that of its own samplers. Does not import ComfyUI."""

from __future__ import annotations

from typing import TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class ConsoleLine:
    """A bar with rate and remaining time. Prints nothing if `file` is not a terminal.

    Args:
        total: number of units.
        unit: name of a unit.
        file: the output; None is stderr.
    """

    def __init__(self, total: int, *, unit: str, file: TextIO | None = None) -> None:
        # disable=None disables it if the file is not a terminal: a line for every step would fill a log.
        self._line = tqdm(total=total, unit=unit, disable=None, file=file)

    def update(self, done: int) -> None:
        """Show `done` of the total; the line is closed at the total."""
        self._line.update(done - self._line.n)
        if done >= self._line.total:
            self._line.close()
