"""The shipped API workflows in a real ComfyUI server, on the sample model: the same latents as in the embedded host.

Both run in ComfyUI's Python, so torch is the same, and latents are compared to the bit.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from wanstream.cli.sample_model import write_sample_model

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).parent.parent.parent
RUNS = {"t2v": ("t2v", 42), "t2v, other seed": ("t2v", 43), "i2v": ("i2v", 42)}
EXPERTS = {"t2v": ["high"] * 3 + ["low"], "i2v": ["high"] * 2 + ["low"] * 2}
"""Of four steps, at the boundaries and flow shifts that the workflows set."""

# The embedded host is what this package picks in a Python that finds no ComfyUI.
EMBEDDED = """
import asyncio, json, sys
from pathlib import Path
from safetensors.torch import save_file
from wanstream.host.embedded_run import run_workflow
from wanstream.nodes import WanStreamExtension

prompts, base, results = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
nodes = asyncio.run(WanStreamExtension().get_node_list())
places = {"models": base / "models", "output": base / "embedded", "input_dir": base / "input"}
latents = {}
for name, prompt in prompts.items():
    (latent,) = run_workflow(prompt, nodes=nodes, keep=["sampler"], **places).results["sampler"]
    latents[name] = latent["samples"].contiguous()
save_file(latents, results)
"""


def _prompt(workflow: str, seed: int) -> dict[str, Any]:
    """A shipped workflow, small enough for a CPU; nothing else is changed."""
    prompt: dict[str, Any] = json.loads((ROOT / "workflows" / "api" / f"{workflow}.json").read_text(encoding="utf-8"))
    sized = next(node for node in prompt.values() if "frames" in node["inputs"] and "width" in node["inputs"])
    sized["inputs"] |= {"width": 64, "height": 48, "frames": 9}
    prompt["sampler"]["inputs"] |= {"steps": 4, "seed": seed}
    return prompt


@pytest.fixture(scope="module")
def stocked(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base directory with the sample model and the start image in it."""
    sample = write_sample_model(tmp_path_factory.mktemp("sample")).folder
    for entry in sample.glob("*/*"):
        link = base / "models" / entry.relative_to(sample)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(entry, target_is_directory=entry.is_dir())
    Image.effect_noise((80, 60), 90).convert("RGB").save(base / "input" / "example.png")
    return base


@pytest.fixture(scope="module")
def embedded(comfyui: Any, stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The latents of all runs, made by the embedded host."""
    folder = tmp_path_factory.mktemp("embedded")
    (folder / "wanstream").symlink_to(ROOT, target_is_directory=True)
    prompts = json.dumps({name: _prompt(*run) for name, run in RUNS.items()})
    command = [str(comfyui.python), "-c", EMBEDDED, prompts, str(stocked), str(folder / "latents")]
    environment = {**comfyui.environment(), "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "latents")


@pytest.fixture(scope="module")
def run_in_server(server: Any, stocked: Path) -> Callable[[str], tuple[torch.Tensor, dict[str, Any]]]:
    """`run_in_server(name)` runs one of RUNS and returns its latent and its history."""

    def run(name: str) -> tuple[torch.Tensor, dict[str, Any]]:
        prompt = copy.deepcopy(_prompt(*RUNS[name]))
        prompt["tap"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "tap"}}
        history: dict[str, Any] = server.run(prompt)
        (saved,) = history["outputs"]["tap"]["latents"]
        return load_file(stocked / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"], history

    return run


def _timeline(history: dict[str, Any]) -> dict[str, Any]:
    (timeline,) = history["outputs"]["sampler"]["wanstream_timeline"]
    return dict(timeline)


def _cached(history: dict[str, Any]) -> set[str]:
    return next(set(data["nodes"]) for event, data in history["status"]["messages"] if event == "execution_cached")


@pytest.mark.parametrize("name", ["t2v", "i2v"])
def test_a_workflow_gives_the_same_latent_in_both_hosts(
    run_in_server: Callable[..., Any], embedded: dict[str, torch.Tensor], stocked: Path, name: str
) -> None:
    latent, history = run_in_server(name)
    assert torch.equal(latent, embedded[name])
    assert [step["expert"] for step in _timeline(history)["steps"]] == EXPERTS[name]
    (video,) = history["outputs"]["save"]["images"]
    assert (stocked / "output" / video["subfolder"] / video["filename"]).stat().st_size > 0


def test_another_seed_uses_the_right_experts_and_reloads_nothing(
    run_in_server: Callable[..., Any], embedded: dict[str, torch.Tensor]
) -> None:
    _, first = run_in_server("t2v")
    latent, history = run_in_server("t2v, other seed")
    assert {"experts", "policy", "text", "latent"} <= _cached(history)
    assert not torch.equal(embedded["t2v"], embedded["t2v, other seed"])
    assert torch.equal(latent, embedded["t2v, other seed"])
    timeline = _timeline(history)
    assert [step["expert"] for step in timeline["steps"]] == EXPERTS["t2v"]
    assert _timeline(first)["outer_bytes"] > 0
    assert timeline["outer_bytes"] == 0, "the experts were opened again"


def test_cancel_ends_a_run_and_leaves_the_server_usable(
    server: Any, run_in_server: Callable[..., Any], embedded: dict[str, torch.Tensor]
) -> None:
    endless = _prompt("t2v", 44)
    endless["sampler"]["inputs"]["steps"] = 1000
    prompt_id = server.queue(endless)
    time.sleep(2)  # most likely inside the sampler by now; the outcome is the same if not
    server.post("/interrupt", {})
    events = [event for event, _ in server.wait(prompt_id)["status"]["messages"]]
    assert events[-1] == "execution_interrupted"
    latent, _ = run_in_server("t2v")
    assert torch.equal(latent, embedded["t2v"])
