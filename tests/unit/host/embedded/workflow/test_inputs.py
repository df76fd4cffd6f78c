from __future__ import annotations

import pytest

from wanstream.host import io
from wanstream.host.embedded.workflow.inputs import InputError, apply_overrides, with_inputs
from wanstream.host.embedded.workflow.validate import sockets_of


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Sampler",
            inputs=[
                io.Int.Input("steps"),
                io.Float.Input("shift"),
                io.String.Input("text"),
                io.Combo.Input("solver", options=["euler", "7"]),
                io.Boolean.Input("preview", optional=True),
                io.Latent.Input("latent"),
            ],
        )


SOCKETS = {"Sampler": sockets_of(Sampler.INPUT_TYPES())}
PROMPT = {
    "sampler": {"class_type": "Sampler", "inputs": {"steps": 20, "text": "a cat"}},
    "1.5": {"class_type": "Other", "inputs": {}},
    "2": {"class_type": "Other", "inputs": {}},
}


@pytest.mark.parametrize(
    ("change", "node", "socket", "value"),
    [
        ("sampler.steps=4", "sampler", "steps", 4),
        ("Sampler.steps=4", "sampler", "steps", 4),
        ("sampler.shift=5", "sampler", "shift", 5),
        ("sampler.preview=true", "sampler", "preview", True),
        ("sampler.latent=[\"2\", 0]", "sampler", "latent", ["2", 0]),
        ("sampler.text=x = y.z", "sampler", "text", "x = y.z"),
        ("sampler.text=12", "sampler", "text", "12"),
        ("sampler.text=", "sampler", "text", ""),
        ("sampler.solver=7", "sampler", "solver", "7"),
        ("1.5.anything=at all", "1.5", "anything", "at all"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_its_input_wants_it(
    change: str, node: str, socket: str, value: object
) -> None:
    changed = apply_overrides(PROMPT, [change], SOCKETS)[node]["inputs"][socket]
    assert changed == value
    assert type(changed) is type(value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sampler.steps", "write node.input=value"),
        ("steps=4", "write node.input=value"),
        (".steps=4", "write node.input=value"),
        ("sampler.=4", "write node.input=value"),
        ("decoder.steps=4", "no such node; the workflow has sampler, 1.5, 2"),
        ("Other.steps=4", "several nodes are of the class Other: use an id, 1.5, 2"),
        (
            "sampler.stepz=4",
            "Sampler has no input stepz; did you mean steps\\? it has steps, shift, text, solver",
        ),
        (
            "samplr.steps=2",
            "no such node; the workflow has sampler, 1.5, 2; did you mean sampler\\?$",
        ),
        ("Samplre.steps=2", "did you mean sampler\\?"),
        ("SAMPLER.steps=2", "did you mean sampler\\?"),
        ("Othr.steps=2", "did you mean Other\\?"),
        ("sampler.preview=1.0", "preview is BOOLEAN, but 1.0 is not true or false"),
        ("sampler.preview=null", "preview is BOOLEAN, but null is not true or false"),
        ("sampler.steps=64.7", "steps is INT, but 64.7 is not a whole number"),
        ("sampler.steps=true", "steps is INT, but true is not a whole number"),
        ("sampler.shift=NaN", "shift is FLOAT, but NaN is not a finite number"),
        ("sampler.steps=four", "steps is INT, but 'four' is not a whole number$"),
    ],
)
def test_a_change_that_changes_nothing_is_refused(change: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        apply_overrides(PROMPT, [change], SOCKETS)


@pytest.mark.parametrize("value", ["disable", "enable", "false", "true", "", None, 2])
def test_a_word_for_a_boolean_in_a_row_of_json_is_refused(value: object) -> None:
    with pytest.raises(
        InputError, match=r"preview is BOOLEAN, but .* is not true or false: write true or"
    ):
        with_inputs(PROMPT, {"sampler.preview": value}, SOCKETS, as_text=False)


def test_the_workflow_itself_is_left_alone_and_the_last_change_wins() -> None:
    changed = apply_overrides(PROMPT, ["sampler.steps=4", "sampler.steps=5"], SOCKETS)
    assert changed["sampler"]["inputs"] == {"steps": 5, "text": "a cat"}
    assert PROMPT["sampler"]["inputs"]["steps"] == 20
