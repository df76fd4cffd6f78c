"""Telemetry options from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanstream.telemetry import TelemetryOptions
from wanstream.telemetry.phases import QueueItemPhases


@pytest.mark.parametrize("environment", [{}, {"WANSTREAM_TRACE": "", "WANSTREAM_NVTX": ""}, {"WANSTREAM_NVTX": "0"}])
def test_nothing_is_recorded_by_default(environment: dict[str, str]) -> None:
    observe = TelemetryOptions.from_environment(environment)
    assert (observe.trace, observe.nvtx, observe.ledger, observe.dynamic_bytes()) == (None, False, None, None)


def test_the_environment_sets_the_options(tmp_path: Path) -> None:
    ledger = QueueItemPhases()
    environment = {"WANSTREAM_TRACE": str(tmp_path), "WANSTREAM_NVTX": "1"}
    observe = TelemetryOptions.from_environment(environment, ledger=ledger, dynamic_bytes=lambda: 5)
    assert (observe.trace, observe.nvtx, observe.ledger, observe.dynamic_bytes()) == (tmp_path, True, ledger, 5)


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_any_other_value_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"WANSTREAM_NVTX is '{value}': set it to 1 for ranges, or to 0"):
        TelemetryOptions.from_environment({"WANSTREAM_NVTX": value})
