"""Sigmas and guider in the embedded host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.models import NeedsComfyUIError
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.guider import WanStreamGuider, WanStreamSigmas
from wanstream.nodes.loaders import WanStreamOneExpert
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.guidance import Guidance
from wanstream.sampling.steps.schedules import make_schedule
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing.model import I2V_FILE, T2V_FILE
from wanstream.tests.support.embedded import embedded_host, run_workflow

WORKFLOW = Path(__file__).parents[3] / "workflows" / "api" / "t2v.json"
PAIR = {"boundary_ratio": 0.875, "guidance_high": 4.0, "guidance_low": 3.0}
NODES = asyncio.run(WanStreamExtension().get_node_list())


@pytest.fixture
def nodes() -> Iterator[dict[str, Any]]:
    """The shipped workflow, small, with sigmas from the node `sigmas`, not from the settings."""
    nodes = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    nodes["latent"]["inputs"].update(width=32, height=32, frames=5)
    settings = {"schedule": "simple", "steps": 4, "flow_shift": 5.0, "denoise": 1.0}
    nodes["sigmas"] = {"class_type": "WanStreamSigmas", "inputs": settings}
    nodes["sampler"]["inputs"].update(steps=9, flow_shift=1.0, sigmas=["sigmas", 0])
    yield nodes
    embedded_host.free_experts()


def _sigmas_taken(nodes: dict[str, Any], models: Path, output: Path) -> list[float]:
    history = run_workflow(nodes, nodes=NODES, models=models, output=output, input_dir=output)
    return [step["sigma"] for step in history.outputs["sampler"]["wanstream_timeline"][0]["steps"]]


@pytest.mark.parametrize("schedule", ["simple", "wan"])
def test_sigmas_feed_our_sampler(
    nodes: dict[str, Any], schedule: str, sample_models: Path, tmp_path: Path
) -> None:
    nodes["sigmas"]["inputs"]["schedule"] = schedule
    assert _sigmas_taken(nodes, sample_models, tmp_path) == list(
        make_schedule(schedule, 4, 5.0).sigmas[:-1]
    )


def test_a_denoise_takes_the_last_steps(
    nodes: dict[str, Any], sample_models: Path, tmp_path: Path
) -> None:
    nodes["sigmas"]["inputs"]["denoise"] = 0.5
    assert _sigmas_taken(nodes, sample_models, tmp_path) == list(
        make_schedule("simple", 8, 5.0).sigmas[4:-1]
    )


def test_no_denoise_is_refused_by_our_sampler(
    nodes: dict[str, Any], sample_models: Path, tmp_path: Path
) -> None:
    nodes["sigmas"]["inputs"]["denoise"] = 0.0
    with pytest.raises(NodeFailedError, match="0 sigmas make no step"):
        _sigmas_taken(nodes, sample_models, tmp_path)


def test_sigmas_are_refused_with_the_number() -> None:
    with pytest.raises(RequestError, match="flow shift -1: give a positive number"):
        WanStreamSigmas.execute("simple", 4, -1.0, 1.0)


def test_a_guider_needs_comfyui() -> None:
    text = [[torch.zeros(1, 1, 4096), {}]]
    experts = ExpertsRef(high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"))
    with pytest.raises(NeedsComfyUIError, match=r"a GUIDER needs ComfyUI.* use Wan Sampler"):
        WanStreamGuider.execute(experts, text, text, 12.0, **PAIR)


@pytest.mark.parametrize("file", [T2V_FILE, I2V_FILE], ids=["text", "image"])
def test_a_guider_of_one_expert_needs_comfyui_too(
    file: Path, sample_models: Path, tmp_path: Path
) -> None:
    text = [[torch.zeros(1, 1, 4096), {}]]
    folders = Folders(models=sample_models, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, device=torch.device("cpu")):
        (experts,) = WanStreamOneExpert.execute(file.name, "fp32").args
        settings = {**PAIR, "guidance": Guidance(steps=(4.0, 1.0)), "windows": ContextWindows()}
        with pytest.raises(NeedsComfyUIError, match="a GUIDER needs ComfyUI"):
            WanStreamGuider.execute(experts, text, text, 3.0, cache=FirstBlockCache(), **settings)
        embedded_host.free_experts()


def test_a_boundary_out_of_range_is_refused_without_comfyui_too() -> None:
    text = [[torch.zeros(1, 1, 4096), {}]]
    experts = ExpertsRef(high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"))
    with pytest.raises(RequestError, match=r"boundary ratio 1\.5: give 0 to 1"):
        WanStreamGuider.execute(experts, text, text, 12.0, **{**PAIR, "boundary_ratio": 1.5})
