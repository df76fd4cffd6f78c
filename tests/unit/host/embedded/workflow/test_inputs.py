from __future__ import annotations

import pytest

from wanstream.host import io
from wanstream.host.embedded.workflow.inputs import InputError, apply_overrides, with_inputs
from wanstream.host.embedded.workflow.validate import sockets_of


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        numbers = [io.Int.Input("steps"), io.Float.Input("shift")]
        words = [io.String.Input("text"), io.Combo.Input("solver", options=["euler", "7"])]
        others = [io.Boolean.Input("preview", optional=True), io.Latent.Input("latent")]
        return io.Schema(node_id="Sampler", inputs=[*numbers, *words, *others])


SOCKETS = {"Sampler": sockets_of(Sampler.INPUT_TYPES())}
OTHER = {"class_type": "Other", "inputs": {}}
SAMPLER = {"class_type": "Sampler", "inputs": {"steps": 20, "text": "a cat"}}
PROMPT = {"sampler": SAMPLER, "1.5": OTHER, "2": OTHER}
SYNTAX = "write node.input=value"
NODES = "no such node; the workflow has sampler, 1.5, 2"
INPUTS = "has no input stepz; did you mean steps\\? it has steps, shift, text, solver"


@pytest.mark.parametrize(
    ("change", "socket", "value"),
    [
        ("sampler.steps=4", "steps", 4),
        ("Sampler.steps=4", "steps", 4),
        ("sampler.shift=5", "shift", 5),
        ("sampler.preview=true", "preview", True),
        ('sampler.latent=["2", 0]', "latent", ["2", 0]),
        ("sampler.text=x = y.z", "text", "x = y.z"),
        ("sampler.text=12", "text", "12"),
        ("sampler.text=", "text", ""),
        ("sampler.solver=7", "solver", "7"),
    ],
)
def test_value_is_read_as_its_input_takes_it(change, socket, value):
    changed = apply_overrides(PROMPT, [change], SOCKETS)["sampler"]["inputs"][socket]
    assert (type(changed), changed) == (type(value), value)
    changed = apply_overrides(PROMPT, ["1.5.anything=at all"], SOCKETS)
    assert changed["1.5"]["inputs"] == {"anything": "at all"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((text, SYNTAX) for text in ("sampler.steps", "steps=4", ".steps=4", "sampler.=4")),
        ("decoder.steps=4", NODES),
        ("Other.steps=4", "several nodes are of the class Other: use an id, 1.5, 2"),
        ("sampler.stepz=4", INPUTS),
        ("samplr.steps=2", f"{NODES}; did you mean sampler\\?$"),
        ("Othr.steps=2", "did you mean Other\\?"),
        ("sampler.preview=null", "preview is BOOLEAN, but null is not true or false"),
        ("sampler.steps=four", "steps is INT, but 'four' is not a whole number$"),
    ],
)
def test_unusable_change_is_refused(change, reason):
    with pytest.raises(InputError, match=reason):
        apply_overrides(PROMPT, [change], SOCKETS)


def test_word_for_a_boolean_in_json_is_refused():
    message = 'preview is BOOLEAN, but "true" is not true or false: write true or'
    with pytest.raises(InputError, match=message):
        with_inputs(PROMPT, {"sampler.preview": "true"}, SOCKETS, as_text=False)


def test_last_change_wins_in_a_copy_of_the_workflow():
    changed = apply_overrides(PROMPT, ["sampler.steps=4", "sampler.steps=5"], SOCKETS)
    assert changed["sampler"]["inputs"] == {"steps": 5, "text": "a cat"}
    assert PROMPT["sampler"]["inputs"]["steps"] == 20
