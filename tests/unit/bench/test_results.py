"""Result files: named by case, machine and day, read as written, the newest of each case first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from wanstream.bench import Result
from wanstream.bench.results import newest_results

RESULT = Result(
    case="engine",
    method="as it was",
    figures={"wall_s": [1.5, 2.0]},
    hardware={"name": "cpu-2-cores", "ram_gb": 25.3},
    versions={"torch": "2.13", "python": "3.11"},
    date="2026-11-21",
)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = RESULT.save(tmp_path / "new")
    assert path.name == "engine_cpu-2-cores_20261121.json"
    assert [*json.loads(path.read_text())] == ["case", "method", "figures", "hardware", "versions", "date"]
    assert newest_results(tmp_path / "new") == {"engine": RESULT}
    assert RESULT.source == "2026-11-21, cpu-2-cores, 25.3 GB RAM; torch 2.13, python 3.11"


def test_the_machine_and_the_day_are_those_of_the_measurement(tmp_path: Path) -> None:
    result = Result(case="a", method="", figures={})
    assert result.hardware["cores"] > 0
    assert {"torch", "python", "commit"} <= result.versions.keys()
    assert result.save(tmp_path).name.startswith(f"a_{result.hardware['name']}_2")


def test_the_newest_result_of_a_case_counts(tmp_path: Path) -> None:
    for case, day in (("x", "2026-11-20"), ("x", "2026-11-19"), ("y", "2026-11-01")):
        replace(RESULT, case=case, date=day).save(tmp_path)
    assert {case: found.date for case, found in newest_results(tmp_path).items()} == {
        "x": "2026-11-20",
        "y": "2026-11-01",
    }
