"""Batch options for a folder in memory, with computing replaced."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.host.embedded.run import Workflow
from wanstream.tests.faults.replaced import named_models, run_replaced
from wanstream.tests.support.distributed.local_actor import rows_ended
from wanstream.tests.support.memory_folder import tmp_path

__all__ = ["tmp_path"]

T2V = Path(__file__).parents[4] / "workflows" / "api" / "t2v.json"


@pytest.fixture
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(T2V.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture
def options(
    tmp_path: Path, workflow: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[BatchOptions]:
    for name in ("temporary", "input"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # Tests use `monkeypatch` too. A context would end first, and `monkeypatch` would then set the
    # replacement again.
    monkeypatch.setattr(Workflow, "run", run_replaced)
    models = named_models(tmp_path / "models", workflow)
    with rows_ended():
        yield BatchOptions(
            jobs=Path("jobs.csv"),
            workflow=T2V,
            output=tmp_path / "out",
            local=LocalOptions(models=models, input=tmp_path / "input"),
            actors=ActorOptions(ray="local"),
        )
