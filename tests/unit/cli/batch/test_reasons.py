"""Reasons of failed rows: equal ones are merged, over servers and over rows, and hopeless tries are left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import FAILED
from wanstream.cli.batch.backend import RefusedError, WrongInputError
from wanstream.cli.batch.job_queue import merged_reasons
from wanstream.cli.batch.rows import lines_by_reason
from wanstream.tests.faults.comfy_like import State
from wanstream.tests.support.fake_batch import Bench, Server
from wanstream.tests.unit.cli.batch.test_servers import Serve, call_of
from wanstream.tests.unit.cli.batch.test_servers import serve as serve


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
    [([4], "line 4"), ([4, 9], "lines 4, 9"), ([9, 2, 3, 4, 7, 8], "lines 2-4, 7-9"), ([1, 2], "lines 1-2")],
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


class Refusing(Server):
    """Refuses row 3 with an error, and counts how often."""

    def __init__(self, name: str, error: RefusedError) -> None:
        super().__init__(name)
        self._error, self.refused = error, 0

    def post(self, prompt_id: str, prompt: Mapping[str, Any]) -> None:
        if "3" in prompt:
            self.refused += 1
            raise self._error
        super().post(prompt_id, prompt)


@pytest.mark.parametrize(
    ("error", "tries"), [(WrongInputError("99 bigger than 51"), 1), (RefusedError("'x' not in []"), 2)]
)
def test_a_workflow_that_is_wrong_by_itself_is_tried_once(tmp_path: Path, error: RefusedError, tries: int) -> None:
    servers = [Refusing(name, error) for name in "ab"]
    fleet = Bench(tmp_path, *servers, rows=24)
    fleet.run()
    fleet.check(number for number in range(1, 25) if number != 3)
    assert sum(server.refused for server in servers) == tries


def refusal_of(kind: str) -> tuple[int, Any]:
    """The answer of ComfyUI to a workflow with an error of this kind, and with one that is not among the choices."""
    errors = [
        {"type": "value_not_in_list", "message": "Value not in list", "details": "a: 'x' not in []", "extra_info": {}},
        {"type": kind, "message": "wrong", "details": "b", "extra_info": {}},
    ]
    node = {"errors": errors, "dependent_outputs": ["save"], "class_type": "WanStreamSaveVideo"}
    whole = {"type": "prompt_outputs_failed_validation", "message": "", "details": "", "extra_info": {}}
    return 400, {"error": whole, "node_errors": {"save": node}}


@pytest.mark.parametrize(
    ("kind", "tries"),
    [("value_bigger_than_max", 1), ("required_input_missing", 1), ("custom_validation_failed", 2)],
)
def test_a_row_that_comfyui_refuses_is_tried_on_another_server_unless_that_has_to_refuse_it(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tries: int,
) -> None:
    (first, _), (second, _) = serve(), serve()
    answer, refused = State.answer, []

    def refuse(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if route == "/prompt" and body["prompt"]["sampler"]["inputs"]["seed"] in (2, 3, 4, 6):
            refused.append(body)
            return refusal_of(kind)
        return answer(self, route, query, body)

    monkeypatch.setattr(State, "answer", refuse)
    assert main(call_of(tmp_path, first, second)) == FAILED
    assert len(refused) == 4 * tries
    summary = capsys.readouterr().err.splitlines()[-1]
    where = "" if tries == 1 else f"on {' and '.join(sorted((first, second)))}: "
    node = "node save (WanStreamSaveVideo)"
    reason = f"{node}: Value not in list: a: 'x' not in []; {node}: wrong: b"
    assert summary == f"lines 2-4, 6 failed: {where}{reason}"


def test_the_summary_has_ten_reasons_and_the_place_of_the_others(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = serve()
    answer = State.answer

    def refuse(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if route == "/prompt":
            seed = body["prompt"]["sampler"]["inputs"]["seed"]
            return 400, {"error": {"message": f"no {seed}", "details": "all about it\nin two lines"}, "node_errors": {}}
        return answer(self, route, query, body)

    monkeypatch.setattr(State, "answer", refuse)
    assert main(call_of(tmp_path, url, rows=14)) == FAILED
    *_, last, more = capsys.readouterr().err.splitlines()
    assert last == "line 10 failed: no 10: all about it"
    assert more == f"4 more failed: their reasons are above, and in {tmp_path / 'out' / 'journal.sqlite'}"
