"""The case `cpu`, free and inside a memory limit: table, bytes per step, prediction, figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..offload_case.variants import all_variants
from .bars import Bar, Panels, bar_figure
from .markdown import NOTHING, number, numbers, ratio, table
from .results import Result

LIMITED = " (limited)"
Rows = Mapping[str, Mapping[str, Any]]


def run_table(result: Result) -> str:
    """One line for each variant, in the order in which the program lists them."""
    head = ["", "runs", "load s", "steps s", "switch / median", "total s", "steps / resident", "peak RSS GB"]
    head += ["anonymous GB", "read GB", "CPU s", "latents"]
    return table(head, [_line(title, row) for title, row in _ordered(result)])


def _line(title: str, row: Mapping[str, Any]) -> list[str]:
    if "step_s" not in row:
        why = f"{row['why']} after {row['ended_after_s']:.0f} s"
        return [
            title,
            str(row["runs"]),
            NOTHING,
            why,
            *[NOTHING] * 5,
            number(row["peak_anonymous_gb"], 2),
            *[NOTHING] * 2,
            NOTHING,
        ]
    latents = "equal" if row.get("equal_to_resident") else f"{row.get('relative_l2', float('nan')):.1e}"
    return [
        title if row["calm"] else f"{title} (disturbed)",
        str(row["runs"]),
        number(row["load_s"]),
        numbers(row["step_s"]),
        number(row["switch_to_median"], 2),
        number(row["total_s"]),
        ratio(row.get("steps_to_resident")),
        number(row["peak_rss_gb"], 2),
        number(row["peak_anonymous_gb"], 2),
        number(row["read_gb"]),
        number(row["cpu_s"], 0),
        latents,
    ]


def bytes_table(result: Result) -> str:
    """How much each variant moves in a step of two forward passes, in GB and against the streamed weights."""
    figures = result.figures
    whole, streamed = figures["expert_gb"], figures["streamed_gb"]
    lines = []
    for title, row in _ordered(result):
        if title.endswith(LIMITED) or "step_s" not in row:
            continue
        moved, known = _moved_per_step(title, row, whole)
        lines.append([title, moved if isinstance(moved, str) else number(moved, 2), _against(moved, streamed), known])
    return table(["", "GB per step", "of the streamed weights", "known"], lines)


def _moved_per_step(title: str, row: Mapping[str, Any], whole: float) -> tuple[float | str, str]:
    if "step_moved_gb" in row:
        steps = row["step_moved_gb"]
        return (steps[0] if len(set(steps)) == 1 else numbers(steps, 2)), "counted"
    kind = next(variant.kind for variant in _variants(30).values() if variant.title == title)
    if kind in ("group", "accelerate"):
        return 2 * whole, "by construction: each forward pass brings every weight"
    if kind == "swap":
        return f"0, {number(whole, 2)} at the switch", "by construction"
    return ("0" if kind == "resident" else NOTHING), ("by construction" if kind == "resident" else "the system decides")


def _against(moved: float | str, streamed: float) -> str:
    return ratio(moved / streamed) if isinstance(moved, float) else NOTHING


def prediction_table(result: Result) -> str:
    """What WanStream's simulator said from the measured machine, beside what then happened."""
    lines = [
        [title, numbers(row["predicted_step_s"]), numbers(row["step_s"]), numbers(row["predicted_to_executed"], 2)]
        for title, row in _ordered(result)
        if "predicted_step_s" in row
    ]
    return table(["", "simulated steps s", "executed steps s", "simulated / executed"], lines) if lines else ""


def figure(result: Result, title: str) -> str:
    """Time by load and steps, and peak RSS, of every variant."""
    steps = result.figures["steps"]
    switch = result.figures["switch_step"]
    names = ["load", *(f"step {step + 1}{' (switch)' if step == switch else ''}" for step in range(steps))]
    bars = [
        Bar(label=label, parts=[row["load_s"], *row["step_s"]], beside=row["peak_rss_gb"], highlighted=_is_ours(label))
        if "step_s" in row
        else Bar(label=label, parts=[], beside=0, remark=f"{row['why']} after {row['ended_after_s']:.0f} s")
        for label, row in _ordered(result)
    ]
    return bar_figure(bars, Panels(title=title, parts=names, unit="s", beside="peak RSS", beside_unit="GB"))


def _ordered(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    """(title, row), WanStream first."""
    rows: Rows = result.figures["variants"]
    variants = _variants(result.figures["blocks"])
    names = [name + suffix for name in variants for suffix in ("", LIMITED) if name + suffix in rows]
    titled = [(variants[name.removesuffix(LIMITED)].title + _suffix(name), rows[name]) for name in names]
    return sorted(titled, key=lambda line: not _is_ours(line[0]))


def _suffix(name: str) -> str:
    return LIMITED if name.endswith(LIMITED) else ""


def _is_ours(title: str) -> bool:
    return title.startswith("WanStream")


def _variants(blocks: int) -> Mapping[str, Any]:
    return all_variants(blocks)
