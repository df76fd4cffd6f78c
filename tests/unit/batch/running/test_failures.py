"""Failures of a row on several servers: who tries it again, and the merged reasons."""

from __future__ import annotations

import pytest

from wanstream.batch.running.failures import MAX_LOSSES, FailureLog, merged_reasons


def log_of(losses: str, failures: str) -> FailureLog:
    """Return the log after losses and failures of the row by these servers."""
    log = FailureLog("abc")
    for name in losses:
        log.lose(name, "row", "")
    for name in failures:
        log.fail(name, "row", "x")
    return log


@pytest.mark.parametrize(
    ("losses", "failures", "alive", "suits"),
    [
        ("", "", "ab", True),
        ("a", "", "ab", False),
        ("a", "", "a", True),
        ("a", "", "", True),
        ("ab", "", "ab", True),
        ("b", "", "ab", True),
        ("", "a", "ab", False),
        ("b", "a", "ab", True),
    ],
)
def test_a_row_goes_to_the_server_that_failed_it_least(losses, failures, alive, suits):
    assert log_of(losses, failures).suits("a", "row", alive) == suits


@pytest.mark.parametrize(
    ("failures", "alive", "retry"),
    [("", "ab", True), ("", "a", False), ("a", "ab", True), ("b", "abc", False)],
)
def test_a_failed_row_is_tried_on_one_more_server(failures, alive, retry):
    assert log_of("", failures).retries("a", "row", alive) == retry


def test_losses_on_all_servers_count_together():
    log = log_of("a" * (MAX_LOSSES - 2), "")
    lost = [log.lose("b", "row", "no device") for _ in range(2)]
    assert lost == ["", "lost 5 times while running: no device"]


def test_equal_reasons_of_servers_are_merged():
    assert merged_reasons({"a": "x"}) == "on a: x"
    assert merged_reasons({"b": "x", "a": "x"}) == "on a and b: x"
    assert merged_reasons({"a": "x", "b": "y"}) == "on a: x; on b: y"
