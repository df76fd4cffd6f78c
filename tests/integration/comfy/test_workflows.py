"""Every shipped API workflow in a real ComfyUI server, on the test model.

Workflows with only our nodes also run in the embedded host, in ComfyUI's Python, so torch is the
same and latents are compared bit by bit. The others are compared with their references: ComfyUI's
own two-sampler graph, and our sampler.
"""

from __future__ import annotations

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

from wanstream.nodes.runs import write_video
from wanstream.testing.components import save_vae_file
from wanstream.testing.model import VAE_FILE, write_tiny_model
from wanstream.testing.weights import make_vae
from wanstream.tools.comfyui import ComfyUI, Server, name_model_files, names_of_workflows

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
EXPERTS = {
    "t2v": ["high"] * 3 + ["low"],
    "i2v": ["high"] * 2 + ["low"] * 2,
    "flf2v": ["high"] * 2 + ["low"] * 2,
    "draft": ["high"] * 3 + ["low"],
    "t2v_lightning": ["high"] * 2 + ["low"] * 2,
    "i2v_lightning": ["high"] * 2 + ["low"] * 2,
    "long_video": ["high"] * 2 + ["low"] * 2,
    "continue_video": ["high"] * 2 + ["low"] * 2,
    "three_stages": ["high"] * 4 + ["low"] * 2,
    "native_mixed": ["high"] * 3 + ["low"],
    "wan21_t2v": ["high"] * 4,
    "wan21_i2v": ["high"] * 4,
    "wan22_5b_t2v": ["high"] * 4,
    "wan22_5b_i2v": ["high"] * 4,
    "fun_control": ["high"] * 2 + ["low"] * 2,
    "fun_inp": ["high"] * 2 + ["low"] * 2,
    "bernini": ["high"] * 3 + ["low"],
}
"""Four steps, or six in three stages, at the workflows' own switch, boundaries and flow shifts."""

OF_5B = ["wan22_5b_t2v", "wan22_5b_i2v"]
CLIPS = ["long_video", "continue_video"]
DISTILLED = ["t2v_lightning", "i2v_lightning", "three_stages"]
OURS = ["t2v", "i2v", "flf2v", "draft", *DISTILLED, *CLIPS, "wan21_t2v", "wan21_i2v", *OF_5B]
VARIANTS = ["fun_control", "fun_inp", "bernini"]
OURS += VARIANTS
OVER_WORKERS = ["workers", *(f"{name}_workers" for name in VARIANTS)]
"""See `test_workers.py`."""
NATIVE = [
    f"native_{name}"
    for name in ("wan22", "joined", "vace", "animate", "flux", "qwen_image", "ltx2")
]
OTHER_SEED = "t2v, other seed"
AS_GUIDER = "our sampler, set as the guider's workflow is"

# This package uses the embedded host in a Python without ComfyUI.
EMBEDDED = """
import asyncio, json, sys
from pathlib import Path
from safetensors.torch import save_file
from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import load_workflow
from wanstream.nodes import WanStreamExtension

prompts, base, results = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
nodes = asyncio.run(WanStreamExtension().get_node_list())
folders = Folders(models=base / "models", output=base / "embedded", input=base / "input")
host = EmbeddedHost()
latents = {}
for name, prompt in prompts.items():
    workflow = load_workflow(prompt, host=host, nodes=nodes, folders=folders)
    latent, _ = workflow.run(keep=["sampler"]).results["sampler"]
    latents[name] = latent["samples"].contiguous()
save_file(latents, results)
"""


PLACES = ("high_noise", "low_noise")


def _prompt(workflow: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A shipped workflow, small enough for a CPU, with `changes` to inputs by node.

    Nothing else is changed.

    ComfyUI's text encoder loader supports only the real one, so the test node replaces it.
    """
    prompt: dict[str, Any] = json.loads(
        (ROOT / "workflows" / "api" / f"{workflow}.json").read_text(encoding="utf-8")
    )
    height, steps = 64 if workflow in OF_5B else 48, len(EXPERTS.get(workflow, range(4)))
    for node in prompt.values():
        for name, value in {
            "width": 64,
            "height": height,
            "frames": 9,
            "length": 9,
            "steps": steps,
        }.items():
            if name in node["inputs"]:
                node["inputs"][name] = value
        if node["class_type"] == "CLIPLoader":
            node["class_type"] = "TestClip"
    for node, inputs in changes.items():
        prompt[node]["inputs"] |= inputs
    return prompt


def _embedded_prompts() -> dict[str, dict[str, Any]]:
    prompts = {name: _prompt(name) for name in OURS}
    prompts[OTHER_SEED] = _prompt("t2v", sampler={"seed": 43})
    set_by_guider = {"solver": "euler", "schedule": "simple", "flow_shift": 8.0}
    guidance = {"guidance_high": 3.5, "guidance_low": 3.5}
    prompts[AS_GUIDER] = _prompt(
        "t2v", experts={"compute_dtype": "fp32"}, sampler=set_by_guider | guidance
    )
    return prompts


@pytest.fixture(scope="module")
def stocked(vae_width: int, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base directory with the test model and the start image in it."""
    names = names_of_workflows([*OURS, "native_mixed", "guider", "benchmark"])
    sample = write_tiny_model(tmp_path_factory.mktemp("sample"), layers=4, names=names).folder
    for entry in sample.glob("*/*"):
        link = base / "models" / entry.relative_to(sample)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(entry, target_is_directory=entry.is_dir())
    (base / "models" / VAE_FILE).unlink()
    save_vae_file(make_vae(seed=0, base_dim=vae_width), base / "models" / VAE_FILE)
    Image.effect_noise((80, 60), 90).convert("RGB").save(base / "input" / "example.png")
    frames = torch.rand(9, 60, 80, 3, generator=torch.Generator().manual_seed(2))
    write_video(base / "input" / "example.mp4", frames, fps=16, crf=20, metadata={})
    return base


@pytest.fixture(scope="module")
def embedded(
    comfyui: Any, stocked: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """All runs' latents, made by the embedded host."""
    folder = tmp_path_factory.mktemp("embedded")
    (folder / "wanstream").symlink_to(ROOT, target_is_directory=True)
    prompts = json.dumps(_embedded_prompts())
    command = [str(comfyui.python), "-c", EMBEDDED, prompts, str(stocked), str(folder / "latents")]
    environment = {**comfyui.environment(), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "latents")


Run = Callable[[dict[str, Any]], tuple[torch.Tensor, dict[str, Any]]]


@pytest.fixture(scope="module")
def run_in_server(server: Any, stocked: Path) -> Run:
    """`run_in_server(prompt)` returns a workflow's latent at node "sampler", and the history."""

    def run(prompt: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        tap = {
            "class_type": "SaveLatent",
            "inputs": {"samples": ["sampler", 0], "filename_prefix": "tap"},
        }
        history: dict[str, Any] = server.run({**prompt, "tap": tap})
        (saved,) = history["outputs"]["tap"]["latents"]
        return load_file(stocked / "output" / saved["subfolder"] / saved["filename"])[
            "latent_tensor"
        ], history

    return run


def _timeline(history: dict[str, Any]) -> dict[str, Any]:
    (timeline,) = history["outputs"]["sampler"]["wanstream_timeline"]
    return dict(timeline)


def _cached(history: dict[str, Any]) -> set[str]:
    return next(
        set(data["nodes"])
        for event, data in history["status"]["messages"]
        if event == "execution_cached"
    )


def _check_video(history: dict[str, Any], stocked: Path) -> None:
    (video,) = history["outputs"]["save"]["images"]
    assert (stocked / "output" / video["subfolder"] / video["filename"]).stat().st_size > 0


def _check_latent(latent: torch.Tensor) -> None:
    assert latent.shape in ((1, 16, 3, 6, 8), (1, 48, 3, 4, 4))
    assert torch.isfinite(latent).all()
    assert latent.std() > 0.1


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_no_workflow_is_left_out() -> None:
    shipped = {path.stem for path in (ROOT / "workflows" / "api").glob("*.json")}
    assert shipped == {*OURS, *NATIVE, "native_mixed", "guider", "benchmark", *OVER_WORKERS}


@pytest.mark.parametrize("name", NATIVE)
def test_a_workflow_of_a_native_model_is_valid(
    comfyui: ComfyUI, server: Server, stocked: Path, name: str
) -> None:
    """Classes and inputs exist, and values and links are accepted except an empty model file."""
    prompt: dict[str, Any] = json.loads(
        (ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8")
    )
    shown = server.get("/object_info")
    missing = {node["class_type"] for node in prompt.values()} - shown.keys()
    if missing and comfyui.version() < (0, 4):
        pytest.skip(f"this ComfyUI has no {', '.join(sorted(missing))}")
    assert not missing
    for node in prompt.values():
        inputs = shown[node["class_type"]]["input"]
        known = inputs.get("required", {})
        assert known.keys() <= node["inputs"].keys() <= {*known, *inputs.get("optional", ())}
    name_model_files(stocked / "models")
    with server.held():
        status, answer = server.post("/prompt", {"prompt": prompt})
    streamed = {
        at: node
        for at, node in prompt.items()
        if node["class_type"] == "WanStreamLoadDiffusionModel"
    }
    models = stocked / "models" / "diffusion_models"
    empty = {
        at
        for at, node in streamed.items()
        if not (models / node["inputs"]["unet_name"]).stat().st_size
    }
    assert status == (400 if empty else 200), answer
    assert answer["node_errors"].keys() == empty
    for node in answer["node_errors"].values():
        (error,) = node["errors"]
        assert (
            error["details"].splitlines()[0].endswith(".safetensors: is empty: download it again")
        )


@pytest.mark.parametrize("name", OURS)
def test_a_workflow_gives_the_same_latent_in_both_hosts(
    comfyui: ComfyUI,
    run_in_server: Run,
    embedded: dict[str, torch.Tensor],
    stocked: Path,
    name: str,
) -> None:
    latent, history = run_in_server(_prompt(name))
    _check_latent(latent)
    if comfyui.version() >= (0, 33) and "LoadVideo" in {
        node["class_type"] for node in _prompt(name).values()
    }:
        # ComfyUI's LoadVideo converts colours with another filter, and random experts amplify the
        # difference.
        assert (latent - embedded[name]).norm() < 0.1 * embedded[name].norm()
    else:
        assert torch.equal(latent, embedded[name])
    assert [step["expert"] for step in _timeline(history)["steps"]] == EXPERTS[name]
    _check_video(history, stocked)


def _two_samplers(mixed: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's own graph equivalent to `mixed`.

    Two loaders, two shifts and two samplers replace our nodes.
    """
    settings, experts = mixed["sampler"]["inputs"], mixed["experts"]["inputs"]
    switch = EXPERTS["native_mixed"].count("high")
    stages = {
        "high": (0, switch, "enable", "enable", ["latent", 0]),
        "low": (switch, 10000, "disable", "disable", None),
    }
    native = {
        node: mixed[node]
        for node in ("clip", "positive", "negative", "latent", "vae", "frames", "video", "save")
    }
    for expert, (start, end, noise, leftover, latent) in stages.items():
        file = {"unet_name": experts[f"{expert}_noise"], "weight_dtype": "default"}
        shift = {"model": [f"{expert} file", 0], "shift": settings["flow_shift"]}
        sampler = {
            "model": [expert, 0],
            "positive": ["positive", 0],
            "negative": ["negative", 0],
            "latent_image": latent or ["high sampler", 0],
            "add_noise": noise,
            "noise_seed": settings["seed"],
            "steps": settings["steps"],
            "cfg": settings[f"guidance_{expert}"],
            "sampler_name": "euler",
            "scheduler": "simple",
            "start_at_step": start,
            "end_at_step": end,
            "return_with_leftover_noise": leftover,
        }
        native[f"{expert} file"] = {"class_type": "UNETLoader", "inputs": file}
        native[expert] = {"class_type": "ModelSamplingSD3", "inputs": shift}
        native[f"{expert} sampler"] = {"class_type": "KSamplerAdvanced", "inputs": sampler}
    native["sampler"] = native.pop("low sampler")
    return native


def test_among_native_nodes_our_sampler_does_what_two_of_comfyuis_do(
    comfyui: ComfyUI, run_in_server: Run, stocked: Path
) -> None:
    # On a CPU, ComfyUI computes in fp32 for every file dtype, and 0.3.64 does so for all but fp8.
    mixed = _prompt("native_mixed", experts={"compute_dtype": "fp32"})
    if comfyui.version() < (0, 4):
        for name in ("high_noise", "low_noise"):
            mixed["experts"]["inputs"][name] = mixed["experts"]["inputs"][name].replace(
                "fp8_scaled", "fp16"
            )
    latent, history = run_in_server(mixed)
    _check_latent(latent)
    assert [step["expert"] for step in _timeline(history)["steps"]] == EXPERTS["native_mixed"]
    _check_video(history, stocked)
    native, _ = run_in_server(_two_samplers(mixed))
    assert _relative(latent, native) <= 1e-4


def test_native_mixed_runs_as_it_is(run_in_server: Run, stocked: Path) -> None:
    latent, history = run_in_server(_prompt("native_mixed"))
    _check_latent(latent)
    _check_video(history, stocked)


def test_the_guider_does_with_euler_what_our_sampler_does(
    run_in_server: Run, embedded: dict[str, torch.Tensor], stocked: Path
) -> None:
    latent, history = run_in_server(
        _prompt("guider", experts={"compute_dtype": "fp32"}, solver={"sampler_name": "euler"})
    )
    assert _relative(latent, embedded[AS_GUIDER]) <= 1e-4
    _check_video(history, stocked)


def test_what_a_sampler_runs_through_the_guider_is_announced_call_by_call_and_shown_at_the_guider(
    server: Any, run_in_server: Run
) -> None:
    run_in_server(_prompt("guider", noise={"noise_seed": 4711}))
    run = server.get("/wanstream/runs")["runs"][-1]
    assert (run["node"], run["shown_at"], run["title"]) == (
        "sampler",
        "guider",
        "Wan Guider (streamed)",
    )
    assert (run["ended"], run["error"]) == (True, None)
    assert [step["expert"] for step in run["timeline"]["steps"]] == run["experts"]


def test_the_guiders_workflow_runs_as_it_is(run_in_server: Run, stocked: Path) -> None:
    latent, history = run_in_server(_prompt("guider"))
    _check_latent(latent)
    _check_video(history, stocked)


def test_the_benchmarks_workflow_measures_and_leaves_its_report(
    run_in_server: Run, stocked: Path
) -> None:
    latent, history = run_in_server(_prompt("benchmark"))
    _check_latent(latent)
    shown = history["outputs"]["benchmark"]
    (chart,) = shown["images"]
    png = stocked / "output" / chart["subfolder"] / chart["filename"]
    report = json.loads(png.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["finished"]
    assert report["method"]["With"].split(", ")[1].startswith("ComfyUI ")
    assert [variant["name"] for variant in report["variants"]] == [
        f"layerwise, {ahead} ahead, 4 steps" for ahead in (1, 2)
    ]
    trials = [trial for variant in report["variants"] for trial in variant["trials"]]
    assert len(trials) == 8
    assert len({trial["latents"] for trial in trials}) == 1
    assert {len(trial["timeline"]["steps"]) for trial in trials} == {4}
    assert shown["text"][0].startswith("# WanStream benchmark")
    with Image.open(png) as picture:
        assert picture.format == "PNG"
    assert {png.with_suffix(suffix).stat().st_size > 0 for suffix in (".csv", ".html")} == {True}


def test_another_seed_uses_the_right_experts_and_reloads_nothing(
    run_in_server: Run, embedded: dict[str, torch.Tensor]
) -> None:
    run_in_server(_prompt("t2v", experts={"storage": "fp8"}))  # closes the open pair
    _, first = run_in_server(_prompt("t2v", sampler={"seed": 45}))
    latent, history = run_in_server(_prompt("t2v", sampler={"seed": 43}))
    assert {"experts", "policy", "text", "latent"} <= _cached(history)
    assert not torch.equal(embedded["t2v"], embedded[OTHER_SEED])
    assert torch.equal(latent, embedded[OTHER_SEED])
    timeline = _timeline(history)
    assert [step["expert"] for step in timeline["steps"]] == EXPERTS["t2v"]
    assert _timeline(first)["non_block_bytes"] > 0
    assert timeline["non_block_bytes"] == 0, "the experts were opened again"


def test_cancel_ends_a_run_and_leaves_the_server_usable(
    server: Any, run_in_server: Run, embedded: dict[str, torch.Tensor]
) -> None:
    prompt_id = server.queue(_prompt("t2v", sampler={"seed": 44, "steps": 1000}))
    time.sleep(2)  # most likely inside the sampler by now, and otherwise with the same outcome
    server.post("/interrupt", {})
    events = [event for event, _ in server.wait(prompt_id)["status"]["messages"]]
    assert events[-1] == "execution_interrupted"
    latent, _ = run_in_server(_prompt("t2v"))
    assert torch.equal(latent, embedded["t2v"])


def test_a_start_image_on_text_to_video_experts_is_told_in_plain_words_without_the_path_of_the_pack(
    server: Any, run_in_server: Run
) -> None:
    files = {
        name: {each: _prompt(name)["experts"]["inputs"][each] for each in PLACES}
        for name in ("t2v", "i2v")
    }
    failed = server.wait(server.queue(_prompt("i2v", experts=files["t2v"])))
    error = dict(failed["status"]["messages"])["execution_error"]
    assert error["exception_type"] == "wanstream.RequestError"
    assert (
        "these are text-to-video experts, and a start image is connected"
        in error["exception_message"]
    )
    failed = server.wait(server.queue(_prompt("guider", experts=files["i2v"])))
    error = dict(failed["status"]["messages"])["execution_error"]
    assert error["exception_type"] == "wanstream.RequestError"
    assert (
        "these are image-to-video experts, and no start image is connected"
        in error["exception_message"]
    )
