"""The case `gpu`: measured on few blocks, simulated for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from ..offload_case.variants import all_variants
from .markdown import NOTHING, number, numbers, ratio, table
from .results import Result

NO_GPU = """## On a GPU

**Nothing on this page was measured on a GPU yet.** What WanStream says about GPUs elsewhere (`wanstream plan`, its
planner) is simulated. The programs, slots, threads and buffers that a GPU runs with are the same on a CPU, and tested
there; what only CUDA has, its streams, events and page locking, is tested by the tests marked `gpu`. These, and
`python benchmarks/offload.py gpu`, wait for a card.
"""


def gpu_section(results: Mapping[str, Result]) -> str:
    """The measured parts, or the plain word that there are none."""
    result = results.get("offload-gpu")
    if result is None:
        return NO_GPU
    parts = ["## On a GPU (8 blocks per expert measured unless the part says 40)\n"]
    for name, part in result.figures["parts"].items():
        cap = "" if part["vram_gb"] is None else f", {part['vram_gb']} GB of VRAM for all but the resident model"
        parts.append(f"### {name}: {part['tokens']} tokens, 2 x {part['blocks']} blocks{cap} (measured)\n")
        parts.append(_measured(part))
        if part["simulated_40_blocks"]:
            parts.append(f"The same with 40 blocks, **simulated** from the rates of that run:\n\n{_simulated(part)}")
    return "\n".join([*parts, f"Method: {result.method}\n\n{result.source}\n"])


def _measured(part: Mapping[str, Any]) -> str:
    head = ["", "steps s", "steps / resident", "first / median", "switch / median"]
    head += ["device peak GB", "device weights GB", "host peak GB"]
    variants, lines = all_variants(part["blocks"]), []
    for name, row in part["variants"].items():
        title = variants[name].title
        if "step_s" not in row:
            lines.append([title, f"{row['why']} after {row['ended_after_s']:.0f} s", *[NOTHING] * (len(head) - 2)])
            continue
        lines.append(
            [
                title,
                numbers(row["step_s"], 2),
                ratio(row.get("steps_to_resident")),
                number(row["step_s"][0] / statistics.median(row["step_s"]), 2),
                number(row["switch_to_median"], 2),
                number(row.get("device_peak_gb"), 2),
                number(row.get("device_weights_gb"), 2),
                number(row["peak_rss_gb"], 1),
            ]
        )
    return table(head, lines)


def _simulated(part: Mapping[str, Any]) -> str:
    variants = all_variants(part["blocks"])
    lines = [
        [variants[name].title, numbers(figures["step_s"], 2), numbers(figures["stall_s"], 2), _bus(figures)]
        for name, figures in part["simulated_40_blocks"].items()
    ]
    return table(["", "steps s", "of it waiting s", "bus GB/s"], lines)


def _bus(figures: Mapping[str, Any]) -> str:
    return f"{'' if figures['bus_was_the_limit'] else 'at least '}{figures['bus_gb_per_s']:g}"
