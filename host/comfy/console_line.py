"""A line of progress on the console of ComfyUI, as its own samplers have one. It needs nothing of ComfyUI."""

from __future__ import annotations

from typing import TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class ConsoleLine:
    """One line with a bar, the rate and the time left. On anything but a terminal it prints nothing.

    Args:
        unit: of what is counted.
        file: None is stderr.
    """

    def __init__(self, total: int, *, unit: str, file: TextIO | None = None) -> None:
        # None: off where the file is not a terminal, because a line for every step would fill a log.
        self._line = tqdm(total=total, unit=unit, disable=None, file=file)

    def update(self, done: int) -> None:
        """Show `done` of the total; all of it ends the line."""
        self._line.update(done - self._line.n)
        if done >= self._line.total:
            self._line.close()
