"""All faults in a workflow, by ComfyUI's names."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

from wanstream.host.embedded.workflow.graph import WorkflowFormatError, api_prompt
from wanstream.host.embedded.workflow.validate import Socket, Verdict, value_fault
from wanstream.tests.support.host.embedded import validate_workflow
from wanstream.tests.support.host.shipped import node

GOOD = {
    "1": node("Number", value=3),
    "2": node("Add", a=["1", 0], b=4, scale=1.5, mode="odd"),
    "3": node("Show", number=["2", 0], prefix="video/a"),
}


@pytest.fixture
def validate(nodes: SimpleNamespace, tmp_path: Path):
    return lambda prompt: validate_workflow(prompt, nodes.all, models=tmp_path, input_dir=tmp_path)


def changed(node_id: str, **inputs):
    prompt = copy.deepcopy(GOOD)
    prompt[node_id]["inputs"] |= inputs
    return prompt


def _types(verdict: Verdict) -> dict[str, list[str]]:
    return {
        node: [fault["type"] for fault in found["errors"]]
        for node, found in verdict.node_errors.items()
    }


TYPE = "invalid_input_type"
LINK = "return_type_mismatch"
CHOICE = "value_not_in_list"
INNER = "exception_during_inner_validation"
NODE_FAULTS = [
    ("1", {"value": 101}, "value_bigger_than_max"),
    ("1", {"value": -1}, "value_smaller_than_min"),
    *(("1", {"value": value}, TYPE) for value in ("seven", None, float("inf"), 6.5, True)),
    ("1", {"value": [1, 2, 3]}, "bad_linked_input"),
    *(("1", {"negate": value}, TYPE) for value in ("disable", None)),
    ("2", {"mode": "even"}, CHOICE),
    ("2", {"mode": {"deep": 1}}, CHOICE),
    ("2", {"b": ["1", 1]}, LINK),
    ("2", {"scale": ["1", 0]}, LINK),
    *(("2", {"a": link}, INNER) for link in (["9", 0], ["1", 2], ["1", "0"], [1, 0], [[], 0])),
    ("2", {"scael": 2.0}, "unknown_input"),
    ("2", {"scale": float("nan")}, TYPE),
    ("3", {"number": ["9", 0]}, "exception_during_validation"),
    ("3", {"prefix": "../a"}, "custom_validation_failed"),
]


@pytest.mark.parametrize(("node_id", "inputs", "kind"), NODE_FAULTS)
def test_fault_is_reported_on_its_node_alone(validate, node_id, inputs, kind):
    verdict = validate(changed(node_id, **inputs))
    assert verdict.error is not None
    assert verdict.error["type"] == "prompt_outputs_failed_validation"
    assert _types(verdict) == {node_id: [kind]}
    assert verdict.node_errors[node_id]["dependent_outputs"] == ["3"]
    assert verdict.outputs == ()


def test_missing_input(validate):
    prompt = changed("2")
    del prompt["2"]["inputs"]["b"], prompt["2"]["inputs"]["scale"]
    assert _types(validate(prompt)) == {"2": ["required_input_missing"]}
    del prompt["2"]["inputs"]
    assert _types(validate(prompt)) == {"2": [INNER]}


NOBODY = node("Nobody")


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (None, "no_prompt"),
        ({}, "prompt_no_outputs"),
        ({"1": GOOD["1"]}, "prompt_no_outputs"),
        ({**GOOD, "4": NOBODY}, "missing_node_type"),
        ({**GOOD, "4": {"inputs": {}}}, "missing_node_type"),
        ({**GOOD, "4": {**NOBODY, "_meta": "a title"}}, "missing_node_type"),
    ],
)
def test_faults_of_the_whole_workflow(validate, prompt, kind):
    verdict = validate(prompt)
    assert verdict.error is not None
    assert (verdict.error["type"], verdict.node_errors) == (kind, {})


def test_constants_become_what_their_sockets_take(validate):
    prompt = changed("2", b=2.0, scale={"__value__": "0.5"})
    prompt["1"]["inputs"] = {"value": "12", "negate": 1}
    before = copy.deepcopy(prompt)
    verdict = validate(prompt)
    assert (verdict.error, verdict.outputs, verdict.node_errors) == (None, ("3",), {})
    assert verdict.prompt["1"]["inputs"] == {"value": 12, "negate": True}
    assert verdict.prompt["2"]["inputs"] == {"a": ["1", 0], "b": 2, "scale": 0.5, "mode": "odd"}
    assert prompt == before, "validation changed the caller's workflow"


def test_every_fault_is_reported_at_once(validate):
    prompt = changed("2", b="x", mode="even", scael=2.0, zzz=1)
    prompt["1"]["inputs"] = {"value": 101}
    verdict = validate(prompt)
    kinds = {key: sorted(found) for key, found in _types(verdict).items()}
    of_two = sorted([TYPE, CHOICE, "unknown_input", "unknown_input"])
    assert kinds == {"1": ["value_bigger_than_max"], "2": of_two}
    assert len(verdict.lines()) == 5
    assert "node 1 (Number): Value 101 bigger than max of 100: value" in verdict.lines()
    details = [fault["details"] for fault in verdict.node_errors["2"]["errors"]]
    assert any(each.startswith("scael: did you mean scale? it has a, b, scale") for each in details)
    assert any(each.startswith("zzz: it has a, b, scale") for each in details)


@pytest.mark.parametrize("back", ["2", "5"])
def test_cycle_is_refused(validate, back):
    prompt = {**changed("2", a=[back, 0]), "5": node("Add", a=["2", 0], b=1)}
    verdict = validate(prompt)
    assert verdict.error is not None
    assert verdict.error["type"] == "prompt_outputs_failed_validation"
    assert "Dependency cycle detected: 2 -> " in verdict.error["details"]
    assert "Dependency cycle" in verdict.lines()[0]
    assert verdict.outputs == ()


def combo_fault(value: str, *options: str):
    socket = Socket(name="x", io_type="COMBO", options={"options": [*options]}, required=True)
    return value_fault(socket, value)


def test_name_that_is_not_in_the_list_gets_the_near_one():
    high = "wan22/high_noise.safetensors"
    low = "wan22/low_noise.safetensors"
    for value, near in (
        ("high_noise.safetensors", high),
        ("WAN22/High_Noise.safetensors", high),
        ("wan22/high_noise", high),
        ("wan22/highnoise.safetensors", high),
        ("other/low_noise.safetensors", low),
        ("low-noise.safetensors", low),
        ("./wan21.gguf", "Wan21.gguf"),
        ("wan22\\hihg_noise.safetensors", high),
    ):
        details = combo_fault(value, high, low, "Wan21.gguf", "odd")["details"]
        assert details.startswith(f"x: did you mean {near}? '{value}' not in [")
    long = combo_fault("y", *map(str, range(21)))
    assert long["details"] == "x: 'y' not in (list of length 21)"
    assert long["extra_info"]["input_config"] is None


def test_index_of_a_link_is_a_whole_number(validate):
    said = "of node '1': it must be a whole number, such as 0, without quotes"
    for index in ("0", 0.5, True, None, "zero"):
        (fault,) = validate(changed("2", a=["1", index])).node_errors["2"]["errors"]
        assert said in fault["details"], index


EXTRA = {"extra_pnginfo": {}}
NO_NODE = "node 'extra_data' has no 'class_type' and no 'inputs': remove it"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"version": 0.4}, "node 'version' is 0.4, and not an object .* remove it, or export"),
        ({"7": None}, "node '7' is null"),
        ({"extra_data": EXTRA}, NO_NODE),
    ],
)
def test_entries_that_are_no_nodes_are_refused(more, reason):
    with pytest.raises(WorkflowFormatError, match=reason):
        api_prompt({**GOOD, **more})


def test_request_bodies_are_workflows():
    assert api_prompt(GOOD) == api_prompt({"prompt": GOOD, "client_id": "x"}) == GOOD
    others = [[], 3, {"nodes": [], "links": []}, {"1": []}, {"1": {"inputs": 3}}]
    for document in (*others, {"prompt": 1}):
        with pytest.raises(WorkflowFormatError):
            api_prompt(document)
