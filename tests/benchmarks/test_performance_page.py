"""docs/performance.md says what the results say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from wanstream.benchmarks.performance.bars import Bar, Panels, bar_figure
from wanstream.benchmarks.performance.page import figures, page
from wanstream.benchmarks.performance.results import Result, newest_results

ROOT = Path(__file__).parents[2]


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
        file="benchmarks/results/x.json",
        case=case,
        method="as it was",
        figures={**shape, "variants": rows},
        hardware={"name": "cpu-2-cores", "ram_gb": 25.3},
        versions={"torch": "2.13"},
        date="2026-11-21",
    )


def test_the_page_in_the_repository_is_that_of_the_results() -> None:
    results = newest_results(ROOT / "benchmarks" / "results")
    wanted = {"performance.md": page(results), **figures(results)}
    for name, text in wanted.items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is old: run python benchmarks/performance_page.py"


def test_rows_say_measured_simulated_disturbed_and_died() -> None:
    dead = {"runs": 1, "ended_after_s": 7.2, "peak_anonymous_gb": 3.1, "why": "killed: out of memory"}
    measured = result(
        layerwise=row(predicted_step_s=[11.2, 10.4, 10.4, 10.4], predicted_to_executed=[1.02, 0.99, 0.98, 0.99]),
        mmap=row(calm=False),
        swap=dead,
        **{"group-block-disk": row(equal_to_resident=False, relative_l2=0.022)},
    )
    text = page({"offload-cpu": measured})
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "memory-mapped (from_pretrained as it is) (disturbed)" in lines
    assert "killed: out of memory after 7 s" in text
    assert "2.2e-02" in text
    assert "| 11.2 / 10.4 / 10.4 / 10.4 | 11.0 / 10.5 / 10.6 / 10.5 | 1.02 / 0.99 / 0.98 / 0.99 |" in text
    assert "as it was" in text
    assert "Nothing on this page was measured on a GPU yet" in text
    assert "No result yet: `python benchmarks/offload.py cpu3gb WORK`" in text


def test_bytes_per_step_stand_beside_each_other() -> None:
    ours = row(step_moved_gb=[2.784] * 4)
    text = page({"offload-cpu": result(layerwise=ours, resident=row(), **{"cpu-offload": row()})})
    assert "| WanStream, layerwise from the file | 2.78 | 1.00x | counted |" in text
    assert "| accelerate cpu_offload | 5.68 | 2.04x |" in text


def test_gpu_figures_for_forty_blocks_are_called_simulated() -> None:
    part = {
        "tokens": 32760,
        "blocks": 8,
        "vram_gb": 12,
        "variants": {"pinned": row(device_peak_gb=9.5, device_weights_gb=1.6)},
        "simulated_40_blocks": {
            "pinned": {
                "blocks": 40,
                "bus_gb_per_s": 50.0,
                "bus_was_the_limit": False,
                "step_s": [7.5],
                "stall_s": [0.0],
            }
        },
    }
    gpu = Result(**{**vars(result("offload-gpu")), "figures": {"parts": {"480p-12": part}}})
    text = page({"offload-gpu": gpu})
    assert "**simulated**" in text
    assert "at least 50" in text
    assert "| 1.04 | 1.00 | 9.50 | 1.60 |" in text
    assert "Nothing on this page was measured on a GPU" not in text


def test_the_newest_result_of_a_case_counts(tmp_path: Path) -> None:
    body = '{{"case": "{case}", "method": "", "figures": {{}}, "hardware": {{}}, "versions": {{}}, "date": "{date}"}}'
    for name, case, date in (("a", "x", "2026-11-20"), ("b", "x", "2026-11-19"), ("c", "y", "2026-11-01")):
        (tmp_path / f"{name}.json").write_text(body.format(case=case, date=date))
    results = newest_results(tmp_path)
    assert {case: found.file for case, found in results.items()} == {
        "x": "benchmarks/results/a.json",
        "y": "benchmarks/results/c.json",
    }


def test_the_figure_is_drawn_to_scale_and_always_the_same() -> None:
    bars = [
        Bar(label="ours <& others", parts=[1.0, 2.0], beside=1.0, highlighted=True),
        Bar(label="long", parts=[2.0, 4.0], beside=4.0),
        Bar(label="dead", parts=[], beside=0, remark="killed"),
    ]
    panels = Panels(title="t", parts=["load", "step"], unit="s", beside="RSS", beside_unit="GB")
    drawn = bar_figure(bars, panels)
    assert drawn == bar_figure(bars, panels)
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawn)
    widths = [float(rect.get("width", "0")) for rect in root.iter(f"{space}rect") if rect.get("height") == "16"]
    first_load, first_step, first_rss, long_load, _, long_rss = widths
    assert first_step == pytest.approx(2 * first_load, abs=0.2)
    assert long_load == pytest.approx(first_step, abs=0.2)
    assert long_rss == pytest.approx(4 * first_rss, abs=0.4)
    assert "killed" in [text.text for text in root.iter(f"{space}text")]
