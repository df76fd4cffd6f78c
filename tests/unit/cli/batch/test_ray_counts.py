"""Checks on --ray and --workers before Ray starts: the entry, and the number of local actors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import INVALID, ArgumentError
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch.ray_backend import check_local
from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.host.workers.clusters import VARIABLE

WORKFLOW = Path(__file__).parents[4] / "workflows" / "api" / "t2v.json"


def options(device: str | None, workers: int | None) -> BatchOptions:
    return BatchOptions(
        jobs=Path(),
        workflow=Path(),
        output=Path(),
        actors=ActorOptions(ray="local", workers=workers),
        local=LocalOptions(device=device),
    )


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "cores", "message"),
    [
        (
            "cpu",
            50,
            0,
            2,
            "--workers 50: each actor on a CPU needs a core, and there are 2: give --workers 2 at "
            "most",
        ),
        ("cpu", 9, 8, 8, "give --workers 8 at most"),
        ("cpu", 3, 0, 1, "give --workers 2 at most"),
        (
            None,
            None,
            0,
            2,
            "--ray: this machine has no GPU .* try it out on CPUs (--device cpu --workers N)",
        ),
        ("cuda", 2, 0, 2, "--ray: this machine has no GPU"),
        (
            None,
            3,
            2,
            64,
            "--workers 3: each actor takes a GPU, and this machine has 2: give --workers 2 at most",
        ),
    ],
)
def test_more_actors_than_this_machine_can_have_are_refused(
    device: str | None, workers: int | None, gpus: int, cores: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message).replace(r"\.\*", ".*")):
        check_local(options(device, workers), gpus=gpus, cores=cores)


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "cores"),
    [("cpu", 2, 0, 2), ("cpu", 2, 0, 1), (None, None, 1, 1), (None, 2, 2, 1), ("cuda", 1, 8, 4)],
)
def test_as_many_actors_as_there_are_gpus_or_cores_are_accepted(
    device: str | None, workers: int | None, gpus: int, cores: int
) -> None:
    check_local(options(device, workers), gpus=gpus, cores=cores)


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """`refused(*arguments)` runs a batch refused before Ray starts, and returns the message."""
    monkeypatch.setattr(ray_backend, "check_ray", lambda ref: None)
    monkeypatch.setattr(
        ray_backend, "open_services", lambda *_, **__: pytest.fail("Ray is started")
    )
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"sampler.seed": 1}), encoding="utf-8")
    batch = [
        "batch",
        str(tmp_path / "jobs.jsonl"),
        "--workflow",
        str(WORKFLOW),
        "--out",
        str(tmp_path / "out"),
    ]

    def message(*arguments: str) -> str:
        assert (
            main([*batch, "--models", str(tmp_path), "--input", str(tmp_path), *arguments])
            == INVALID
        )
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return message


def test_too_many_actors_are_refused_before_ray_starts(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "core_count", lambda: 4)
    assert refused("--ray", "--device", "cpu", "--workers", "5") == (
        "--workers 5: each actor on a CPU needs a core, and there are 4: give --workers 4 at most\n"
    )


def test_this_process_is_not_a_choice_for_actors(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "clusters.json"
    listed.write_text(json.dumps({"rack": {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(listed))
    assert "the cluster is 'lab', and there are local, rack: choose one of them" in refused(
        "--ray", "lab"
    )
