"""LoRA node in the embedded host: output, and errors about bad files on the right node."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.guider import WanStreamGuider
from wanstream.sampling.steps import RequestError
from wanstream.schema import StepRange
from wanstream.schema.refs.experts import ExpertsRef, LoraRef
from wanstream.tests.support.embedded import embedded_host, run_workflow

T2V = Path(__file__).parents[3] / "workflows" / "api" / "t2v.json"
NODES = asyncio.run(WanStreamExtension().get_node_list())
NAME = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
PAIR = {
    "high_noise": NAME.format("high"),
    "low_noise": NAME.format("low"),
    "strength_high": 1.0,
    "strength_low": 1.0,
}
NEITHER = {"high_noise": "none", "low_noise": "none", "strength_high": 1.0, "strength_low": 1.0}

Workflow = dict[str, dict[str, Any]]
Run = Callable[..., History]


@pytest.fixture
def folders(tmp_path: Path, sample_models: Path) -> dict[str, Path]:
    """Return the test model's folders with a separate `loras` folder."""
    models = tmp_path / "models"
    models.mkdir()
    for folder in sample_models.iterdir():
        if folder.name != "loras":
            (models / folder.name).symlink_to(folder, target_is_directory=True)
    shutil.copytree(sample_models / "loras", models / "loras")
    return {"models": models, "output": tmp_path / "output", "input_dir": tmp_path / "input"}


@pytest.fixture
def run(folders: dict[str, Path]) -> Iterator[Run]:
    """`run(*loras)` runs text to video with these LoRA nodes in a row up to the sampler."""

    def run(*loras: dict[str, Any], keep: str = "sampler") -> Any:
        history = run_workflow(workflow(*loras), nodes=NODES, only=[keep], **folders)
        return history.results[keep][0]

    yield run
    embedded_host.free_experts()


def workflow(*loras: dict[str, Any]) -> Workflow:
    nodes: Workflow = json.loads(T2V.read_text(encoding="utf-8"))
    nodes["latent"]["inputs"].update(width=32, height=32, frames=1)
    nodes["sampler"]["inputs"].update(steps=2, switch_step=1)
    for number, lora in enumerate(loras):
        nodes[f"lora{number}"] = {
            "class_type": "WanStreamLora",
            "inputs": {"experts": nodes["sampler"]["inputs"]["experts"], **lora},
        }
        nodes["sampler"]["inputs"]["experts"] = [f"lora{number}", 0]
    return nodes


@pytest.mark.slow  # runs whole workflows
def test_a_pair_reaches_both_experts(run: Run) -> None:
    plain, high, low = (
        run()["samples"],
        {**PAIR, "low_noise": "none"},
        {**PAIR, "high_noise": "none"},
    )
    results = [
        plain,
        *(run(loras)["samples"] for loras in (PAIR, high, low, {**high, "strength_high": 0.5})),
    ]
    for i, one in enumerate(results):
        assert torch.isfinite(one).all()
        assert not any(torch.equal(one, other) for other in results[i + 1 :])
    assert torch.equal(run({**PAIR, "strength_high": 0.0, "strength_low": 0})["samples"], plain)
    assert torch.allclose(run(high, low)["samples"], results[1], rtol=0.1, atol=0.1)


def test_what_travels_is_a_value(run: Run, folders: dict[str, Path]) -> None:
    found: ExpertsRef = run(
        {**PAIR, "strength_low": 0.25}, NEITHER, {**PAIR, "high_noise": "none"}, keep="lora2"
    )
    high, low = (folders["models"] / "loras" / PAIR[name] for name in ("high_noise", "low_noise"))
    assert found.loras == (
        LoraRef(high_noise=high, low_noise=low, strength_high=1.0, strength_low=0.25),
        LoraRef(high_noise=None, low_noise=low, strength_high=1.0, strength_low=1.0),
    )
    assert hash(found) != hash(run(keep="experts"))


def test_neither_passes_through(run: Run) -> None:
    assert run(NEITHER, keep="lora0") == run(keep="experts")


def test_a_lora_of_another_model_is_reported_on_its_node(
    run: Run, folders: dict[str, Path]
) -> None:
    wide = {
        "blocks.0.self_attn.q.lora_down.weight": torch.ones(4, 5120),
        "blocks.0.self_attn.q.lora_up.weight": torch.ones(5120, 4),
    }
    save_file(wide, folders["models"] / "loras" / "wide.safetensors")
    with pytest.raises(
        NodeFailedError, match=r"\[5120, 5120\].*\[256, 256\].*for a 14B model"
    ) as failed:
        run(PAIR, {**NEITHER, "low_noise": "wide.safetensors"})
    assert failed.value.node_id == "lora1"


def test_numbers_that_are_not_finite_are_reported(run: Run, folders: dict[str, Path]) -> None:
    path = folders["models"] / "loras" / PAIR["low_noise"]
    tensors = load_file(path)
    key = "diffusion_model.blocks.1.ffn.0.lora_down.weight"
    tensors[key][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(NodeFailedError, match=f"{key} .* not finite"):
        run(PAIR)


def test_names_are_those_of_the_folder(run: Run) -> None:
    for name in ("absent.safetensors", "../vae/wan_2.1_vae.safetensors"):
        with pytest.raises(InvalidWorkflowError, match="not in list"):
            run({**PAIR, "high_noise": name})


@pytest.mark.parametrize("strength", [10.01, -11, "much"])
def test_strengths_have_limits(run: Run, strength: object) -> None:
    with pytest.raises(InvalidWorkflowError, match="strength_low"):
        run({**PAIR, "strength_low": strength})


class TestStrengthsBySteps:
    @pytest.mark.slow  # runs whole workflows
    def test_a_run_of_two_stages_takes_the_lora_in_the_second_only(self, run: Run) -> None:
        found = run({**PAIR, "strength_steps": "0: 0"})["samples"]
        alone = run({**PAIR, "high_noise": "none"})["samples"]
        assert torch.equal(found, alone), "step 0 is that of the high-noise expert"
        assert torch.equal(run({**PAIR, "strength_steps": ""})["samples"], run(PAIR)["samples"])

    def test_what_travels_is_a_value_too(self, run: Run) -> None:
        found: ExpertsRef = run({**PAIR, "strength_steps": "1: 0.5, 0: 0"}, keep="lora0")
        assert found.loras[0].steps == (StepRange(0, 0, 0.0), StepRange(1, 1, 0.5))

    @pytest.mark.parametrize("text", ["0-1: 0, 1: 1", "0: much", "0", "1-0: 0"])
    def test_what_cannot_be_read_is_refused_before_a_run(self, run: Run, text: str) -> None:
        with pytest.raises(InvalidWorkflowError, match=r"as in 0-1: 0|ends before it begins"):
            run({**PAIR, "strength_steps": text})

    def test_a_range_that_leaves_the_run_is_reported_with_its_steps(self, run: Run) -> None:
        with pytest.raises(
            NodeFailedError, match="strength for steps '0-2: 0', and the run has 2 steps, 0 to 1"
        ):
            run({**PAIR, "strength_steps": "0-2: 0"})

    def test_the_guider_refuses_them_by_name(self) -> None:
        lora = LoraRef(high_noise=Path("fast.safetensors"), steps=(StepRange(0, 1, 0.0),))
        experts = ExpertsRef(
            high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"), loras=(lora,)
        )
        settings = {"boundary_ratio": 0.875, "guidance_high": 1.0, "guidance_low": 1.0}
        with pytest.raises(
            RequestError, match=r"strength_steps.*which Wan Guider does not apply.*Use Wan Sampler"
        ):
            WanStreamGuider.execute(experts, [], [], 5.0, **settings)
