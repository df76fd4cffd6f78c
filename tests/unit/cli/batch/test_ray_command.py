"""`wanstream batch --ray` on actors in this process: notes, and each actor's rows at the end."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch.row_service import RowService
from wanstream.host.embedded.run import Workflow
from wanstream.schema.refs import WorkersRef
from wanstream.tests.faults.replaced import named_models, run_replaced
from wanstream.tests.support.local_actor import LocalActor, rows_ended

T2V = Path(__file__).parents[4] / "workflows" / "api" / "t2v.json"
ON_TWO = ("--ray", "--device", "cpu", "--workers", "2")


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int]]:
    """`batch(rows)` runs a batch with as many rows on two actors, and returns the exit code."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(Workflow, "run", run_replaced)
    monkeypatch.setattr(ray_backend, "check_ray", lambda ref: None)

    @contextmanager
    def open_services(
        _: WorkersRef, service: Any, *, device: str, count: int, paths: Any
    ) -> Iterator[Any]:
        assert device == "cpu"
        yield (
            [
                LocalActor(lambda: RowService(device, count, **service[1]), rank)
                for rank in range(count)
            ],
            None,
        )

    monkeypatch.setattr(ray_backend, "open_services", open_services)
    models = named_models(tmp_path / "models", json.loads(T2V.read_text(encoding="utf-8")))

    def run(rows: int) -> int:
        lines = [json.dumps({"sampler.seed": number}) for number in range(rows)]
        (tmp_path / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        folders = [
            "--out",
            str(tmp_path / "out"),
            "--models",
            str(models),
            "--input",
            str(tmp_path),
        ]
        return main(
            ["batch", str(tmp_path / "jobs.jsonl"), "--workflow", str(T2V), *folders, *ON_TWO]
        )

    with rows_ended():
        yield run


def test_the_summary_has_the_rows_of_each_actor_and_those_of_earlier_commands(
    batch: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def counts() -> dict[str, int]:
        first, *lines = capsys.readouterr().out.splitlines()
        assert "rows are done in" in first
        return {name: int(count.split()[0]) for name, count in (line.split(": ") for line in lines)}

    assert batch(6) == DONE
    made = counts()
    assert (made.keys(), sum(made.values())) == ({"actor 0", "actor 1"}, 6)
    assert batch(8) == DONE
    made = counts()
    assert made.pop("earlier commands") == 6
    assert (made.keys(), sum(made.values())) == ({"actor 0", "actor 1"}, 2)


def test_the_start_and_the_end_of_the_actors_are_noted(
    batch: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(1) == DONE
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("starting Ray and 2 actors", "ending the actors")


@pytest.mark.parametrize(
    ("workers", "gpus", "address", "note"),
    [
        (None, 4, "local", "starting Ray and 4 actors"),
        (1, 4, "local", "starting Ray and 1 actor"),
        (None, 4, "10.0.0.1:6379", "starting the actors on the Ray cluster at 10.0.0.1:6379"),
        (3, 0, "10.0.0.1:6379", "starting 3 actors on the Ray cluster at 10.0.0.1:6379"),
    ],
)
def test_the_note_has_the_number_of_actors_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, gpus: int, address: str, note: str
) -> None:
    monkeypatch.setattr(ray_backend, "gpu_count", lambda: gpus)
    assert ray_backend.note_of_start(workers, address) == note
