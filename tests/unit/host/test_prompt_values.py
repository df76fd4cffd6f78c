"""Constants in workflows for a ComfyUI server."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from wanstream.host import io
from wanstream.host.comfy.adapter.prompt_values import PromptValues
from wanstream.host.error_names import name_errors_of
from wanstream.host.input_values import InputValueError, RefusedValue


class Node(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Node",
            inputs=[
                io.Int.Input("steps"),
                io.Float.Input("shift"),
                io.Boolean.Input("noise", optional=True),
                io.Combo.Input("file", options=["wan22/high.sft"]),
                io.String.Input("text"),
                io.Latent.Input("latent"),
            ],
        )


def checked(**inputs: Any) -> dict[str, Any]:
    request = {"prompt": {"1": {"class_type": "Node", "inputs": inputs}}, "client_id": "x"}
    check = PromptValues(
        [Node], lambda name, choices: "wan22/high.sft" if name == "link/high.sft" else name
    )
    assert check(request) is request
    return inputs


REFUSED = [
    *(("noise", value) for value in ("disable", "false", "", None, 2, {"__value__": "enable"})),
    *(("steps", value) for value in (64.7, True, None, "many", float("nan"))),
    *(("shift", value) for value in (float("nan"), float("inf"), "nan", True)),
    *(("text", value) for value in (True, {"text": "a cat"}, {"__value__": False})),
]
KEPT = [
    ("noise", True),
    ("noise", 0),
    ("steps", 4.0),
    ("steps", "4"),
    ("shift", 3),
    ("latent", ["2", 0]),
    ("text", ""),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_refused_constant_has_no_value_but_a_reason(name: str, value: Any) -> None:
    found = checked(**{name: value})[name]
    convert = {"noise": bool, "steps": int, "shift": float, "text": str}[name]
    with pytest.raises(InputValueError, match=r"is not .*: write"):
        convert(found)
    assert json.loads(json.dumps(copy.deepcopy(found))) == f"{found}", (
        "ComfyUI returns it in its message"
    )


@pytest.mark.parametrize(("name", "value"), KEPT)
def test_other_constants_stay(name: str, value: Any) -> None:
    assert checked(**{name: value}) == {name: value}


@pytest.mark.parametrize("name", ["wan22\\high.sft", "link/high.sft", "wan22/high.sft"])
def test_a_name_becomes_the_listed_one(name: str) -> None:
    assert checked(file=name) == {"file": "wan22/high.sft"}


def test_no_text_is_a_missing_one() -> None:
    assert checked(text=None) == {}


@pytest.mark.parametrize(
    "request_",
    [{}, {"prompt": None}, {"prompt": {"1": None, "2": {}, "3": {"class_type": [], "inputs": 3}}}],
)
def test_other_requests_pass(request_: dict[str, Any]) -> None:
    before = json.dumps(request_)
    assert json.dumps(PromptValues([Node], lambda name, choices: name)(request_)) == before


def test_a_nodes_own_check_gets_no_refused_constant() -> None:
    class Checked:
        @classmethod
        def validate_inputs(cls, frames: int | None = None) -> bool:
            return frames is None or frames > 3

    name_errors_of(Checked)
    refused = RefusedValue("64.7")
    refused.reason = "64.7 is not a whole number: write one"
    assert Checked.validate_inputs(frames=refused) is True  # type: ignore[arg-type]
    assert Checked.validate_inputs(frames=3) is False
