"""`wanstream batch --ray` on actors in this process: notes, rows of each actor, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch.row_service import RowService
from wanstream.cli.options import BatchOptions
from wanstream.host.workers.clusters import VARIABLE
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.batch.command import command_line, shipped
from wanstream.tests.support.distributed.local_actor import LocalActor

Batch = Callable[..., int]


@contextmanager
def open_services(
    _: WorkersRef, service: Any, *, device: str, count: int, paths: Any
) -> Iterator[Any]:
    assert device == "cpu"
    actors = [
        LocalActor(lambda: RowService(device, count, **service[1]), rank) for rank in range(count)
    ]
    yield actors, None


@pytest.fixture
def batch(options: BatchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """`batch(rows, *options)` runs a batch with as many rows, and returns the exit code."""
    monkeypatch.setattr(ray_backend, "check_ray", lambda ref: None)
    monkeypatch.setattr(ray_backend, "open_services", open_services)
    places = ["--models", options.local.models, "--input", tmp_path]

    def run(count: int, *more: str) -> int:
        rows = [{"sampler.seed": number} for number in range(count)]
        return main(command_line(tmp_path, shipped(), *rows, options=[*places, *more]))

    return run


def test_summary_has_the_rows_of_each_actor_and_command(batch, capsys):
    for rows, expected in ((6, {}), (8, {"earlier commands": 6})):
        assert batch(rows, "--ray", "--device", "cpu", "--workers", "2") == DONE
        printed = capsys.readouterr()
        notes = printed.err.splitlines()
        assert (notes[0], notes[-1]) == ("starting Ray and 2 actors", "ending the actors")
        first, *lines = printed.out.splitlines()
        assert "rows are done in" in first
        words = (line.split(": ") for line in lines)
        counts = {name: int(count.split()[0]) for name, count in words}
        assert counts.keys() == {"actor 0", "actor 1", *expected}
        assert sum(counts.values()) == rows
        assert counts.items() >= expected.items()


TOO_MANY = "--workers 5: each actor on a CPU needs a core, and there are 4: give --workers 4 at"
NO_CLUSTER = "the cluster is 'lab', and there are local, rack: choose one of them"


@pytest.mark.parametrize(
    ("given", "message"),
    [("--ray --device cpu --workers 5", TOO_MANY), ("--ray lab", NO_CLUSTER)],
)
def test_wrong_actors_are_refused_before_ray_starts(
    batch, given, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        ray_backend, "open_services", lambda *_, **__: pytest.fail("Ray is started")
    )
    monkeypatch.setattr(ray_backend, "core_count", lambda: 4)
    listed = tmp_path / "clusters.json"
    listed.write_text(json.dumps({"rack": {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(listed))
    assert batch(1, *given.split()) == INVALID
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
