"""Malformed workflows and rows for `wanstream run` and `batch`: a clear refusal, no traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.tests.faults.replaced import computing_replaced, named_models

T2V = json.loads(
    (Path(__file__).parents[3] / "workflows" / "api" / "t2v.json").read_text(encoding="utf-8")
)
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1.5,
        float("inf"),
        float("nan"),
        10**400,
        "",
        "x",
        "\ud800",
        "\0",
        "../x",
        [],
        {},
    ),
    *(
        [1, 2, 3],
        ["sampler", 0],
        ["sampler", 0.5],
        ["sampler", float("nan")],
        ["sampler", -9],
        ["sampler", "0"],
    ),
    *(
        [[], 0],
        [{}, 0],
        [None, 0],
        ["nobody", 0],
        {"__value__": []},
        {"__value__": {"__value__": 1}},
        {"a": [{}]},
    ),
]


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def broken(document: Any, chance: random.Random) -> Any:
    """Return a copy with one to three places replaced, removed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 3)):
        place, way = document, []
        while isinstance(place, dict | list) and place and (not way or chance.random() < 0.75):
            key = (
                chance.choice([*place]) if isinstance(place, dict) else chance.randrange(len(place))
            )
            way.append((place, key))
            place = place[key]
        value, kind = chance.choice([*VALUES, deep(150)]), chance.random()
        if not way:
            continue
        parent, key = way[-1]
        if kind < 0.7:
            parent[key] = value
        elif kind < 0.85:
            del parent[key]
        elif isinstance(parent, dict):
            parent[chance.choice(["x", "class_type", "inputs", "_meta", "", "1"])] = value
    return document


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return ["--models", str(named_models(tmp_path / "models", T2V)), "--input", str(tmp_path)]


CLASS_TYPES = [[], {}, ["WanStreamSampler"], 7, True, deep(150)]


@pytest.mark.parametrize("class_type", CLASS_TYPES, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_class_that_is_no_name_is_refused(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    class_type: Any,
) -> None:
    workflow = {**T2V, "sampler": {**T2V["sampler"], "class_type": class_type}}
    assert main(command_line(tmp_path, command, workflow, [{}], files)) == INVALID
    told = capsys.readouterr().err
    assert "node 'sampler'" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("levels", [101, 500, 100_000])
def test_values_that_are_nested_too_deep_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], levels: int
) -> None:
    text = "[" * levels + "0" + "]" * levels
    row = '{"text.positive": ' + text + "}"
    for command in ("run", "batch"):
        workflow = json.dumps(T2V).replace('"seed": 42', f'"seed": {text}')
        assert main(command_line(tmp_path, command, workflow, [{}], files)) == INVALID
    assert (
        main([*command_line(tmp_path, "run", T2V, [{}], files), "--set", f"sampler.seed={text}"])
        == INVALID
    )
    assert main(command_line(tmp_path, "batch", T2V, [row], files)) == INVALID
    assert (
        main(command_line(tmp_path, "batch", T2V, [], files, csv=f'sampler.seed\n"{text}"\n'))
        == INVALID
    )
    told = capsys.readouterr().err
    reasons = ("deep", "recursion", "field larger", "is not a whole number")
    assert sum(map(told.count, reasons)) == 5, "one for each command"
    assert max(map(len, told.splitlines())) < 1000
    assert "Traceback" not in told


@pytest.mark.parametrize("part", range(4))
def test_workflows_and_rows_that_are_broken_at_random_are_refused_or_run(
    files: list[str], tmp_path: Path, part: int
) -> None:
    codes = []
    with computing_replaced():
        for seed in range(part * 30, part * 30 + 30):
            chance = random.Random(seed)
            command = chance.choice(["run", "batch"])
            rows = [{"sampler.seed": seed, "latent.width": 32}]
            whole = command == "batch" and chance.random() < 0.5
            line = command_line(
                tmp_path,
                command,
                T2V if whole else broken(T2V, chance),
                broken(rows, chance) if whole else rows,
                files,
                out=f"out{seed}",
            )
            codes.append(main(line))
    assert set(codes) <= {DONE, FAILED, INVALID}
    assert INVALID in codes


def command_line(
    folder: Path,
    command: str,
    workflow: Any,
    rows: Any,
    files: list[str],
    *,
    csv: str = "",
    out: str = "out",
) -> list[str]:
    text = workflow if isinstance(workflow, str) else json.dumps(workflow)
    (folder / "workflow.json").write_text(text, encoding="utf-8")
    where = ["--out", str(folder / out), *files]
    if command == "run":
        return ["run", str(folder / "workflow.json"), *where]
    jobs = folder / ("jobs.csv" if csv else "jobs.jsonl")
    lines = [
        row if isinstance(row, str) else json.dumps(row)
        for row in (rows if isinstance(rows, list) else [rows])
    ]
    jobs.write_text(csv or "\n".join(lines), encoding="utf-8")
    return ["batch", str(jobs), "--workflow", str(folder / "workflow.json"), *where]
