"""Warnings about suspicious inputs: on their node, in the log, and as errors in strict mode."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.host import io
from wanstream.host.comfy.adapter.user_settings import STRICT, setting_is_on
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension, sockets
from wanstream.nodes.runs.notices import NOTICES, StrictError
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.tests.support.embedded import embedded_host, run_workflow

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
PACK_NODES = asyncio.run(WanStreamExtension().get_node_list())
HIGH, LOW = (f"wan2.2_t2v_{place}_noise_14B_fp8_scaled.safetensors" for place in ("high", "low"))
LORA_HIGH, LORA_LOW = (
    f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{place}_noise.safetensors" for place in ("high", "low")
)
IMAGE_LORA = "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors"

Open = Callable[..., History]


class Opened(io.ComfyNode):
    """Output node, to run a workflow that only opens experts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Opened",
            inputs=[sockets.Experts.Input("experts")],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, experts: ExpertsRef) -> io.NodeOutput:
        return io.NodeOutput()


def graph(high: str = HIGH, low: str = LOW, loras: tuple[str, str] | None = None) -> dict[str, Any]:
    names = {"high_noise": high, "low_noise": low, "compute_dtype": "fp32"}
    nodes: dict[str, Any] = {
        "experts": {"class_type": "WanStreamExperts", "inputs": names},
        "end": {"class_type": "Opened", "inputs": {"experts": ["experts", 0]}},
    }
    if loras is not None:
        given = {
            "high_noise": loras[0],
            "low_noise": loras[1],
            "strength_high": 1.0,
            "strength_low": 1.0,
        }
        nodes["lora"] = {
            "class_type": "WanStreamLora",
            "inputs": {"experts": ["experts", 0], **given},
        }
        nodes["end"]["inputs"]["experts"] = ["lora", 0]
    return nodes


@pytest.fixture
def opened(sample_models: Path, tmp_path: Path) -> Iterator[Open]:
    """Run a workflow's loaders on the test model."""

    def run(prompt: dict[str, Any], *, strict: bool = False) -> History:
        return run_workflow(
            prompt,
            nodes=[*PACK_NODES, Opened],
            models=sample_models,
            output=tmp_path / "output",
            input_dir=tmp_path,
            strict=strict,
        )

    yield run
    embedded_host.free_experts()


CASES = {
    "experts swapped": ({"high": LOW, "low": HIGH}, "experts", "the experts look swapped"),
    "one file twice": ({"high": HIGH, "low": HIGH}, "experts", "is both experts"),
    "LoRAs swapped": ({"loras": (LORA_LOW, LORA_HIGH)}, "lora", "the LoRAs look swapped"),
    "a LoRA for images": ({"loras": (IMAGE_LORA, "none")}, "lora", "is a LoRA for image to video"),
}


@pytest.mark.parametrize(("files", "node", "message"), CASES.values(), ids=CASES)
def test_what_looks_wrong_is_on_the_node_and_in_the_log(
    opened: Open, caplog: pytest.LogCaptureFixture, files: dict[str, Any], node: str, message: str
) -> None:
    with caplog.at_level(logging.WARNING, "wanstream.nodes"):
        ui = opened(graph(**files)).outputs[node]
    (shown,) = ui["text"]
    assert shown.startswith("Warning: ")
    assert message in shown
    (notice,) = ui[NOTICES]
    assert (notice["level"], notice["text"]) == ("wrong", shown.removeprefix("Warning: "))
    assert notice["exchange"] == (("high_noise", "low_noise") if "swapped" in message else None)
    assert notice["values"] == {
        name: graph(**files)[node]["inputs"][name] for name in ("high_noise", "low_noise")
    }
    assert [
        record.getMessage() for record in caplog.records if record.name == "wanstream.nodes"
    ] == [line.removeprefix("Warning: ") for line in shown.splitlines()]


@pytest.mark.parametrize(("files", "node", "message"), CASES.values(), ids=CASES)
def test_it_is_an_error_where_the_user_is_strict(
    opened: Open, files: dict[str, Any], node: str, message: str
) -> None:
    with pytest.raises(NodeFailedError, match=message) as failed:
        opened(graph(**files), strict=True)
    assert isinstance(failed.value.__cause__, StrictError)
    assert failed.value.node_id == node
    assert not embedded_host.settings().strict, "of that run alone"


SPELT = {
    "half under a wrapper": (lambda key: f"_orig_mod.{key}" if ".1." in key else key, None),
    "half under an unknown prefix": (
        lambda key: f"foo.{key}" if ".1." in key else key,
        "unknown prefix 'foo.",
    ),
    "a misspelt layer": (lambda key: key.replace("ffn.0", "fnn.0"), "4 of 40 layers"),
    "a block of another model": (
        lambda key: key.replace(".blocks.3.", ".vace_blocks.3."),
        "10 of 40 .* of Wan VACE",
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", SPELT)
def test_a_lora_used_in_part_is_on_the_node(
    opened: Open, sample_models: Path, request: pytest.FixtureRequest, case: str, strict: bool
) -> None:
    spell, message = SPELT[case]
    name = "part.safetensors"
    whole = load_file(sample_models / "loras" / LORA_HIGH)
    save_file({spell(key): tensor for key, tensor in whole.items()}, sample_models / "loras" / name)
    request.addfinalizer((sample_models / "loras" / name).unlink)
    prompt = graph(loras=(name, "none"))
    if message and strict:
        with pytest.raises(NodeFailedError, match=message) as failed:
            opened(prompt, strict=True)
        assert failed.value.node_id == "lora"
        assert isinstance(failed.value.__cause__, StrictError)
        return
    outputs = opened(prompt, strict=strict).outputs
    shown = outputs.get("lora", {}).get("text", [""])[0]
    assert re.search(message, shown) if message else not shown
    assert not message or shown.startswith(f"Warning: {name} is used in part: ")


def test_a_lora_of_which_nothing_is_used_is_refused_when_the_graph_starts(
    opened: Open, sample_models: Path, request: pytest.FixtureRequest
) -> None:
    whole = load_file(sample_models / "loras" / LORA_HIGH)
    save_file(
        {f"foo.{key}": tensor for key, tensor in whole.items()},
        sample_models / "loras" / "foo.safetensors",
    )
    request.addfinalizer((sample_models / "loras" / "foo.safetensors").unlink)
    with pytest.raises(InvalidWorkflowError, match=r"unknown prefix 'foo\..*' before blocks\.0\."):
        opened(graph(loras=("foo.safetensors", "none")))


@pytest.mark.parametrize("name", sorted(path.stem for path in WORKFLOWS.glob("*.json")))
def test_no_shipped_workflow_looks_wrong(opened: Open, name: str) -> None:
    prompt = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    loaders = {"WanStreamExperts", "WanStreamOneExpert", "WanStreamLora"}
    kept = {node_id: node for node_id, node in prompt.items() if node["class_type"] in loaders}
    if not kept:
        pytest.skip("opens no experts of ours")
    ends = {
        f"end {node_id}": {"class_type": "Opened", "inputs": {"experts": [node_id, 0]}}
        for node_id in kept
    }
    history = opened(kept | ends, strict=True)
    assert not any("text" in shown for shown in history.outputs.values())


@pytest.mark.slow  # runs whole workflows
@pytest.mark.parametrize(("strict", "code"), [(True, FAILED), (False, DONE)])
def test_the_command_line_warns_or_fails(
    sample_models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], strict: bool, code: int
) -> None:
    changes = {
        "latent.width": 32,
        "latent.height": 32,
        "latent.frames": 1,
        "sampler.steps": 1,
        "experts.high_noise": LOW,
        "experts.low_noise": HIGH,
    }
    command = [
        "run",
        str(WORKFLOWS / "t2v.json"),
        "--models",
        str(sample_models),
        "--out",
        str(tmp_path / "out"),
    ]
    command += [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    assert main([*command, *(["--strict"] if strict else [])]) == code
    said = capfd.readouterr()
    assert "the experts look swapped" in said.err
    assert ("warning: experts: the experts look swapped" in said.err) == (not strict)


def test_a_server_is_strict_by_its_own_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.csv").write_text("sampler.seed\n1\n")
    command = ["batch", str(tmp_path / "jobs.csv"), "--workflow", str(WORKFLOWS / "t2v.json")]
    assert (
        main(
            [*command, "--out", str(tmp_path / "out"), "--server", "http://127.0.0.1:9", "--strict"]
        )
        == INVALID
    )
    assert "enable its setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "strict"),
    [
        ('{"WanStream.Strict": true}', True),
        ('{"WanStream.Strict": false}', False),
        ('{"WanStream.Strict": "true"}', False),
        ("{}", False),
        ("[]", False),
        ("{", False),
        (None, False),
    ],
)
def test_the_setting_is_read_from_the_file_of_comfyui(
    tmp_path: Path, content: str | None, strict: bool
) -> None:
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    assert setting_is_on(tmp_path / "settings.json", STRICT) == strict
