"""Malformed workflows and rows for `wanstream run` and `batch`: a clear refusal, no traceback."""

import json
import random
from pathlib import Path

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.tests.faults.replaced import computing_replaced, named_models
from wanstream.tests.support.batch.command import command_line, shipped

T2V = shipped()


def deep(levels):
    return [deep(levels - 1)] if levels else 0


PLAIN = [None, True, -1, 0, 1.5, float("inf"), float("nan"), 10**400, [], {}, {"a": [{}]}]
TEXTS = ["", "x", "\ud800", "\0", "../x"]
LINKS = [["sampler", number] for number in (0, 0.5, float("nan"), -9, "0")]
LINKS += [[target, 0] for target in ([], {}, None, "nobody")]
VALUES = [*PLAIN, *TEXTS, *LINKS, [1, 2, 3], {"__value__": []}, deep(150)]
VALUES += [{"__value__": {"__value__": 1}}]


def broken(document, chance):
    """Return a copy with one to three places replaced, removed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 3)):
        place = document
        way = []
        while isinstance(place, dict | list) and place and (not way or chance.random() < 0.75):
            keys = [*place] if isinstance(place, dict) else range(len(place))
            key = chance.choice(keys)
            way.append((place, key))
            place = place[key]
        value = chance.choice(VALUES)
        kind = chance.random()
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
def command(tmp_path):
    """`command("run" | "batch", workflow, rows, *options)`: write the files and run the command."""
    files = ["--models", str(named_models(tmp_path / "models", T2V)), "--input", str(tmp_path)]

    def run(name, workflow, rows=({},), *more, csv=""):
        lines = rows if isinstance(rows, list | tuple) else [rows]
        line = command_line(tmp_path, workflow, *lines, options=[*files, *more])
        prompt = tmp_path / "workflow.json"
        if isinstance(workflow, str):
            prompt.write_text(workflow, encoding="utf-8")
        if csv:
            line[1] = str(tmp_path / "jobs.csv")
            Path(line[1]).write_text(csv, encoding="utf-8")
        out = f"{tmp_path / 'out'}{len([*tmp_path.iterdir()])}"
        if name == "run":
            return main(["run", str(prompt), "--out", out, *files, *more])
        return main([*line, "--out", out])

    return run


@pytest.mark.parametrize("class_type", [[], {}, ["WanStreamSampler"], 7, True, deep(150)], ids=type)
@pytest.mark.parametrize("name", ["run", "batch"])
def test_class_that_is_no_name_is_refused(command, capsys, name, class_type):
    workflow = {**T2V, "sampler": {**T2V["sampler"], "class_type": class_type}}
    assert command(name, workflow) == INVALID
    told = capsys.readouterr().err
    assert "node 'sampler'" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("levels", [101, 500, 100_000])
def test_values_that_are_nested_too_deep_are_refused(command, capsys, levels):
    text = "[" * levels + "0" + "]" * levels
    workflow = json.dumps(T2V).replace('"seed": 42', f'"seed": {text}')
    codes = [command(name, workflow) for name in ("run", "batch")]
    codes += [command("run", T2V, (), "--set", f"sampler.seed={text}")]
    codes += [command("batch", T2V, ['{"text.positive": ' + text + "}"])]
    codes += [command("batch", T2V, csv=f'sampler.seed\n"{text}"\n')]
    assert codes == [INVALID] * 5
    told = capsys.readouterr().err
    reasons = ("deep", "recursion", "field larger", "is not a whole number")
    assert sum(map(told.count, reasons)) == 5, "one for each command"
    assert max(map(len, told.splitlines())) < 1000
    assert "Traceback" not in told


def test_randomly_broken_workflows_are_refused_or_run(command):
    codes = []
    with computing_replaced():
        for seed in range(50):
            chance = random.Random(seed)
            name = chance.choice(["run", "batch"])
            rows = [{"sampler.seed": seed, "latent.width": 32}]
            if name == "batch" and chance.random() < 0.5:
                codes.append(command(name, T2V, broken(rows, chance)))
            else:
                codes.append(command(name, broken(T2V, chance), rows))
    assert set(codes) <= {DONE, FAILED, INVALID}
    assert INVALID in codes
