"""The performance pages in docs/ are up to date with the results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanstream.bench import Result
from wanstream.benchmarks.pages.performance import PAGES as WRITTEN
from wanstream.benchmarks.pages.performance import page
from wanstream.benchmarks.record import newest_results

ROOT = Path(__file__).parents[3]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in WRITTEN}
NAMING = {*TEXTS, "number-formats.md"}
PLACES = "".join(
    f"<!-- {place} -->\n<!-- end -->\n"
    for place in (
        "offload-cpu: runs",
        "offload-cpu: moved",
        "offload-cpu: predicted",
        "offload-gpu: parts",
    )
)


def row(**changed: Any) -> dict[str, Any]:
    return {
        "runs": 3,
        "calm": True,
        "load_s": 0.31,
        "step_s": [11.0, 10.5, 10.6, 10.5],
        "switch_to_median": 1.0,
        "total_s": 43.0,
        "steps_to_resident": 1.01,
        "peak_rss_gb": 0.87,
        "peak_anonymous_gb": 0.5,
        "read_gb": 11.3,
        "cpu_s": 86.0,
        "equal_to_resident": True,
        **changed,
    }


def result(case: str = "offload-cpu", **rows: dict[str, Any]) -> Result:
    shape = {"blocks": 30, "steps": 4, "switch_step": 2, "expert_gb": 2.838, "streamed_gb": 2.784}
    return Result(
        case=case,
        method="as it was",
        figures={**shape, "variants": rows},
        hardware={"name": "cpu-2-cores", "ram_gb": 25.3},
        versions={"torch": "2.13"},
        date="2026-11-21",
    )


def test_the_pages_in_the_repository_are_those_of_the_results() -> None:
    results = newest_results(ROOT / "benchmarks" / "results")
    for name, text in TEXTS.items():
        assert page(text, results) == text, (
            f"docs/{name} is old: run python benchmarks/pages/performance.py"
        )
    assert {*re.findall(r"^<!-- (\S+): ", "".join(TEXTS.values()), re.MULTILINE)} == {
        "offload-cpu",
        "offload-cpu3gb",
        "offload-gpu",
    }


def test_the_pages_name_the_newest_file_of_each_case() -> None:
    texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in sorted(NAMING)]
    named = {*re.findall(r"`benchmarks/results/(.+?)\.json`", "".join(texts))}
    assert len(named) > 5
    assert named <= {
        result.name for result in newest_results(ROOT / "benchmarks" / "results").values()
    }


def test_words_around_the_tables_stay_and_a_case_without_a_result_says_so() -> None:
    text = page(f"before\n{PLACES}after\n", {"offload-cpu": result(layerwise=row())})
    assert text.startswith("before\n<!-- offload-cpu: runs -->\n")
    assert text.endswith("No result of the case `offload-gpu` yet.\n\n<!-- end -->\nafter\n")
    assert page(text, {"offload-cpu": result(layerwise=row())}) == text


def test_rows_say_measured_simulated_disturbed_and_died() -> None:
    dead = {
        "runs": 1,
        "ended_after_s": 7.2,
        "peak_anonymous_gb": 3.1,
        "why": "killed: out of memory",
    }
    measured = result(
        mmap=row(calm=False),
        swap=dead,
        layerwise=row(
            predicted_step_s=[11.2, 10.4, 10.4, 10.4],
            predicted_to_executed=[1.02, 0.99, 0.98, 0.99],
        ),
        **{"group-block-disk": row(equal_to_resident=False, relative_l2=0.022)},
    )
    text = page(PLACES, {"offload-cpu": measured})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2].startswith(
        "| WanStream, layerwise from the file | 3 | 0.3 | 11.0 / 10.5 / 10.6 / 10.5 | 1.00 | 43.0 |"
    )
    dead_row = (
        "| whole experts, one at a time | 1 | - | killed: out of memory after 7 s | - | - | - | - "
        "| 3.10 | - | - | - |"
    )
    assert dead_row in rows
    assert any(
        line.startswith("| memory-mapped (from_pretrained as it is) (disturbed) |") for line in rows
    )
    assert "2.2e-02" in text
    assert (
        "| 11.2 / 10.4 / 10.4 / 10.4 | 11.0 / 10.5 / 10.6 / 10.5 | 1.02 / 0.99 / 0.98 / 0.99 |"
        in text
    )
    assert (
        "Method: as it was\n\n`benchmarks/results/offload-cpu_cpu-2-cores_20261121.json`: "
        "2026-11-21," in text
    )


def test_bytes_per_step_stand_beside_each_other() -> None:
    ours, varying = row(step_moved_gb=[2.784] * 4), row(step_moved_gb=[2.784, 1.392, 2.784, 1.392])
    variants = {
        "layerwise": ours,
        "half": varying,
        "resident": row(),
        "cpu-offload": row(),
        "swap": row(),
    }
    text = page(PLACES, {"offload-cpu": result(**variants)}).split("moved -->")[1]
    assert "| WanStream, layerwise from the file | 2.78 | 1.00x | counted |" in text
    assert "| 2.78 / 1.39 / 2.78 / 1.39 | - | counted |" in text
    assert "| resident (disable_mmap=True) | 0 | - | by construction |" in text
    assert "| whole experts, one at a time | 0, 2.84 at the switch | - | by construction |" in text
    assert "| accelerate cpu_offload | 5.68 | 2.04x |" in text


def test_gpu_figures_for_forty_blocks_are_called_simulated() -> None:
    simulated = {
        "blocks": 40,
        "bus_gb_per_s": 50.0,
        "bus_was_the_limit": False,
        "step_s": [7.5],
        "stall_s": [0.0],
    }
    part = {
        "tokens": 32760,
        "blocks": 8,
        "vram_gb": 12,
        "variants": {"pinned": row(device_peak_gb=9.5, device_weights_gb=1.6)},
        "simulated_40_blocks": {"pinned": simulated},
    }
    text = page(
        PLACES,
        {"offload-gpu": replace(result("offload-gpu"), figures={"parts": {"480p-12": part}})},
    )
    assert "**simulated**" in text
    assert "at least 50" in text
    assert "| 1.04 | 1.00 | 9.50 | 1.60 |" in text
