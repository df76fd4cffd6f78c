"""A machine keeps its figures through JSON and refuses impossible ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from wanstream.plan import Machine

Rated = Callable[..., Machine]


def test_json_keeps_a_machine(rate_machine: Rated, rate_cpu: Rated) -> None:
    for machine in (rate_machine(), rate_cpu()):
        assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


def test_speed_ups_are_kept_and_may_be_missing(rate_machine: Rated) -> None:
    machine = rate_machine(linear_speedups={"int8": 3.0})
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert [machine.block.linear_speedup(name) for name in ("int8", "fp8", "")] == [3.0, 1.0, 1.0]
    stored_before = {
        name: value for name, value in machine.to_dict().items() if name != "linear_speedups"
    }
    assert Machine.from_dict(stored_before) == rate_machine()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_speedups": {"int8": 0.0}},
            "linear_speedups of int8 of test is 0.0, it must be a number above 0",
        ),
        ({"linear_speedups": {"int4": 2.0}}, "linear_speedups of test has 'int4', choose from"),
        ({"linear_speedups": 2.0}, "not a machine: linear_speedups is 2.0"),
        ({"computes_on": "tpu"}, "computes_on is 'tpu'"),
        ({"vram_bytes": 0}, "vram_bytes of test is 0, it must be a number above 0"),
        ({"h2d_bytes_per_s": None}, "h2d_bytes_per_s of test is None"),
        ({"disk_bytes_per_s": None}, "disk_bytes_per_s of test is None"),
        ({"disk_bytes_per_s": 0.0}, "disk_bytes_per_s of test is 0.0"),
        ({"flops_per_s": -1.0}, "flops_per_s of test is -1.0"),
        ({"flops_per_s": math.nan}, "flops_per_s of test is nan"),
        ({"flops_per_s": math.inf}, "flops_per_s of test is inf"),
        ({"ram_bytes": "32 GB"}, "ram_bytes of test is '32 GB'"),
        ({"ram_bytes": True}, "ram_bytes of test is True"),
    ],
)
def test_figures_that_cannot_be(rate_machine: Rated, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine.from_dict({**rate_machine().to_dict(), **changes})


@pytest.mark.parametrize("change", [{"speed": 1.0}, {"name": 5}, {"origin": None}])
def test_invalid_machines_are_refused(rate_machine: Rated, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a machine"):
        Machine.from_dict({**rate_machine().to_dict(), **change})
    with pytest.raises(ValueError, match="not a machine"):
        Machine.from_dict({"name": "x"})
