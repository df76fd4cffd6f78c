"""Batch rows as jobs with several lanes: each row's files, and why rows run alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.rows.lanes import lane_planner
from wanstream.batch.rows.rows import BatchJob, Row, apply_row, read_rows

WORKFLOW = json.loads(
    (Path(__file__).parents[3] / "workflows" / "api" / "t2v.json").read_text(encoding="utf-8")
)


def rows(tmp_path: Path, *said: dict[str, Any]) -> list[Row]:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("\n".join(map(json.dumps, said)), encoding="utf-8")
    return read_rows(jobs)


def single_jobs(given: list[Row]) -> list[BatchJob]:
    return [
        BatchJob(prompt=apply_row(WORKFLOW, row, {}), rows=(row,), saves={row.hash: None})
        for row in given
    ]


def test_every_row_knows_the_nodes_that_save_its_files(tmp_path: Path) -> None:
    given = rows(tmp_path, *({"sampler.seed": seed} for seed in range(5)))
    told: list[str] = []
    first, second, third = lane_planner(WORKFLOW, {}, 2, told.append)(given)
    assert [[row.line for row in job.rows] for job in (first, second, third)] == [
        [1, 2],
        [3, 4],
        [5],
    ]
    for job in (first, second):
        assert job.saves.keys() == {row.hash for row in job.rows}
        one, other = (job.saves[row.hash] for row in job.rows)
        assert one is not None
        assert other is not None
        assert one.isdisjoint(other)
        savers = {
            node_id
            for node_id, node in job.prompt.items()
            if node["class_type"] == "WanStreamSaveVideo"
        }
        assert len(one & savers) == len(other & savers) == 1
        assert one | other == job.prompt.keys()
    assert third.saves == {given[4].hash: None}
    assert third.prompt == apply_row(WORKFLOW, given[4], {})
    assert told == ["line 5 runs alone: no other row is left to share a pass with"]


def test_one_lane_is_a_job_for_each_row(tmp_path: Path) -> None:
    given = rows(tmp_path, {"sampler.seed": 1}, {"sampler.seed": 2, "sampler.steps": 3})
    told: list[str] = []
    assert lane_planner(WORKFLOW, {}, 1, told.append)(given) == single_jobs(given)
    assert told == []


def test_who_runs_alone_is_told_once_for_each_reason(tmp_path: Path) -> None:
    wide = [{"latent.width": 640 + 16 * number} for number in range(2)]
    given = rows(
        tmp_path, {}, {"sampler.seed": 1}, *wide, {"sampler.steps": 4}, {"sampler.steps": 8}
    )
    told: list[str] = []
    jobs = lane_planner(WORKFLOW, {}, 4, told.append)(given)
    assert [len(job.rows) for job in jobs] == [2, 1, 1, 1, 1]
    assert told == [
        "line 3 runs alone: its latent.width is 640, that of line 1 is 832",
        "line 4 runs alone: its latent.width is 656, that of line 1 is 832",
        "line 5 runs alone: its sampler.steps is 4, that of line 1 is 20",
        "line 6 runs alone: its sampler.steps is 8, that of line 1 is 20",
    ]


@pytest.mark.parametrize(
    ("count", "who"),
    [
        (2, "line 1 and line 2 run"),
        (3, "line 1, line 2 and line 3 run"),
        (20, "line 1 and 19 more run"),
    ],
)
def test_many_rows_with_one_reason_are_one_line(tmp_path: Path, count: int, who: str) -> None:
    foreign = {"noise": {"class_type": "RandomNoise", "inputs": {"noise_seed": 0}}}
    given = rows(tmp_path, *({"noise.noise_seed": seed} for seed in range(count)))
    told: list[str] = []
    assert len(lane_planner(foreign, {}, 4, told.append)(given)) == count
    assert told == [
        f"{who} alone: its workflow has no WanStreamSampler, the node whose passes lanes share"
    ]


def test_a_row_that_is_tried_again_by_itself_is_not_told_of(tmp_path: Path) -> None:
    given = rows(tmp_path, {"sampler.seed": 1}, {"sampler.seed": 2})
    told: list[str] = []
    plan = lane_planner(WORKFLOW, {}, 2, told.append)
    assert [len(job.rows) for job in plan(given)] == [2]
    assert plan(given[1:]) == single_jobs(given[1:])
    assert plan([]) == []
    assert told == []
