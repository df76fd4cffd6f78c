"""Batch actors after Ray has ended."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.errors import (
    UnreachableError,
)
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch.ray_backend import (
    RayBackend,
    RayEndedError,
)
from wanstream.cli.options import BatchOptions, LocalOptions
from wanstream.tests.support.local_actor import LocalActor, local_backend, row_service

ENDED = r"^Ray has ended on this machine: run the same command again to go on$"


@pytest.fixture
def actor(tmp_path: Path) -> LocalActor:
    return LocalActor(row_service(options(tmp_path), tmp_path / "out"))


def options(folder: Path) -> BatchOptions:
    return BatchOptions(
        jobs=Path(),
        workflow=Path(),
        output=folder / "out",
        local=LocalOptions(models=folder, input=folder),
    )


@pytest.fixture
def backend(actor: LocalActor, tmp_path: Path) -> RayBackend:
    return local_backend(actor, options(tmp_path))


def test_the_loss_of_an_actor_ends_the_batch_if_its_ray_has_ended(
    actor: LocalActor, backend: RayBackend
) -> None:
    actor.kill()
    with pytest.raises(UnreachableError, match="Ray starts it again where a slot is free"):
        backend.outcome("row")
    actor.without_ray = True
    with pytest.raises(RayEndedError, match=ENDED) as raised:
        backend.outcome("row")
    assert not isinstance(raised.value, UnreachableError), "which the batch would wait out"


def test_an_actor_that_is_not_started_again_ends_the_batch_if_its_ray_has_ended(
    actor: LocalActor, backend: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "LIMIT_S", 0.01)
    actor.kill()
    with pytest.raises(UnreachableError):
        backend.outcome("row")

    def silent(*_: Any) -> Future[Any]:
        return Future()

    monkeypatch.setattr(actor, "call", silent)
    with pytest.raises(UnreachableError, match="has not answered within"):
        backend.outcome("row")
    actor.without_ray = True
    with pytest.raises(RayEndedError, match=ENDED):
        backend.outcome("row")
