"""Workers node: widgets, and refusals before anything runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.workers.clusters import VARIABLE
from wanstream.nodes.workers import check_known, workers_inputs, workers_ref
from wanstream.schema import Mesh
from wanstream.schema.refs import PathMap, WorkersRef

AS_IT_IS = {socket.id: socket.as_dict()["default"] for socket in workers_inputs()}


def test_as_it_is_it_names_two_workers_that_the_planner_lays_out() -> None:
    assert workers_ref(gpus=None, **AS_IT_IS) == WorkersRef(count=2)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a cluster list with an entry `lab`."""
    entry = {
        "address": "10.0.0.7:6379",
        "token_file": "/token",
        "remote_machines": True,
        "path_map": ["/a -> /b"],
    }
    (tmp_path / "clusters.json").write_text(json.dumps({"lab": entry}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "clusters.json"))


def test_every_setting_reaches_the_value(lab: None) -> None:
    set_below = {"layout": "manual", "count": 8, "data": 2, "cfg": 2, "ulysses": 2}
    place = {"cluster": "lab", "weights": "sharded"}
    life = {"threads": 3, "max_restarts": 0, "timeout_s": 60.0}
    assert workers_ref(gpus=1, **{**AS_IT_IS, **set_below, **place, **life}) == WorkersRef(
        count=8,
        mesh=Mesh(data=2, cfg=2, ulysses=2),
        address="10.0.0.7:6379",
        token_file="/token",
        weights="sharded",
        paths=(PathMap(here="/a", there="/b"),),
        threads=3,
        beyond_loopback=True,
        max_restarts=0,
        timeout_s=60.0,
    )


def test_degrees_are_read_with_their_layout_only() -> None:
    """Degrees from an earlier manual layout may stay on the node while the planner chooses."""
    ref = workers_ref(gpus=None, **{**AS_IT_IS, "layout": "throughput", "ulysses": 7})
    assert ref == WorkersRef(count=2, goal="throughput")


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({"count": 3}, 2, "3 workers, but 2 GPUs here"),
        ({"layout": "manual", "cfg": 2, "data": 2}, None, "= 4, and there are 2 workers"),
        (
            {"layout": "manual", "ulysses": 3, "count": 3},
            None,
            "ulysses 3 does not divide the 40 attention heads",
        ),
        ({"layout": "manual", "cfg": 3, "count": 3}, None, "cfg is 3"),
        ({"layout": "diagonal"}, None, "choose one of latency, throughput, manual"),
        (
            {"cluster": "next door"},
            None,
            "the cluster is 'next door', and there are local, in-process, lab",
        ),
        ({"cluster": "10.0.0.7:6379"}, None, "the cluster is '10.0.0.7:6379', and there are"),
        (
            {"cluster": {"address": "10.0.0.7:6379"}},
            None,
            "the cluster is {'address': '10.0.0.7:6379'}, and there are",
        ),
        ({"cluster": 7}, None, "the cluster is 7, and there are"),
        ({"cluster": "in-process"}, None, "2 workers in this process"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run_and_in_it(
    lab: None, settings: dict[str, Any], gpus: int | None, said: str
) -> None:
    given = {
        name: value for name, value in {**AS_IT_IS, **settings}.items() if name not in NOT_ASKED
    }
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        check_known(gpus=gpus, **given)
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        workers_ref(gpus=gpus, **{**AS_IT_IS, **settings})


NOT_ASKED = ("weights", "threads", "max_restarts", "timeout_s")


@pytest.mark.parametrize("linked", ["count", "layout", "cluster", "ulysses"])
def test_a_setting_that_another_node_gives_is_judged_when_it_is_known(linked: str) -> None:
    """A linked value is None here, and each one alone could make the rest valid."""
    degrees = {
        "layout": "manual",
        "data": 1,
        "stage": 1,
        "cfg": 1,
        "ring": 1,
        "ulysses": 3,
        "count": 3,
    }
    many = {"cluster": "local", "count": 3}
    given = many if linked == "cluster" else degrees
    with pytest.raises(ValueError, match=r"GPUs here|divide"):
        check_known(gpus=2, **{**many, **given})
    check_known(gpus=None if linked != "cluster" else 2, **{**given, linked: None})


def test_what_is_no_number_is_left_to_the_host() -> None:
    check_known(gpus=2, count="many", ulysses=[])


def test_no_input_of_the_node_is_an_address_a_path_or_leave() -> None:
    assert not {"address", "beyond_loopback", "path_map", "token", "token_file"} & AS_IT_IS.keys()
