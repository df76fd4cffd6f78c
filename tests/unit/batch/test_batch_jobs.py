"""Row values in a workflow: lookup by node and input, and conversion from CSV cells."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from wanstream.batch.rows.rows import Row, apply_row
from wanstream.host.embedded.workflow.inputs import InputError
from wanstream.host.embedded.workflow.validate import Socket

WORKFLOW: dict[str, Any] = {
    "3": {"class_type": "Sampler", "inputs": {"seed": 1, "cfg": 4.5, "model": ["1", 0]}},
    "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors", "strength": 2}},
    "129:86": {
        "class_type": "Loader",
        "inputs": {"file": "b.safetensors", "own": "text", "made_up": 3},
    },
    "save": {"class_type": "Save"},
    "stack": {"class_type": "Stack", "inputs": {}},
}


def _socket(name: str, io_type: str, **options: Any) -> tuple[str, Socket]:
    return name, Socket(name=name, io_type=io_type, options=options, required=True)


SOCKETS = {
    "Sampler": dict([_socket("seed", "INT"), _socket("cfg", "FLOAT"), _socket("model", "MODEL")]),
    "Loader": dict(
        [
            _socket("file", "COMBO", options=["a.safetensors", "7"]),
            _socket("strength", "COMBO", options=[1, 2]),
        ]
    ),
    "Save": dict([_socket("prefix", "STRING"), _socket("loop", "BOOLEAN")]),
    "Stack": dict([_socket("images", "COMFY_AUTOGROW_V3")]),
}


def row_of(values: dict[str, Any], *, as_text: bool = True) -> Row:
    return Row(line=2, position=1, hash="h", values=values, as_text=as_text)


@pytest.mark.parametrize(
    ("key", "text", "node", "value"),
    [
        ("3.seed", "7", "3", 7),
        ("Sampler.seed", "7", "3", 7),
        ("3.cfg", "3", "3", 3),
        ("3.model", '["129:86", 0]', "3", ["129:86", 0]),
        ("1.file", "7", "1", "7"),
        ("1.strength", "2", "1", 2),
        ("129:86.file", "c.safetensors", "129:86", "c.safetensors"),
        ("129:86.own", "12", "129:86", "12"),
        ("129:86.made_up", "12", "129:86", 12),
        ("Save.prefix", "12", "save", "12"),
        ("save.loop", "TRUE", "save", True),
        ("save.loop", "false", "save", False),
        ("stack.images.image0", '["1", 0]', "stack", ["1", 0]),
    ],
)
def test_a_cell_becomes_what_the_input_takes(key: str, text: str, node: str, value: object) -> None:
    before = copy.deepcopy(WORKFLOW)
    changed = apply_row(WORKFLOW, row_of({key: text}), SOCKETS)
    name = key.split(".", 1)[1]
    assert changed[node]["inputs"][name] == value
    assert type(changed[node]["inputs"][name]) is type(value)
    assert before == WORKFLOW


def test_json_values_stay_as_they_are() -> None:
    changed = apply_row(WORKFLOW, row_of({"3.seed": "7", "save.prefix": 5}, as_text=False), SOCKETS)
    assert changed["3"]["inputs"]["seed"] == "7"
    assert changed["save"]["inputs"]["prefix"] == 5


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("4.seed", "7", "no such node; the workflow has 3, 1, 129:86"),
        ("Loader.file", "x", "several nodes are of the class Loader: use an id, 1, 129:86"),
        ("3.sed", "7", "Sampler has no input sed; did you mean seed\\? it has seed, cfg, model"),
        ("3.seed", "seven", "3.seed is INT, but 'seven' is not a whole number$"),
        ("save.loop", "yes", "save.loop is BOOLEAN, but 'yes' is not true or false$"),
        ("129:86.made_up", "x", "129:86.made_up is not a text"),
    ],
)
def test_what_the_workflow_has_no_place_for_is_refused(key: str, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        apply_row(WORKFLOW, row_of({key: text}), SOCKETS)
