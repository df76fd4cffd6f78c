"""All faults in a workflow, by ComfyUI's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.host.embedded.workflow.graph import WorkflowFormatError, api_prompt
from wanstream.host.embedded.workflow.validate import Socket, Verdict, value_fault
from wanstream.tests.support.embedded import validate_workflow

GOOD: dict[str, Any] = {
    "1": {"class_type": "Number", "inputs": {"value": 3}},
    "2": {"class_type": "Add", "inputs": {"a": ["1", 0], "b": 4, "scale": 1.5, "mode": "odd"}},
    "3": {"class_type": "Show", "inputs": {"number": ["2", 0], "prefix": "video/a"}},
}


@pytest.fixture
def validate(nodes: SimpleNamespace, tmp_path: Path) -> Callable[[Any], Verdict]:
    return lambda prompt: validate_workflow(prompt, nodes.all, models=tmp_path, input_dir=tmp_path)


def _types(verdict: Verdict) -> dict[str, list[str]]:
    return {
        node: [fault["type"] for fault in found["errors"]]
        for node, found in verdict.node_errors.items()
    }


def test_a_good_workflow_passes(validate: Callable[[Any], Verdict]) -> None:
    verdict = validate(GOOD)
    assert verdict.error is None
    assert verdict.outputs == ("3",)
    assert verdict.node_errors == {}


NODE_FAULTS = [
    ("1", {"value": 101}, "1", "value_bigger_than_max"),
    ("1", {"value": -1}, "1", "value_smaller_than_min"),
    ("1", {"value": "seven"}, "1", "invalid_input_type"),
    ("1", {"value": None}, "1", "invalid_input_type"),
    ("1", {"value": float("inf")}, "1", "invalid_input_type"),
    ("1", {"value": [1, 2, 3]}, "1", "bad_linked_input"),
    ("2", {"mode": "even"}, "2", "value_not_in_list"),
    ("2", {"mode": {"deep": 1}}, "2", "value_not_in_list"),
    ("2", {"b": ["1", 1]}, "2", "return_type_mismatch"),
    ("2", {"scale": ["1", 0]}, "2", "return_type_mismatch"),
    ("2", {"a": ["9", 0]}, "2", "exception_during_inner_validation"),
    ("2", {"a": ["1", 2]}, "2", "exception_during_inner_validation"),
    ("2", {"a": ["1", "0"]}, "2", "exception_during_inner_validation"),
    ("2", {"a": [1, 0]}, "2", "exception_during_inner_validation"),
    ("2", {"a": [[], 0]}, "2", "exception_during_inner_validation"),
    ("3", {"number": ["9", 0]}, "3", "exception_during_validation"),
    ("3", {"prefix": "../a"}, "3", "custom_validation_failed"),
    ("2", {"scael": 2.0}, "2", "unknown_input"),
    ("1", {"value": 6.5}, "1", "invalid_input_type"),
    ("1", {"value": True}, "1", "invalid_input_type"),
    ("1", {"negate": "disable"}, "1", "invalid_input_type"),
    ("1", {"negate": None}, "1", "invalid_input_type"),
    ("2", {"scale": float("nan")}, "2", "invalid_input_type"),
]


@pytest.mark.parametrize(("node", "inputs", "blamed", "kind"), NODE_FAULTS)
def test_a_fault_is_reported_on_its_node_alone(
    validate: Callable[[Any], Verdict], node: str, inputs: dict[str, Any], blamed: str, kind: str
) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt[node]["inputs"] |= inputs
    verdict = validate(prompt)
    assert verdict.error is not None
    assert verdict.error["type"] == "prompt_outputs_failed_validation"
    assert _types(verdict) == {blamed: [kind]}
    assert verdict.node_errors[blamed]["dependent_outputs"] == ["3"]
    assert verdict.outputs == ()


def test_a_missing_input(validate: Callable[[Any], Verdict]) -> None:
    prompt = copy.deepcopy(GOOD)
    del prompt["2"]["inputs"]["b"], prompt["2"]["inputs"]["scale"]
    assert _types(validate(prompt)) == {"2": ["required_input_missing"]}
    del prompt["2"]["inputs"]
    assert _types(validate(prompt)) == {"2": ["exception_during_inner_validation"]}


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (None, "no_prompt"),
        ({}, "prompt_no_outputs"),
        ({"1": GOOD["1"]}, "prompt_no_outputs"),
        ({**GOOD, "4": {"class_type": "Nobody", "inputs": {}}}, "missing_node_type"),
        ({**GOOD, "4": {"inputs": {}}}, "missing_node_type"),
        ({**GOOD, "4": {"class_type": "Nobody", "inputs": {}, "_meta": None}}, "missing_node_type"),
        (
            {**GOOD, "4": {"class_type": "Nobody", "inputs": {}, "_meta": "a title"}},
            "missing_node_type",
        ),
    ],
)
def test_faults_of_the_whole_workflow(
    validate: Callable[[Any], Verdict], prompt: Any, kind: str
) -> None:
    verdict = validate(prompt)
    assert verdict.error is not None
    assert verdict.error["type"] == kind
    assert verdict.node_errors == {}


def test_constants_become_what_their_sockets_take(validate: Callable[[Any], Verdict]) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["1"]["inputs"] = {"value": "12", "negate": 1}
    prompt["2"]["inputs"] |= {"b": 2.0, "scale": {"__value__": "0.5"}}
    before = copy.deepcopy(prompt)
    verdict = validate(prompt)
    assert verdict.prompt["1"]["inputs"] == {"value": 12, "negate": True}
    assert verdict.prompt["2"]["inputs"] == {"a": ["1", 0], "b": 2, "scale": 0.5, "mode": "odd"}
    assert prompt == before, "validation changed the caller's workflow"


def test_one_good_output_is_enough(validate: Callable[[Any], Verdict]) -> None:
    verdict = validate({**GOOD, "4": {"class_type": "Show", "inputs": {"number": "x"}}})
    assert verdict.error is None
    assert verdict.outputs == ("3",)
    assert _types(verdict) == {"4": ["invalid_input_type"]}


def test_every_fault_is_told_at_once(validate: Callable[[Any], Verdict]) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["1"]["inputs"] = {"value": 101}
    prompt["2"]["inputs"] |= {"b": "x", "mode": "even"}
    verdict = validate(prompt)
    assert _types(verdict) == {
        "1": ["value_bigger_than_max"],
        "2": ["invalid_input_type", "value_not_in_list"],
    }
    assert len(verdict.lines()) == 3
    assert "node 1 (Number): Value 101 bigger than max of 100: value" in verdict.lines()


@pytest.mark.parametrize("back", ["2", "5"])
def test_a_cycle_is_refused_and_told(validate: Callable[[Any], Verdict], back: str) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["5"] = {"class_type": "Add", "inputs": {"a": ["2", 0], "b": 1}}
    prompt["2"]["inputs"]["a"] = [back, 0]
    verdict = validate(prompt)
    assert verdict.error is not None
    assert verdict.error["type"] == "prompt_outputs_failed_validation"
    assert "Dependency cycle detected: 2 -> " in verdict.error["details"]
    assert "Dependency cycle" in verdict.lines()[0]
    assert verdict.outputs == ()


def test_an_unknown_input_is_refused_with_the_nearest_name(
    validate: Callable[[Any], Verdict],
) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["2"]["inputs"] |= {"scael": 2.0, "zzz": 1}
    details = [fault["details"] for fault in validate(prompt).node_errors["2"]["errors"]]
    assert details[0].startswith("scael: did you mean scale? it has a, b, scale")
    assert details[1].startswith("zzz: it has a, b, scale")


def test_long_lists_are_not_told(
    validate: Callable[[Any], Verdict], tmp_path: Path, nodes: SimpleNamespace
) -> None:
    options = {"options": [str(i) for i in range(21)]}
    found = value_fault(Socket(name="x", io_type="COMBO", options=options, required=True), "y")
    assert found is not None
    assert found["details"] == "x: 'y' not in (list of length 21)"
    assert found["extra_info"]["input_config"] is None


CHOICES = ["wan22/high_noise.safetensors", "wan22/low_noise.safetensors", "Wan21.gguf", "odd"]


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("high_noise.safetensors", "wan22/high_noise.safetensors"),
        ("WAN22/High_Noise.safetensors", "wan22/high_noise.safetensors"),
        ("wan22/high_noise", "wan22/high_noise.safetensors"),
        ("wan22/highnoise.safetensors", "wan22/high_noise.safetensors"),
        ("other/low_noise.safetensors", "wan22/low_noise.safetensors"),
        ("low-noise.safetensors", "wan22/low_noise.safetensors"),
        ("./wan21.gguf", "Wan21.gguf"),
        ("wan22\\hihg_noise.safetensors", "wan22/high_noise.safetensors"),
    ],
)
def test_a_name_that_is_not_in_the_list_gets_the_near_one(value: str, near: str) -> None:
    socket = Socket(name="file", io_type="COMBO", options={"options": CHOICES}, required=True)
    found = value_fault(socket, value)
    assert found is not None
    assert found["details"].startswith(f"file: did you mean {near}? '{value}' not in [")


@pytest.mark.parametrize("index", ["0", 0.5, True, None, "zero"])
def test_the_index_of_a_link_is_a_whole_number(
    validate: Callable[[Any], Verdict], index: object
) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["2"]["inputs"]["a"] = ["1", index]
    (fault,) = validate(prompt).node_errors["2"]["errors"]
    assert "of node '1': it must be a whole number, such as 0, without quotes" in fault["details"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"version": 0.4}, "node 'version' is 0.4, and not an object .* remove it, or export"),
        ({"#": "a comment"}, "node '#' is \"a comment\""),
        ({"7": None}, "node '7' is null"),
        ({"links": [[1, 2]]}, "node 'links' is \\[\\[1, 2\\]\\]"),
        (
            {"extra_data": {"extra_pnginfo": {}}},
            "node 'extra_data' has no 'class_type' and no 'inputs': remove it",
        ),
    ],
)
def test_entries_that_are_no_nodes_are_refused_with_a_remedy(
    more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(WorkflowFormatError, match=reason):
        api_prompt({**GOOD, **more})


@pytest.mark.parametrize(
    "document", [[], 3, {"nodes": [], "links": []}, {"1": []}, {"1": {"inputs": 3}}, {"prompt": 1}]
)
def test_other_documents_are_refused(document: object) -> None:
    with pytest.raises(WorkflowFormatError):
        api_prompt(document)


def test_a_request_body_is_as_good_as_its_workflow() -> None:
    assert api_prompt(GOOD) == api_prompt({"prompt": GOOD, "client_id": "x"}) == GOOD
