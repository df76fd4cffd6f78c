"""200 workflows with our nodes, sound and broken: a server judges each as the embedded host does.

Unknown inputs are not among the faults: ComfyUI ignores them, while the embedded host refuses them.
Constants that ComfyUI would change without a message are refused by both, on the server by a
handler for queued workflows.

Every workflow is drawn from a seed: a shipped one, whose constants are written in other ways. A
broken one has either one fault that ends ComfyUI's validation of a node early (the order in which
it checks inputs varies, so other faults would be found by chance), or up to three faults that do
not.
"""

import asyncio
import random
from collections import Counter

import pytest

from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.load_image import LoadImage
from wanstream.host.embedded.workflow.validate import rules_of, sockets_of
from wanstream.nodes import WanStreamExtension
from wanstream.tests.integration.comfy.servers import shipped
from wanstream.tests.support.host.embedded import embedded_host, validate_workflow
from wanstream.tests.support.host.shipped import node
from wanstream.tools.templates import TITLES

pytestmark = pytest.mark.comfy

WORKFLOWS = 200
SOUND = 60
# Every verdict and fault must come up among the workflows.
KINDS = {
    "valid",
    "missing_node_type",
    "prompt_no_outputs",
    "prompt_outputs_failed_validation",
    "required_input_missing",
    "bad_linked_input",
    "return_type_mismatch",
    "invalid_input_type",
    "value_not_in_list",
    "value_smaller_than_min",
    "value_bigger_than_max",
    "custom_validation_failed",
    "exception_during_validation",
    "exception_during_inner_validation",
}

RENAMED = {"invalid_prompt": "missing_node_type"}
"""Error type in ComfyUI 0.3.64, and the current name."""

NODES = asyncio.run(WanStreamExtension().get_node_list())
CLASSES = {node.define_schema().node_id: node for node in (*NODES, LoadImage)}
SHIPPED = [
    name
    for name, prompt in ((each, shipped(each)) for each in TITLES)
    if {"policy", "sampler", "save"} <= prompt.keys()
    and "images" in prompt["save"]["inputs"]
    and {each["class_type"] for each in prompt.values()} <= CLASSES.keys()
]
OUTPUTS = {name for name, node in CLASSES.items() if node.define_schema().is_output_node}


def _is_number(socket):
    return socket.io_type in {"INT", "FLOAT"}


def _is_link(socket):
    return socket.io_type not in {"INT", "FLOAT", "COMBO", "STRING", "BOOLEAN"}


# Faults in one input that its node does not check: which input, and a wrong value for it.
INPUT_FAULTS = {
    "too small": (_is_number, lambda _, socket: socket.options["min"] - 1),
    "too big": (_is_number, lambda _, socket: socket.options["max"] * 2 + 1),
    "no number": (_is_number, lambda rng, _: rng.choice(["many", None, "", {"a": 1}])),
    "not in list": (
        lambda one: one.io_type == "COMBO",
        lambda rng, _: rng.choice(["nothing", 3, None, "../wan"]),
    ),
    "no link": (lambda _: True, lambda rng, _: rng.choice([[], ["1"], ["1", 0, 0]])),
    "constant": (_is_link, lambda rng, _: rng.choice([5, "text", None, {"samples": 1}])),
    "wrong type": (lambda one: one.io_type != "WANSTREAM_POLICY", lambda *_: ["policy", 0]),
    "dangling": (_is_link, lambda rng, _: rng.choice([["99", 0], ["no", 1], [1, 0], [[], 0]])),
    "no output": (_is_link, lambda rng, _: ["save", rng.choice([0, 7, -9, "0", 0.5])]),
}


def _wrong_input(name):
    fits, make = INPUT_FAULTS[name]

    def harm(rng, prompt, sockets):
        found = [place for place in _unchecked(prompt, sockets) if fits(place[1])]
        if found:
            inputs, socket = rng.choice(found)
            inputs[socket.name] = make(rng, socket)

    return harm


def _unchecked(prompt, sockets):
    """Given inputs that their nodes do not check."""
    return [
        (each["inputs"], socket)
        for each in prompt.values()
        for socket in sockets.get(each.get("class_type", ""), [])
        if socket.name in each.get("inputs", {})
        and socket.name not in rules_of(CLASSES[each["class_type"]]).own_checked
    ]


def missing(rng, prompt, _):
    inputs = rng.choice([each["inputs"] for each in prompt.values() if each["inputs"]])
    del inputs[rng.choice(list(inputs))]


def outside_the_run(rng, prompt, _):
    wrong = {"switch_step": [21, -2], "start_step": [20, -1], "end_step": [0, -1]}
    name = rng.choice(list(wrong))
    steps = rng.choice([0, 20, 20, "many"])
    prompt["sampler"]["inputs"] |= {"steps": steps, name: rng.choice(wrong[name])}


def leaving_the_output(rng, prompt, _):
    prefix = rng.choice(["../clip", "/clip", "a/../../clip"])
    prompt["save"]["inputs"]["filename_prefix"] = prefix


def no_inputs(rng, prompt, _):
    del rng.choice(list(prompt.values()))["inputs"]


def unknown_node(rng, prompt, _):
    rng.choice(list(prompt.values()))["class_type"] = rng.choice(["Nobody", ""])


def no_class(rng, prompt, _):
    del rng.choice(list(prompt.values()))["class_type"]


def no_output_node(_, prompt, __):
    for name in [name for name, each in prompt.items() if each["class_type"] in OUTPUTS]:
        del prompt[name]


def missing_picture(rng, prompt, _):
    prompt["pic"] = node("LoadImage", image=rng.choice(["none.png", "no/none.png"]))
    prompt["save"]["inputs"]["images"] = ["pic", 0]


def linked_picture(_, prompt, __):
    prompt["pic"] = node("LoadImage", image=["save", 0])
    prompt["pic2"] = node("LoadImage", image=["pic", 0])
    prompt["save"]["inputs"]["images"] = ["pic2", 0]


FAULTS = {name: _wrong_input(name) for name in INPUT_FAULTS}
ENDING = {"dangling": FAULTS.pop("dangling"), "no output": FAULTS.pop("no output")}
FAULTS |= {each.__name__: each for each in (missing, outside_the_run, leaving_the_output)}
ENDING |= {each.__name__: each for each in (no_inputs, unknown_node, no_class, no_output_node)}
ENDING |= {each.__name__: each for each in (missing_picture, linked_picture)}


def _spell(rng, prompt, sockets):
    """Write constants in other ways, and set some inputs to their limits."""
    for inputs, socket in _unchecked(prompt, sockets):
        value = inputs[socket.name]
        if _is_number(socket):
            limits = socket.options["min"], socket.options["max"]
            inputs[socket.name] = rng.choice([value, *limits, str(value), {"__value__": value}])
        elif socket.io_type == "BOOLEAN":
            inputs[socket.name] = rng.choice([value, int(value), {"__value__": value}])


def _draw(number, sockets):
    """Return workflow `number` and the names of the faults in it."""
    rng = random.Random(number)
    prompt = shipped(rng.choice(SHIPPED))
    _spell(rng, prompt, sockets)
    names = []
    if number >= SOUND:
        several = rng.choices([*FAULTS], k=rng.choice([1, 1, 2, 3]))
        names = [rng.choice([*ENDING])] if rng.random() < 0.5 else several
    for name in names:
        (FAULTS | ENDING)[name](rng, prompt, sockets)
    return prompt, names


def _verdict(error, node_errors):
    by_node = {
        name: sorted(fault["type"] for fault in found["errors"])
        for name, found in node_errors.items()
    }
    top = error["type"] if error else "valid"
    return RENAMED.get(top, top), by_node


@pytest.fixture(scope="module")
def sockets(base):
    """Every node's inputs."""
    folders = Folders(models=base / "models", output=base / "output", input=base / "input")
    with embedded_host.opened(folders):
        return {name: [*sockets_of(node.INPUT_TYPES()).values()] for name, node in CLASSES.items()}


def _either(prompt, verdict):
    """Return the verdict without what depends on the order of several outputs.

    ComfyUI validates them in set order, which differs per process. The order decides whether a
    node's exception is reported for an output or for an inner node.
    """
    top, by_node = verdict
    if sum(each.get("class_type") in OUTPUTS for each in prompt.values()) <= 1:
        return verdict
    return top, {
        name: [kind.replace("_inner_", "_") for kind in kinds] for name, kinds in by_node.items()
    }


def _judge_twice(server, prompt):
    """Return the embedded host's verdict, the server's, and the server's answer."""
    folders = {"models": server.base / "models", "input_dir": server.base / "input"}
    ours = validate_workflow(prompt, NODES, output=server.base / "output", **folders)
    status, theirs = server.post("/prompt", {} if prompt is None else {"prompt": prompt})
    assert status in {200, 400}, theirs
    judged = _verdict(theirs.get("error"), theirs["node_errors"])
    return _verdict(ours.error, ours.node_errors), judged, theirs


def test_drawn_workflows_are_judged_alike(comfyui, server, sockets):
    drawn = [_draw(number, sockets) for number in range(WORKFLOWS)]
    kinds = KINDS
    if "io.Combo.io_type" not in (comfyui.path / "execution.py").read_text(encoding="utf-8"):
        # 0.3.64 checks no choices in nodes like ours, so the node refuses them.
        drawn = [(prompt, names) for prompt, names in drawn if "not in list" not in names]
        kinds = KINDS - {"value_not_in_list"}
    found = Counter[str]()
    with server.held():
        for prompt, names in drawn:
            ours, theirs, _ = _judge_twice(server, prompt)
            if not names:
                assert ours == ("valid", {}), prompt
            assert _either(prompt, ours) == _either(prompt, theirs), f"{names}: {prompt}"
            found.update([ours[0], *(kind for kinds in ours[1].values() for kind in kinds)])
    assert found["valid"] >= SOUND
    assert {*found} >= kinds, f"the generator no longer makes {kinds - {*found}}"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("latent", {"width": 70}, "width is 70, it must be a multiple of 16: use 64"),
        ("sampler", {"steps": 4, "start_step": 2, "end_step": 1}, "set start_step below 1, or"),
        ("save", {"filename_prefix": "a\0b"}, "contains a NUL character"),
        ("benchmark", {"policies": "fastest"}, "fastest"),
    ],
)
def test_fault_is_told_once(server, name, changes, message):
    prompt = shipped("benchmark" if name == "benchmark" else "t2v")
    prompt[name]["inputs"] |= changes
    _, theirs = server.post("/prompt", {"prompt": prompt})
    (error,) = theirs["node_errors"][name]["errors"]
    assert message in error["details"]
    kind = error["extra_info"]["exception_type"].rpartition(".")[0]
    assert kind in {"", "wanstream"}, "not the path of the pack"


def test_constants_that_python_would_change_are_refused(server):
    nan = float("nan")
    for name, key, values in (
        ("sampler", "leftover_noise", ["disable", None, 2]),
        ("sampler", "steps", [64.7, True, "64.7"]),
        ("sampler", "boundary_ratio", [nan, float("inf"), "nan", True]),
        ("sampler", "flow_shift", [{"__value__": nan}]),
        ("text", "positive", [True, {"text": "a cat"}]),
    ):
        for value in values:
            prompt = shipped("t2v")
            prompt[name]["inputs"][key] = value
            ours, theirs, answer = _judge_twice(server, prompt)
            assert ours[1][name] == theirs[1][name] == ["invalid_input_type"], (key, value)
            (error,) = answer["node_errors"][name]["errors"]
            assert "write" in error["details"]


def test_no_workflow_and_cycles(server):
    """Older versions reach the recursion limit and report only that the outputs failed.

    Newer ones name a cycle.
    """
    ours, theirs, _ = _judge_twice(server, None)
    assert ours == theirs
    for before in ("start", "next"):
        prompt = shipped("i2v")
        inputs = prompt["start"]["inputs"]
        prompt["next"] = node("WanStreamImageToVideo", **{**inputs, "positive": ["start", 0]})
        inputs["positive"] = [before, 0]
        ours, (outcome, errors), _ = _judge_twice(server, prompt)
        others = {name for name, kinds in errors.items() if {*kinds} != {"dependency_cycle"}}
        assert ours == (outcome, {name: errors[name] for name in others})
