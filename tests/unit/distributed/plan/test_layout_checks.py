"""Layouts suited to a run, and refused ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanstream.distributed import check_layout
from wanstream.schema import Mesh, MeshError
from wanstream.shapes import HEAD_DIM, T2V_A14B, StepShape
from wanstream.tests.support.plan_fixtures import run_shape

BOTH_GUIDED = {"high": 2, "low": 2}
ONE_SIDE = {"high": 1, "low": 1}


def tokens(count: int, *extra: int) -> dict[str, Any]:
    return {"tokens": count, "extra_tokens": extra}


USUAL: dict[str, Any] = {"tokens": 32_760, "sides": BOTH_GUIDED, "samples": 1}
EXPERTS = ("high",) * 10 + ("low",) * 10


def _check(mesh: Mesh, *, heads: int = 40, experts: Any = EXPERTS, **changes: Any) -> Any:
    expert = replace(T2V_A14B, width=heads * HEAD_DIM)
    steps = [StepShape(expert=name) for name in experts]
    given = {**USUAL, **changes}
    samples = given.pop("samples")
    return check_layout(mesh, run_shape(expert=expert, steps=steps, **given), samples)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (Mesh(), {}),
        (Mesh(ulysses=8), {"tokens": 32_763}),
        (Mesh(cfg=2, ulysses=2), {"tokens": 2_809}),
        (Mesh(cfg=2, ulysses=4), {}),
        (Mesh(ring=2, ulysses=8), {"tokens": 75_600}),
        (Mesh(data=4, stage=2), {"samples": 8}),
        (Mesh(ring=3), {"heads": 1}),
        (Mesh(ring=3), tokens(30, 18, 15)),
        (Mesh(ulysses=2), tokens(30, 15, 15)),
    ],
)
def test_a_mesh_that_keeps_every_worker_busy_has_no_warnings(mesh, changes):
    assert _check(mesh, **changes) == ()


REFS = "2809 of them belong to sources and references: give every reference a side of a multiple"


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (Mesh(ulysses=3), {}, "ulysses 3 does not divide 40 heads: 2, 4, 5, 8, 10 do"),
        (Mesh(ulysses=2), {"heads": 1}, "ulysses 2 does not divide 1 heads: only 1 does"),
        (Mesh(ring=2, ulysses=8), {}, "= 16 does not divide 32760 tokens: 2, 3, .*, 14, 15 do"),
        (Mesh(ring=2), {"tokens": 7}, "ring 2 x ulysses 1 = 2 does not divide 7 tokens: 7 does$"),
        (Mesh(ulysses=8), {"tokens": 7}, "ulysses 8 does not divide 7 tokens: 7 does$"),
        (Mesh(ring=2), tokens(32_760 + 53 * 53, 53 * 53), f"divide 35569 tokens: .*; {REFS}"),
        (Mesh(ring=2), tokens(30, 18, 15), r"30 .* \(positive\) and 27 .*: 3 does; 18 and 15 of"),
        (Mesh(ring=2), tokens(30, 15, 0, 15), r"and 15 \(without context\): 3, 5, 15 do$"),
        (Mesh(ring=2), tokens(31, 4), "= 2 does not divide 31 tokens: only 1 does$"),
        (Mesh(cfg=2), {"sides": ONE_SIDE}, "guidance is 1 under every expert, so each step has"),
        (Mesh(stage=2), {"experts": ("high",), "samples": 9}, "stage 2 for 1 step: "),
        (Mesh(data=2, cfg=2), {}, "one video is made: 2 of 4 workers would be idle; use data 1"),
    ],
)
def test_a_mesh_that_cannot_run_is_refused_with_a_remedy(mesh, changes, message):
    with pytest.raises(MeshError, match=message):
        _check(mesh, **changes)


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        (Mesh(data=4), {"samples": 3}, "data 4 for 3 videos: 1 of 4 rows of workers are idle"),
        (Mesh(stage=2), {}, "stage 2 x data 1 for 1 video: at most 1 of 2 groups work at a time"),
        (Mesh(cfg=2), {"sides": {"high": 2, "low": 1}}, "cfg 2: the low expert has one lane, so"),
    ],
)
def test_idle_workers_are_reported(mesh, changes, words):
    (said,) = _check(mesh, **changes)
    assert said.startswith(words)
