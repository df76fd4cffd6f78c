"""Requests for the step cache tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wanstream.sampling.inputs import DenoiseRequest


@pytest.fixture
def make_eight_steps(make_request: Callable[..., DenoiseRequest]) -> Callable[..., DenoiseRequest]:
    """`make_eight_steps(**changes)`: a request with 8 steps, the first 4 high-noise."""
    return lambda **changes: make_request(**{"steps": 8, "switch_step": 4, **changes})
