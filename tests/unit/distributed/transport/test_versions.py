"""Version check between driver and workers."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from wanstream.distributed.messages import WorkerFacts
from wanstream.distributed.ray.actor import FOLDER
from wanstream.distributed.ray.pool import RayPool, VersionsError, check_versions, series
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.schema.version import VERSION

LIMIT_S = 120
STORE_BYTES = 128 << 20

DRIVER = WorkerFacts(
    pid=1,
    node="desk",
    address="127.0.0.1",
    device="cpu",
    versions={
        "WanStream": "0.1.0",
        "torch": "2.13.0+cu130",
        "diffusers": "0.39.0",
        "Python": "3.11.7",
    },
)


def a_worker(node: str = "rack", **versions: str) -> WorkerFacts:
    return replace(DRIVER, node=node, versions={**DRIVER.versions, **versions})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.13.1"},
        {"torch": "2.13.0+cpu"},
        {"diffusers": "0.39.2"},
        {"Python": "3.11.9"},
    ],
)
def test_what_differs_behind_the_second_number_fits(changes: dict[str, str]) -> None:
    check_versions(DRIVER.versions, [DRIVER, a_worker(**changes)])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"WanStream": "0.1.1"},
            "worker 1 on rack has WanStream 0.1.1, the driver on desk has WanStream 0.1.0: install "
            "the same versions",
        ),
        (
            {"torch": "2.12.0+cu130"},
            "has torch 2.12.0+cu130, the driver on desk has torch 2.13.0+cu130",
        ),
        ({"torch": "3.13.0"}, "torch 3.13.0"),
        ({"diffusers": "0.38.0"}, "diffusers 0.38.0, the driver on desk has diffusers 0.39.0"),
        ({"diffusers": "0.390.0"}, "diffusers 0.390.0"),
        ({"Python": "3.12.1"}, "Python 3.12.1, the driver on desk has Python 3.11.7"),
    ],
)
def test_other_versions_are_refused_by_name(
    changes: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "desk")
    with pytest.raises(VersionsError) as refused:
        check_versions(DRIVER.versions, [DRIVER, a_worker(**changes)])
    assert told in str(refused.value)


def test_every_difference_is_told() -> None:
    other = a_worker(torch="2.9.0", diffusers="0.36.0")
    with pytest.raises(VersionsError) as refused:
        check_versions(DRIVER.versions, [other, DRIVER, other])
    assert str(refused.value).count("worker 0") == str(refused.value).count("worker 2") == 2
    assert "worker 1" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "first_two"),
    [("2.13.1+cu130", "2.13"), ("0.39.0.dev0", "0.39"), ("3.11", "3.11"), ("main", "main")],
)
def test_the_series_of_a_version(version: str, first_two: str) -> None:
    assert series(version) == first_two


@pytest.mark.slow
def test_a_worker_that_starts_with_another_wanstream_is_refused_and_ended(tmp_path: Path) -> None:
    """The worker's code comes from the path map, as on another machine."""
    pytest.importorskip("ray")
    there = tmp_path / "wanstream"
    there.mkdir()
    for part in (
        "__init__.py",
        "plan",
        "devices",
        "telemetry",
        "offload",
        "wan",
        "sampling",
        "distributed",
    ):
        (there / part).symlink_to(FOLDER / part)
    shutil.copytree(FOLDER / "schema", there / "schema")
    (there / "schema" / "version.py").write_text('VERSION = "0.0.1"\n', encoding="utf-8")
    ref = WorkersRef(count=1, threads=1, paths=(PathMap(here=str(FOLDER), there=str(there)),))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(
        VersionsError,
        match=rf"worker 0 on .* has WanStream 0\.0\.1, the driver on .* {VERSION}: inst",
    ):
        RayPool(ref, "cpu", store_bytes=STORE_BYTES)
    started = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before
    ]
    _, left = psutil.wait_procs(started, timeout=LIMIT_S)
    assert left == []
