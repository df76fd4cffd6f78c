"""Scenarios of the engine, in several orders of execution."""

from __future__ import annotations

import pytest

from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.device_scenarios import SCENARIOS


# On the checked device the name of a test is its seed.
@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_visit_finds_its_block(gpu: Accelerator, name: str, order: int) -> None:
    SCENARIOS[name](gpu)
