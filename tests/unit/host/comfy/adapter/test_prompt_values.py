"""Constants in workflows for a ComfyUI server."""

from __future__ import annotations

import copy
import json

import pytest

from wanstream.host import io, name_errors_of
from wanstream.host.comfy.adapter.prompt_values import PromptValues
from wanstream.host.input_values import InputValueError, RefusedValue

FILE = "wan22/high.sft"
KINDS = {"noise": bool, "steps": int, "shift": float, "text": str}


class Node(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        numbers = [io.Int.Input("steps"), io.Float.Input("shift"), io.Boolean.Input("noise")]
        words = [io.Combo.Input("file", options=[FILE]), io.String.Input("text")]
        return io.Schema(node_id="Node", inputs=[*numbers, *words, io.Latent.Input("latent")])


def checked(**inputs):
    request = {"prompt": {"1": {"class_type": "Node", "inputs": inputs}}, "client_id": "x"}
    check = PromptValues([Node], lambda name, _: FILE if name == "link/high.sft" else name)
    assert check(request) is request
    return inputs


REFUSED = [
    *(("noise", value) for value in ("disable", "false", "", None, 2, {"__value__": "enable"})),
    *(("steps", value) for value in (64.7, True, None, "many", float("nan"))),
    *(("shift", value) for value in (float("nan"), float("inf"), "nan", True)),
    *(("text", value) for value in (True, {"text": "a cat"}, {"__value__": False})),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused_constant_has_a_reason_instead_of_a_value(name, value):
    found = checked(**{name: value})[name]
    with pytest.raises(InputValueError, match=r"is not .*: write"):
        KINDS[name](found)
    returned = json.loads(json.dumps(copy.deepcopy(found)))
    assert returned == f"{found}", "ComfyUI returns it in its message"


def test_other_constants_stay_and_names_become_listed_ones():
    for kept in (
        {"noise": True, "steps": 4.0, "shift": 3, "text": "", "latent": ["2", 0]},
        {"noise": 0, "steps": "4"},
    ):
        assert checked(**kept) == kept
    for name in ("wan22\\high.sft", "link/high.sft", FILE):
        assert checked(file=name) == {"file": FILE}
    assert checked(text=None) == {}, "no text is a missing one"


@pytest.mark.parametrize(
    "request_",
    [{}, {"prompt": None}, {"prompt": {"1": None, "2": {}, "3": {"class_type": [], "inputs": 3}}}],
)
def test_other_requests_pass(request_):
    before = json.dumps(request_)
    assert json.dumps(PromptValues([Node], lambda name, choices: name)(request_)) == before


def test_check_of_a_node_gets_no_refused_constant():
    class Checked:
        @classmethod
        def validate_inputs(cls, frames: int | None = None) -> bool:
            return frames is None or frames > 3

    name_errors_of(Checked)
    refused = RefusedValue("64.7")
    refused.reason = "64.7 is not a whole number: write one"
    assert Checked.validate_inputs(frames=refused) is True  # type: ignore[arg-type]
    assert Checked.validate_inputs(frames=3) is False
