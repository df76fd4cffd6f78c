"""Reasons for failed rows: equal ones are merged, over servers and over rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.rows.rows import lines_by_reason
from wanstream.batch.running.failures import (
    merged_reasons,
)
from wanstream.cli import main
from wanstream.cli.arguments import FAILED
from wanstream.tests.faults.comfy_like import State
from wanstream.tests.support.fake_batch import Bench, Server
from wanstream.tests.unit.batch.test_servers import Serve, call_of
from wanstream.tests.unit.batch.test_servers import serve as serve


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ({"a": "x"}, "on a: x"),
        ({"b": "x", "a": "x"}, "on a and b: x"),
        ({"a": "x", "b": "y"}, "on a: x; on b: y"),
    ],
)
def test_equal_reasons_of_servers_are_merged(reasons: dict[str, str], text: str) -> None:
    assert merged_reasons(reasons) == text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([4], "line 4"),
        ([4, 9], "lines 4, 9"),
        ([9, 2, 3, 4, 7, 8], "lines 2-4, 7-9"),
        ([1, 2], "lines 1-2"),
    ],
)
def test_lines_with_one_reason_are_listed_as_ranges(lines: list[int], text: str) -> None:
    assert lines_by_reason((line, "x") for line in lines) == {"x": (len(lines), text)}


def test_a_row_that_fails_everywhere_for_one_reason_has_it_once(tmp_path: Path) -> None:
    servers = [Server(name) for name in "ab"]
    for server in servers:
        server.bad = lambda prompt: "too big" if "5" in prompt else None
    fleet = Bench(tmp_path, *servers, rows=24)
    fleet.run()
    (failed,) = [told for told in fleet.reporter.told if told.startswith("failed")]
    assert failed == "failed 5: on http://a and http://b: too big"


REFUSAL = {
    "error": {
        "type": "prompt_outputs_failed_validation",
        "message": "",
        "details": "",
        "extra_info": {},
    },
    "node_errors": {
        "save": {
            "errors": [
                {
                    "type": "value_bigger_than_max",
                    "message": "too big",
                    "details": "crf",
                    "extra_info": {},
                }
            ],
            "dependent_outputs": ["save"],
            "class_type": "WanStreamSaveVideo",
        }
    },
}
"""ComfyUI's response to a workflow with a number out of range."""


def test_rows_that_all_servers_refuse_have_one_line_in_the_summary(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, _), (second, _) = serve(), serve()
    answer, refused = State.answer, []

    def refuse(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if route == "/prompt" and body["prompt"]["sampler"]["inputs"]["seed"] in (2, 3, 4, 6):
            refused.append(body)
            return 400, REFUSAL
        return answer(self, route, query, body)

    monkeypatch.setattr(State, "answer", refuse)
    assert main(call_of(tmp_path, first, second)) == FAILED
    assert len(refused) == 4 * 2, "each on both: another version of a node may have another range"
    summary = capsys.readouterr().err.splitlines()[-1]
    where = " and ".join(sorted((first, second)))
    assert (
        summary == f"lines 2-4, 6 failed: on {where}: node save (WanStreamSaveVideo): too big: crf"
    )


def test_the_summary_has_ten_reasons_and_the_place_of_the_others(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _ = serve()
    answer = State.answer

    def refuse(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if route == "/prompt":
            seed = body["prompt"]["sampler"]["inputs"]["seed"]
            return 400, {
                "error": {"message": f"no {seed}", "details": "all about it\nin two lines"},
                "node_errors": {},
            }
        return answer(self, route, query, body)

    monkeypatch.setattr(State, "answer", refuse)
    assert main(call_of(tmp_path, url, rows=14)) == FAILED
    *_, last, more = capsys.readouterr().err.splitlines()
    assert last == "line 10 failed: no 10: all about it"
    assert (
        more
        == f"4 more failed: their reasons are above, and in {tmp_path / 'out' / 'journal.sqlite'}"
    )
