"""200 generated workflows with our nodes, sound and broken.

The embedded host and a real server must agree on each. Unknown inputs are not among the faults:
ComfyUI ignores them, while the embedded host refuses them. Constants that ComfyUI would change
without a message are refused by both, on the server by a handler for queued workflows.

Every workflow is drawn from a seed. A broken one has either one fault that ends ComfyUI's
validation of a node early (the order in which it checks inputs varies, so other faults would be
found by chance), or up to three faults that do not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.load_image import LoadImage
from wanstream.host.embedded.workflow.validate import Socket, rules_of, sockets_of
from wanstream.nodes import WanStreamExtension
from wanstream.tests.support.embedded import embedded_host, validate_workflow
from wanstream.tools.comfyui import ComfyUI

pytestmark = pytest.mark.comfy

WORKFLOWS = 200
SOUND = 60
DEEPEST = 4

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
OUTPUTS = {
    name: [output.io_type for output in node.define_schema().outputs]
    for name, node in CLASSES.items()
}
MAKERS = {
    name: OUTPUTS[name]
    for name, node in CLASSES.items()
    if "MODEL" not in {*OUTPUTS[name], *(each.io_type for each in node.define_schema().inputs)}
}
"""Output types from the embedded host's nodes."""

VIDEO_FILES = {"WanStreamSaveVideo", "WanStreamDecodeVideo"}
"""Nodes that end a workflow."""

Prompt = dict[str, dict[str, Any]]
Sockets = Mapping[str, list[Socket]]
Break = Callable[[random.Random, Prompt, Sockets], None]


class Weaver:
    """Draws sound workflows from a seed: all required sockets are fed, some sources are shared."""

    def __init__(self, rng: random.Random, sockets: Sockets) -> None:
        self.rng = rng
        self.sockets = sockets
        self.prompt: Prompt = {}

    def weave(self) -> Prompt:
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            self._node("WanStreamSaveVideo", 0)
        if self.rng.random() < 0.3:
            self._node("WanStreamDecodeVideo", 0)
        return self.prompt

    def ending_with(self, class_type: str) -> Prompt:
        self._node(class_type, 0)
        return self.prompt

    def _node(self, class_type: str, depth: int) -> str:
        wanted = [
            s
            for s in self.sockets[class_type]
            if s.required
            # Our nodes make no AUDIO.
            or (depth < DEEPEST and s.io_type != "AUDIO" and self.rng.random() < 0.5)
        ]
        inputs = {socket.name: self._value(socket, depth + 1) for socket in wanted}
        if class_type in {"WanStreamSampler", "WanStreamLaneSampler"}:
            inputs |= self._course()
        parts = {
            "WanStreamBenchmark": self._matrix,
            "WanStreamWorkers": self._crew,
            "WanStreamExperts": self._pair,
        }
        if class_type in parts:
            inputs |= parts[class_type]()
        if class_type == "WanStreamGuidance":
            inputs["guidance_steps"] = self.rng.choice(["", "4", "6, 5 4.5,1"])
        if class_type == "WanStreamContextWindows":
            inputs |= {
                "frames": self.rng.choice([81, 161]),
                "overlap": 16,
                "stride": self.rng.choice([1, "2", 16]),
            }
        if class_type == "WanStreamContinueVideo":
            inputs |= {"frames": self.rng.choice([33, 81]), "overlap": self.rng.choice([1, 2])}
        if class_type == "WanStreamLora":
            inputs["strength_steps"] = self.rng.choice(["", "0-1: 0", "0: 0.5, 2-3: 1"])
        if inputs.get("format") == "av1 10 bit":
            inputs["fps"] = self.rng.choice([0.01, 16, "240"])
        if class_type in {"WanStreamVAEDecode", "WanStreamDecodeVideo"}:
            inputs |= self._tiles(inputs)
        if class_type == "WanStreamEmptyLatent" and inputs.get("model") == "Wan2.2 5B":
            inputs |= {"width": self.rng.choice([32, 1280]), "height": 704}
        node_id = str(len(self.prompt) + 1)
        self.prompt[node_id] = {"class_type": class_type, "inputs": inputs}
        return node_id

    def _course(self) -> dict[str, object]:
        """Compatible steps, because drawing alone keeps each only within its own limits."""
        steps = self.rng.randint(1, 1000)
        switch, start = self.rng.randint(-1, steps), self.rng.randrange(steps)
        end = self.rng.choice([10000, self.rng.randint(start + 1, 10000)])
        return {
            "steps": steps,
            "switch_step": str(switch),
            "start_step": {"__value__": start},
            "end_step": end,
        }

    def _tiles(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Any VAE's tiles, and a compute dtype for this one: fp16 is for tiny VAEs only."""
        wrong = inputs["vae"] == "wan" and inputs.get("compute_dtype") == "fp16"
        return {
            "tile_size": self.rng.choice([0, 64, 256]),
            **({"compute_dtype": "bf16"} if wrong else {}),
        }

    def _pair(self) -> dict[str, object]:
        """Two matching experts."""
        high, low = self.rng.sample(["high.safetensors", "low.safetensors"], 2)
        return {"high_noise": high, "low_noise": low}

    def _matrix(self) -> dict[str, object]:
        """Words a benchmark understands, and no more runs than it takes."""
        policies, prefetch = self.rng.choice(
            [("", ""), ("layerwise", ""), ("layerwise", "1, 2"), ("resident, auto", "")]
        )
        return {
            "policies": policies,
            "prefetch": prefetch,
            "steps": "",
            "repeats": 2,
            "warmup": 0,
        }

    def _crew(self) -> dict[str, object]:
        """Workers on this machine, with degrees that multiply to their count."""
        ring, ulysses = self.rng.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
        degrees = {"data": self.rng.choice([1, 2]), "stage": 1, "cfg": self.rng.choice([1, 2])}
        layout = self.rng.choice(["latency", "throughput", "manual"])
        shape = {"layout": layout, "count": degrees["data"] * degrees["cfg"] * ring * ulysses}
        place = {"cluster": "local"}
        return {**degrees, **shape, **place, "ring": ring, "ulysses": {"__value__": ulysses}}

    def _value(self, socket: Socket, depth: int) -> object:
        if socket.io_type in {"INT", "FLOAT"}:
            return self._number(socket)
        if socket.io_type == "COMBO":
            return self.rng.choice(list(socket.options["options"]))
        if socket.io_type == "BOOLEAN":
            return self.rng.choice([True, False, 0, {"__value__": True}])
        if socket.io_type == "STRING":
            return self.rng.choice(["clip", "video/clip", "a cat", "%year%/x"])
        return self._link(socket.io_type, depth)

    def _number(self, socket: Socket) -> object:
        low, high = socket.options["min"], socket.options["max"]
        value = self.rng.uniform(low, high)
        if socket.io_type == "INT":
            value = self.rng.randrange(low, high + 1, socket.options.get("step", 1))
        return self.rng.choice([value, value, low, high, str(value), {"__value__": value}])

    def _link(self, io_type: str, depth: int) -> list[Any]:
        made = [
            (n, i) for n, node in self.prompt.items() for i in _places(node["class_type"], io_type)
        ]
        if made and self.rng.random() < 0.5:
            return list(self.rng.choice(made))
        makers = [name for name, types in MAKERS.items() if io_type in types]
        if depth >= DEEPEST:
            makers = sorted(
                makers, key=lambda name: sum(_is_link_socket(s) for s in self.sockets[name])
            )[:1]
        maker = self.rng.choice(makers)
        return [self._node(maker, depth), self.rng.choice(_places(maker, io_type))]


def _places(class_type: str, io_type: str) -> list[int]:
    return [place for place, made in enumerate(OUTPUTS[class_type]) if made == io_type]


def _is_link_socket(socket: Socket) -> bool:
    return socket.io_type not in {"INT", "FLOAT", "COMBO", "STRING", "BOOLEAN"}


def _put(
    rng: random.Random, prompt: Prompt, sockets: Sockets, fits: Callable[[Socket], bool], make: Any
) -> None:
    """Set one given input that fits, and that its node does not check, to `make(socket)`."""
    found = [
        (node_id, socket)
        for node_id, node in prompt.items()
        for socket in sockets.get(node.get("class_type", ""), [])
        if socket.name in node.get("inputs", {})
        and fits(socket)
        and not _checked_by_node(node, socket)
    ]
    if found:
        node_id, socket = rng.choice(found)
        prompt[node_id]["inputs"][socket.name] = make(socket)


def _checked_by_node(node: Mapping[str, Any], socket: Socket) -> bool:
    return socket.name in rules_of(CLASSES[node["class_type"]]).own_checked


def _number(socket: Socket) -> bool:
    return socket.io_type in {"INT", "FLOAT"}


def too_small(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(rng, prompt, sockets, _number, lambda socket: socket.options["min"] - 1)


def too_big(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(rng, prompt, sockets, _number, lambda socket: socket.options["max"] * 2 + 1)


def no_number(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(rng, prompt, sockets, _number, lambda _: rng.choice(["many", None, "", {"a": 1}]))


def not_in_list(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(
        rng,
        prompt,
        sockets,
        lambda s: s.io_type == "COMBO",
        lambda _: rng.choice(["nothing", 3, None, "../wan"]),
    )


def no_link(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(rng, prompt, sockets, lambda _: True, lambda _: rng.choice([[], ["1"], ["1", 0, 0]]))


def constant_on_a_socket(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(
        rng,
        prompt,
        sockets,
        _is_link_socket,
        lambda _: rng.choice([5, "text", None, {"samples": 1}]),
    )


def wrong_type(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    other = f"{len(prompt) + 1}"
    prompt[other] = {
        "class_type": "WanStreamLayerwise",
        "inputs": {"prefetch_blocks": 1, "weights_source": "disk"},
    }
    _put(
        rng,
        prompt,
        sockets,
        lambda socket: socket.io_type != "WANSTREAM_POLICY",
        lambda _: [other, 0],
    )


def missing(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    node = rng.choice([node for node in prompt.values() if node["inputs"]])
    del node["inputs"][rng.choice(list(node["inputs"]))]


def outside_the_run(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    for node in prompt.values():
        if node.get("class_type") == "WanStreamSampler":
            wrong: dict[str, object] = {
                "switch_step": rng.choice([21, -2]),
                "start_step": rng.choice([20, -1]),
            }
            wrong["end_step"] = rng.choice([0, -1])
            name = rng.choice(list(wrong))
            node["inputs"] |= {"steps": rng.choice([0, 20, 20, "many"]), name: wrong[name]}


def leaving_the_output(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    outputs = [node for node in prompt.values() if node.get("class_type") in VIDEO_FILES]
    rng.choice(outputs)["inputs"]["filename_prefix"] = rng.choice(
        ["../clip", "/clip", "a/../../clip"]
    )


def _last_output(prompt: Prompt) -> str:
    return [
        node_id
        for node_id, node in prompt.items()
        if node.get("class_type") == "WanStreamSaveVideo"
    ][-1]


def dangling(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    _put(
        rng,
        prompt,
        sockets,
        _is_link_socket,
        lambda _: rng.choice([["99", 0], ["no", 1], [1, 0], [[], 0]]),
    )


def no_such_output(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    last = _last_output(prompt)
    _put(rng, prompt, sockets, _is_link_socket, lambda _: [last, rng.choice([0, 7, -9, "0", 0.5])])


def no_inputs(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    del rng.choice(list(prompt.values()))["inputs"]


def unknown_node(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    rng.choice(list(prompt.values()))["class_type"] = rng.choice(["Nobody", ""])


def no_class(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    del rng.choice(list(prompt.values()))["class_type"]


def no_output_node(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    for node_id in [
        node_id for node_id, node in prompt.items() if node["class_type"] in VIDEO_FILES
    ]:
        del prompt[node_id]


def missing_picture(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    prompt["pic"] = {
        "class_type": "LoadImage",
        "inputs": {"image": rng.choice(["none.png", "no/none.png"])},
    }
    prompt[_last_output(prompt)]["inputs"]["images"] = ["pic", 0]


def linked_picture(rng: random.Random, prompt: Prompt, sockets: Sockets) -> None:
    prompt["pic"] = {"class_type": "LoadImage", "inputs": {"image": [_last_output(prompt), 0]}}
    prompt["pic2"] = {"class_type": "LoadImage", "inputs": {"image": ["pic", 0]}}
    prompt[_last_output(prompt)]["inputs"]["images"] = ["pic2", 0]


ADDING = [
    too_small,
    too_big,
    no_number,
    not_in_list,
    no_link,
    constant_on_a_socket,
    wrong_type,
    missing,
]
ADDING += [leaving_the_output, outside_the_run]
ENDING = [
    dangling,
    no_such_output,
    no_inputs,
    unknown_node,
    no_class,
    no_output_node,
    missing_picture,
    linked_picture,
]


def _draw(number: int, sockets: Sockets) -> tuple[Prompt, str]:
    """Return workflow `number` and the names of the faults in it."""
    rng = random.Random(number)
    prompt = Weaver(rng, sockets).weave()
    if number < SOUND:
        return prompt, "sound"
    kinds = (
        [rng.choice(ENDING)]
        if rng.random() < 0.5
        else rng.choices(ADDING, k=rng.choice([1, 1, 2, 3]))
    )
    for kind in kinds:
        kind(rng, prompt, sockets)
    return prompt, " + ".join(kind.__name__ for kind in kinds)


def _verdict(
    error: Mapping[str, Any] | None, node_errors: Mapping[str, Any]
) -> tuple[str, dict[str, list[str]]]:
    by_node = {
        node: sorted(fault["type"] for fault in found["errors"])
        for node, found in node_errors.items()
    }
    top = error["type"] if error else "valid"
    return RENAMED.get(top, top), by_node


@pytest.fixture(scope="module")
def sockets(named_files: Path) -> Sockets:
    """Every node's inputs.

    Their lists have no files from other tests, on which the drawn workflows would depend.
    """
    folders = Folders(
        models=named_files / "models", output=named_files / "output", input=named_files / "input"
    )
    with embedded_host.opened(folders):
        return {name: [*sockets_of(node.INPUT_TYPES()).values()] for name, node in CLASSES.items()}


def _is_ambiguous(prompt: Prompt) -> bool:
    """Return whether the prompt has several outputs.

    ComfyUI validates them in set order, which differs per process.

    The order decides whether a node's exception is reported for an output or for an inner node.
    """
    outputs = [name for name, node in CLASSES.items() if node.define_schema().is_output_node]
    return sum(node.get("class_type") in outputs for node in prompt.values()) > 1


def _either(verdict: tuple[str, dict[str, list[str]]]) -> object:
    top, by_node = verdict
    return top, {
        node: [kind.replace("_inner_", "_") for kind in kinds] for node, kinds in by_node.items()
    }


def _judge_twice(server: Any, prompt: Prompt) -> tuple[Any, Any]:
    """Return the embedded host's verdict and the server's."""
    folders = {
        "models": server.base / "models",
        "input_dir": server.base / "input",
        "output": server.base / "output",
    }
    ours = validate_workflow(prompt, NODES, **folders)
    status, theirs = server.post("/prompt", {"prompt": prompt})
    assert status in {200, 400}, theirs
    return _verdict(ours.error, ours.node_errors), _verdict(
        theirs.get("error"), theirs["node_errors"]
    )


def test_generated_workflows_are_judged_alike(
    comfyui: ComfyUI, server: Any, sockets: Sockets
) -> None:
    drawn = [_draw(number, sockets) for number in range(WORKFLOWS)]
    kinds = KINDS
    if "io.Combo.io_type" not in (comfyui.path / "execution.py").read_text(encoding="utf-8"):
        # 0.3.64 checks no choices in nodes like ours, so the node refuses them.
        drawn = [(prompt, done) for prompt, done in drawn if "not_in_list" not in done]
        kinds = KINDS - {"value_not_in_list"}
    with server.held():
        judged = [_judge_twice(server, prompt) for prompt, _ in drawn]
    for (prompt, done), (ours, theirs) in zip(drawn, judged, strict=True):
        if done == "sound":
            assert ours == ("valid", {}), prompt
        alike = _either(ours) == _either(theirs) if _is_ambiguous(prompt) else ours == theirs
        assert alike, f"{done}: {prompt}"
    found = Counter(
        kind for (_, by_node), _ in judged for kinds in by_node.values() for kind in kinds
    )
    found.update(top for (top, _), _ in judged)
    assert found["valid"] >= SOUND
    assert set(found) >= kinds, f"the generator no longer makes {kinds - set(found)}"


@pytest.mark.parametrize(
    ("class_type", "changes", "message"),
    [
        ("WanStreamEmptyLatent", {"width": 70}, "width is 70, it must be a multiple of 16: use 64"),
        (
            "WanStreamEmptyLatent",
            {"frames": 6},
            "frames is 6, it must be a multiple of 4 plus 1: use 5",
        ),
        ("WanStreamSampler", {"steps": 0}, "0 steps: give 1 to 1000"),
        (
            "WanStreamSampler",
            {"steps": 4, "start_step": 2, "end_step": 1},
            "set start_step below 1, or end_step",
        ),
        ("WanStreamLaneSampler", {"steps": 0}, "0 steps: give 1 to 1000"),
        ("WanStreamContextWindows", {"frames": 6}, "frames"),
        ("WanStreamSaveVideo", {"filename_prefix": "a\0b"}, "contains a NUL character"),
        ("WanStreamDecodeVideo", {"filename_prefix": "a\0b"}, "contains a NUL character"),
        ("WanStreamDecodeVideo", {"tile_size": 8}, "tile"),
        ("WanStreamBenchmark", {"filename_prefix": "a\0b"}, "contains a NUL character"),
        ("WanStreamBenchmark", {"policies": "fastest"}, "fastest"),
    ],
)
def test_a_fault_is_told_once(
    server: Any, sockets: Sockets, class_type: str, changes: dict[str, Any], message: str
) -> None:
    ends = CLASSES[class_type].define_schema().is_output_node
    for seed in range(1000):
        weaver = Weaver(random.Random(seed), sockets)
        prompt = weaver.weave() if not ends else weaver.ending_with(class_type)
        found = [node_id for node_id, node in prompt.items() if node["class_type"] == class_type]
        # Steps are not judged next to sigmas.
        if found and not _is_ambiguous(prompt) and "sigmas" not in prompt[found[0]]["inputs"]:
            break
    prompt[found[0]]["inputs"] |= changes
    _, theirs = server.post("/prompt", {"prompt": prompt})
    (error,) = theirs["node_errors"][found[0]]["errors"]
    assert message in error["details"]
    assert error["extra_info"]["exception_type"].rpartition(".")[0] in {"", "wanstream"}, (
        "not the path of the pack"
    )


def test_a_request_without_a_workflow(server: Any) -> None:
    _, theirs = server.post("/prompt", {})
    ours = validate_workflow(
        None, NODES, models=server.base / "models", input_dir=server.base / "input"
    )
    assert _verdict(ours.error, ours.node_errors) == _verdict(
        theirs["error"], theirs["node_errors"]
    )


NOT_PLAIN = [
    *(("WanStreamSampler", "leftover_noise", value) for value in ("disable", "false", "", None, 2)),
    *(("WanStreamSampler", "steps", value) for value in (64.7, True, "64.7")),
    *(
        ("WanStreamSampler", "boundary_ratio", value)
        for value in (float("nan"), float("inf"), "nan", True)
    ),
    ("WanStreamSampler", "flow_shift", {"__value__": float("nan")}),
    *(("WanStreamTextEncode", "positive", value) for value in (True, {"text": "a cat"})),
]


@pytest.mark.parametrize(("class_type", "name", "value"), NOT_PLAIN)
def test_a_constant_that_python_would_change_is_refused(
    server: Any, sockets: Sockets, class_type: str, name: str, value: Any
) -> None:
    prompt = next(
        prompt
        for seed in range(1000)
        if not _is_ambiguous(prompt := Weaver(random.Random(seed), sockets).weave())
        and any(node["class_type"] == class_type for node in prompt.values())
    )
    blamed = next(node_id for node_id, node in prompt.items() if node["class_type"] == class_type)
    prompt[blamed]["inputs"][name] = value
    ours, theirs = _judge_twice(server, prompt)
    assert ours[1][blamed] == theirs[1][blamed] == ["invalid_input_type"]
    _, answer = server.post("/prompt", {"prompt": prompt})
    (error,) = answer["node_errors"][blamed]["errors"]
    assert "write" in error["details"]


@pytest.mark.parametrize("back", ["self", "round"])
def test_a_cycle(server: Any, back: str) -> None:
    """Older versions reach the recursion limit and report only that the outputs failed.

    Newer ones name a cycle.
    """
    prompt: Prompt = {
        "1": {
            "class_type": "WanStreamImageToVideo",
            "inputs": {"positive": ["2" if back == "round" else "1", 0]},
        },
        "2": {"class_type": "WanStreamImageToVideo", "inputs": {"positive": ["1", 0]}},
        "3": {"class_type": "WanStreamVAEDecode", "inputs": {"vae": "wan", "latent": ["2", 2]}},
        "4": {"class_type": "WanStreamSaveVideo", "inputs": {"images": ["3", 0]}},
    }
    for node in prompt.values():
        for socket in sockets_of(CLASSES[node["class_type"]].INPUT_TYPES()).values():
            if "default" in socket.options:
                node["inputs"].setdefault(socket.name, socket.options["default"])
    ours, (outcome, errors) = _judge_twice(server, prompt)
    others = {
        node: [kind for kind in kinds if kind != "dependency_cycle"]
        for node, kinds in errors.items()
    }
    assert ours == (outcome, others)
