"""The table of a run: what every step took, from its `Timeline`."""

from __future__ import annotations

from ..plan import StepRecord, Timeline
from ..plan.figure_words import size_text


def step_table(timeline: Timeline) -> str:
    """One line per step and one for the run, then what was changed on the way, a line each.

    `seconds` is the wall time of the step, `stall` the part of it that waited for weights, `decode` the time of
    decoding and patching blocks, `moved` the bytes of the blocks fetched for it, `read` those that were read from files
    for it, `memory` the peak on the device, or the RAM of the process where the device has no counter. `decode` and
    `read` are left out where the whole run has none.
    """
    columns = _columns(timeline)
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *timeline.changes])


def _columns(timeline: Timeline) -> list[tuple[str, ...]]:
    """Each column from its heading to the line of the run."""
    steps = timeline.steps
    memory = [_memory(step) for step in steps]
    peak = max((nbytes for nbytes in memory if nbytes is not None), default=None)
    columns = [
        ("step", *(str(step.index + 1) for step in steps), "all"),
        ("expert", *(step.expert for step in steps), ""),
        ("sigma", *("" if step.sigma is None else f"{step.sigma:.4f}" for step in steps), ""),
        ("seconds", *_seconds(*(step.wall_s for step in steps), timeline.wall_s)),
        ("stall", *_seconds(*(step.stall_s for step in steps), timeline.stall_s)),
    ]
    if timeline.decode_s:
        columns.append(("decode", *_seconds(*(step.decode_s for step in steps), timeline.decode_s)))
    columns.append(("moved", *_sizes(*(step.bytes_moved for step in steps), timeline.bytes_moved)))
    if timeline.read_bytes:
        columns.append(("read", *_sizes(*(step.read_bytes for step in steps), timeline.read_bytes)))
    columns.append(("memory", *_sizes(*memory, peak)))
    return columns


def _seconds(*values: float) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _sizes(*values: int | None) -> list[str]:
    return ["" if value is None else size_text(value) for value in values]


def _memory(step: StepRecord) -> int | None:
    return step.rss_bytes if step.device_bytes is None else step.device_bytes
