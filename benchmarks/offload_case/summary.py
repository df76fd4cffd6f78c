"""Session summary: one row per variant, with medians and ratios to the resident model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Run = dict[str, Any]
Row = dict[str, Any]

GB = 1e9


def summarise(
    runs: Sequence[Run], *, resident: str = "resident", switch_step: int = 2
) -> dict[str, Row]:
    """Return one row per variant, limited ones as "<variant> (limited)".

    Ratios need runs of the resident model.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["variant"] + (" (limited)" if run["limited"] else ""), []).append(run)
    base = _finished(groups.get(resident, []))
    return {name: _row(of_name, base, switch_step) for name, of_name in groups.items()}


def _row(runs: list[Run], base: list[Run], switch_step: int) -> Row:
    finished = _finished(runs)
    if not finished:
        return {
            "runs": len(runs),
            "ended_after_s": round(statistics.median(run["watched"]["wall_s"] for run in runs), 1),
            "peak_anonymous_gb": _gb(max(run["watched"]["anonymous_peak_bytes"] for run in runs)),
            "why": runs[-1]["reason"],
        }
    calm = [run for run in finished if not run["disturbed"]]
    # Disturbed runs are better than none. The column `calm` marks such a row.
    counted = calm or finished
    step_s = _median_steps(counted)
    row = {
        "runs": len(counted),
        "disturbed_runs": len(finished) - len(calm),
        "calm": bool(calm),
        "load_s": _median(counted, "load_s"),
        "step_s": [round(value, 3) for value in step_s],
        "switch_to_median": round(step_s[switch_step] / statistics.median(step_s), 3),
        "total_s": _median(counted, "total_s"),
        "import_rss_gb": _gb(_median(counted, "import_rss_bytes")),
        "peak_rss_gb": _gb(_median(counted, "peak_rss_bytes")),
        "rss_above_imports_gb": _gb(
            _median(counted, "peak_rss_bytes") - _median(counted, "import_rss_bytes")
        ),
        "peak_anonymous_gb": _gb(
            statistics.median(run["watched"]["anonymous_peak_bytes"] for run in counted)
        ),
        "read_gb": _gb(_median(counted, "read_bytes")),
        "cpu_s": round(_median(counted, "user_s") + _median(counted, "system_s"), 1),
        "others_s": round(
            max(run["watched"]["others_s"] + run["watched"]["stolen_s"] for run in counted), 1
        ),
        "total_s_of_each_run": [round(run["report"]["total_s"], 2) for run in counted],
        **_streamed(counted),
        **_on_device(counted),
    }
    return row | (_against(counted, base, step_s) if base else {})


def _streamed(runs: list[Run]) -> Row:
    """Return the columns that only WanStream reports: moved bytes, stall and prediction."""
    reports = [run["report"] for run in runs if run["report"]["timeline"] is not None]
    if not reports:
        return {}
    timelines = [report["timeline"] for report in reports]
    row: Row = {
        # The program determines the bytes, so they are the same in all runs.
        "moved_gb": _gb(sum(reports[0]["step_bytes"]) + timelines[0]["non_block_bytes"]),
        "step_moved_gb": [_gb(moved) for moved in reports[0]["step_bytes"]],
        "stall_s": [
            round(statistics.median(steps), 3)
            for steps in zip(
                *([step["stall_s"] for step in line["steps"]] for line in timelines), strict=True
            )
        ],
    }
    predicted = [report for report in reports if report["predicted"] is not None]
    if predicted:
        simulated = [
            [step["wall_s"] for step in report["predicted"]["steps"]] for report in predicted
        ]
        ratios = [
            [
                expected_s / actual_s
                for expected_s, actual_s in zip(steps, report["step_s"], strict=True)
            ]
            for steps, report in zip(simulated, predicted, strict=True)
        ]
        row["predicted_step_s"] = _medians(simulated)
        row["predicted_to_executed"] = _medians(ratios)
    return row


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the median by step."""
    return [round(statistics.median(steps), 3) for steps in zip(*runs, strict=True)]


def _on_device(runs: list[Run]) -> Row:
    """Return weight memory on device and host, where all runs report it."""
    names = {"device_peak_bytes": "device_peak_gb", "device_weight_bytes": "device_weights_gb"}
    names |= {"host_weight_bytes": "host_weights_gb"}
    reports = [run["report"] for run in runs]
    return {
        column: _gb(statistics.median(report[name] for report in reports))
        for name, column in names.items()
        if all(report[name] is not None for report in reports)
    }


def _against(runs: list[Run], base: list[Run], step_s: list[float]) -> Row:
    """Return ratios to the resident model in the same session, and the latent distance."""
    calm = [run for run in base if not run["disturbed"]] or base
    base_steps = _median_steps(calm)
    reference = base[0]["report"]
    same = all(run["report"]["checksum"] == reference["checksum"] for run in runs)
    return {
        "steps_to_resident": round(sum(step_s) / sum(base_steps), 3),
        "total_to_resident": round(_median(runs, "total_s") / _median(calm, "total_s"), 3),
        "equal_to_resident": same,
        "relative_l2": 0.0
        if same
        else max(_distance(run["latents"], base[0]["latents"]) for run in runs),
    }


def _distance(latents: str, reference: str) -> float:
    ours = np.load(Path(latents))
    theirs = np.load(Path(reference))
    # Three digits, as a number for JSON.
    return float(f"{np.linalg.norm(ours - theirs) / np.linalg.norm(theirs):.2e}")


def _finished(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run["report"] is not None]


def _median_steps(runs: Sequence[Run]) -> list[float]:
    return [
        statistics.median(steps)
        for steps in zip(*(run["report"]["step_s"] for run in runs), strict=True)
    ]


def _median(runs: Sequence[Run], name: str) -> float:
    return round(statistics.median(run["report"][name] for run in runs), 3)


def _gb(nbytes: float) -> float:
    return round(nbytes / GB, 3)
