"""The performance pages in docs/ are up to date with the results."""

import re
from pathlib import Path

from wanstream.bench import Result
from wanstream.benchmarks.pages.performance import PAGES as WRITTEN
from wanstream.benchmarks.pages.performance import page
from wanstream.benchmarks.record import newest_results

ROOT = Path(__file__).parents[4]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in WRITTEN}


def test_pages_in_the_repository_are_those_of_the_results():
    results = newest_results(ROOT / "benchmarks" / "results")
    for name, text in TEXTS.items():
        assert page(text, results) == text, f"{name}: run python benchmarks/pages/performance.py"
    cases = {*re.findall(r"^<!-- (\S+): ", "".join(TEXTS.values()), re.MULTILINE)}
    assert cases == {"offload-cpu", "offload-cpu3gb", "offload-gpu"}


def test_pages_name_the_newest_file_of_each_case():
    pages = {*TEXTS, "number-formats.md"}
    texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in sorted(pages)]
    named = {*re.findall(r"`benchmarks/results/(.+?)\.json`", "".join(texts))}
    assert len(named) > 5
    newest = newest_results(ROOT / "benchmarks" / "results").values()
    assert named <= {result.name for result in newest}


def test_rows_of_disturbed_and_dead_runs_and_of_missing_cases():
    """Rows of other runs are those of the pages above."""
    row = {"runs": 3, "calm": False, "load_s": 0.31, "step_s": [11.0, 10.5, 10.6, 10.5]}
    row |= {"switch_to_median": 1.0, "total_s": 43.0, "steps_to_resident": 1.01, "cpu_s": 86.0}
    row |= {"peak_rss_gb": 0.87, "peak_anonymous_gb": 0.5, "read_gb": 11.3}
    dead = {"runs": 1, "ended_after_s": 7.2, "peak_anonymous_gb": 3.1}
    rows = {"mmap": {**row, "equal_to_resident": True}}
    rows["swap"] = {**dead, "why": "killed: out of memory"}
    shape = {"blocks": 30, "steps": 4, "switch_step": 2, "expert_gb": 2.838, "streamed_gb": 2.784}
    machine = {"hardware": {"name": "cpu-2-cores", "ram_gb": 25.3}, "versions": {"torch": "2.13"}}
    given = {"case": "offload-cpu", "method": "as it was", "date": "2026-11-21", **machine}
    result = Result(figures={**shape, "variants": rows}, **given)
    cases = ("offload-cpu: runs", "offload-gpu: parts")
    places = "".join(f"<!-- {place} -->\n<!-- end -->\n" for place in cases)
    text = page(f"before\n{places}after\n", {"offload-cpu": result})
    assert text.startswith("before\n<!-- offload-cpu: runs -->\n")
    assert text.endswith("No result of the case `offload-gpu` yet.\n\n<!-- end -->\nafter\n")
    for words in (
        "| whole experts, one at a time | 1 | - | killed: out of memory after 7 s | - | - | - |",
        "| memory-mapped (from_pretrained as it is) (disturbed) | 3 | 0.3 | 11.0 / 10.5 / ",
        "`benchmarks/results/offload-cpu_cpu-2-cores_20261121.json`: 2026-11-21,",
    ):
        assert words in text
