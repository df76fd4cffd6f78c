"""Batch options for a folder in memory, with computing replaced."""

import tempfile
from pathlib import Path

import pytest

from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.host.embedded.run import Workflow
from wanstream.tests.faults.replaced import named_models, run_replaced
from wanstream.tests.support.batch.command import WORKFLOWS, Prompt, shipped
from wanstream.tests.support.distributed.local_actor import rows_ended
from wanstream.tests.support.memory_folder import tmp_path

__all__ = ["tmp_path"]


@pytest.fixture
def workflow() -> Prompt:
    return shipped()


@pytest.fixture
def options(tmp_path, workflow, monkeypatch):
    for name in ("temporary", "input"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # Tests use `monkeypatch` too. A context would end first, and `monkeypatch` would then set the
    # replacement again.
    monkeypatch.setattr(Workflow, "run", run_replaced)
    models = named_models(tmp_path / "models", workflow)
    places = {"workflow": WORKFLOWS / "t2v.json", "output": tmp_path / "out"}
    local = LocalOptions(models=models, input=tmp_path / "input")
    given = {"local": local, "actors": ActorOptions(ray="local")}
    with rows_ended():
        yield BatchOptions(jobs=Path("jobs.csv"), **places, **given)
