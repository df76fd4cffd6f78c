"""The table of a run: what every step took, from its `Timeline`."""

from __future__ import annotations

from ..plan import StepRecord, Timeline

_COLUMNS = ("step", "expert", "sigma", "seconds", "stall", "moved", "memory")
_UNITS = ("B", "KB", "MB", "GB", "TB")


def step_table(timeline: Timeline) -> str:
    """One line per step and one for the run.

    `seconds` is the wall time of the step, `stall` the part of it that waited for weights, `moved` the bytes of the
    blocks fetched for it, `memory` the peak on the device, or the RAM of the process where the device has no counter.
    """
    rows = [_COLUMNS, *(_step_row(step) for step in timeline.steps), _total_row(timeline)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """Bytes in decimal units with three digits: 702800000 -> "703 MB"."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def _step_row(step: StepRecord) -> tuple[str, ...]:
    sigma = "" if step.sigma is None else f"{step.sigma:.4f}"
    memory = _memory(step)
    return (
        str(step.index + 1),
        step.expert,
        sigma,
        f"{step.wall_s:.2f}",
        f"{step.stall_s:.2f}",
        size_text(step.bytes_moved),
        "" if memory is None else size_text(memory),
    )


def _total_row(timeline: Timeline) -> tuple[str, ...]:
    peak = max((memory for step in timeline.steps if (memory := _memory(step)) is not None), default=None)
    return (
        "all",
        "",
        "",
        f"{timeline.wall_s:.2f}",
        f"{timeline.stall_s:.2f}",
        size_text(timeline.bytes_moved),
        "" if peak is None else size_text(peak),
    )


def _memory(step: StepRecord) -> int | None:
    return step.rss_bytes if step.device_bytes is None else step.device_bytes
