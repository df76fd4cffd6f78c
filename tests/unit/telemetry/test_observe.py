"""Telemetry options from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanstream.telemetry import TelemetryOptions


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Replace both variables by the values in `environment`."""
    for name in ("WANSTREAM_TRACE", "WANSTREAM_NVTX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environment", [{}, {"WANSTREAM_TRACE": "", "WANSTREAM_NVTX": ""}, {"WANSTREAM_NVTX": "0"}]
)
def test_nothing_is_recorded_by_default(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, environment)
    observe = TelemetryOptions.from_environment()
    assert (observe.trace, observe.nvtx, observe.ledger, observe.dynamic_bytes()) == (
        None,
        False,
        None,
        None,
    )


def test_the_environment_sets_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {"WANSTREAM_TRACE": str(tmp_path), "WANSTREAM_NVTX": "1"})
    observe = TelemetryOptions.from_environment()
    assert (observe.trace, observe.nvtx) == (tmp_path, True)


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_any_other_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {"WANSTREAM_NVTX": value})
    with pytest.raises(
        ValueError, match=f"WANSTREAM_NVTX is '{value}': set it to 1 for ranges, or to 0"
    ):
        TelemetryOptions.from_environment()
