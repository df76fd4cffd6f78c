"""Every shipped API workflow in a real ComfyUI server, on the test model.

Workflows with only our nodes also run in the embedded host, in ComfyUI's Python, so torch is the
same and latents are compared bit by bit.
"""

import json
import subprocess

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from wanstream.tests.integration.comfy import servers
from wanstream.tools.comfyui import name_model_files

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(900)]

OF_5B = ["wan22_5b_t2v", "wan22_5b_i2v"]
LATER_SWITCH = ["t2v", "draft", "bernini", "native_mixed"]
HALVES = ["i2v", "flf2v", "fun_control", "fun_inp", "t2v_lightning", "i2v_lightning"]
HALVES += ["long_video", "continue_video"]
VARIANTS = ["fun_control", "fun_inp", "bernini"]
EXPERTS = {
    **{name: ["high"] * 3 + ["low"] for name in LATER_SWITCH},
    **{name: ["high"] * 2 + ["low"] * 2 for name in HALVES},
    **{name: ["high"] * 4 for name in ("wan21_t2v", "wan21_i2v", *OF_5B)},
    "three_stages": ["high"] * 4 + ["low"] * 2,
}
"""Four steps, or six in three stages, at the workflows' own switch, boundaries and flow shifts."""

OURS = sorted(EXPERTS.keys() - {"native_mixed"})
OVER_WORKERS = ["workers", *(f"{name}_workers" for name in VARIANTS)]
"""See `test_workers.py`, and `tests/test_workflows.py` for the variants."""
FAMILIES = ("wan22", "joined", "vace", "animate", "flux", "qwen_image", "ltx2")
NATIVE = [f"native_{name}" for name in FAMILIES]
OTHER_SEED = "t2v, other seed"

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


def _prompt(workflow, **changes):
    """A small workflow, with a size and a number of steps that fit its model and its switch."""
    steps = len(EXPERTS.get(workflow, range(4)))
    height = 64 if workflow in OF_5B else 48
    return servers.small(workflow, steps=steps, height=height, **changes)


@pytest.fixture(scope="module")
def embedded(comfyui, base, tmp_path_factory):
    """All runs' latents, made by the embedded host."""
    folder = tmp_path_factory.mktemp("embedded")
    (folder / "wanstream").symlink_to(servers.ROOT, target_is_directory=True)
    prompts = {name: _prompt(name) for name in OURS}
    prompts[OTHER_SEED] = _prompt("t2v", sampler={"seed": 43})
    given = [json.dumps(prompts), base, folder / "latents"]
    command = [comfyui.python, "-c", EMBEDDED, *map(str, given)]
    environment = {**comfyui.environment(), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "latents")


@pytest.fixture(scope="module")
def run(server):
    """`run(prompt)` returns a workflow's latent at node "sampler", and the history."""

    def run(prompt):
        history = server.run(servers.tapped(prompt))
        latent = servers.latent_of(server, history)
        assert latent.shape in ((1, 16, 3, 6, 8), (1, 48, 3, 4, 4))
        assert torch.isfinite(latent).all()
        assert latent.std() > 0.1
        if "save" in prompt:
            (video,) = history["outputs"]["save"]["images"]
            file = server.base / "output" / video["subfolder"] / video["filename"]
            assert file.stat().st_size > 0
        return latent, history

    return run


def _timeline(history):
    (timeline,) = history["outputs"]["sampler"]["wanstream_timeline"]
    return dict(timeline)


def test_no_workflow_is_left_out():
    files = {path.stem for path in servers.WORKFLOWS.glob("*.json")}
    assert files == {*EXPERTS, *NATIVE, "guider", "benchmark", *OVER_WORKERS}


@pytest.mark.parametrize("name", NATIVE)
def test_workflow_of_native_model_is_valid(comfyui, server, name):
    """Classes and inputs exist, and values and links are accepted except an empty model file."""
    prompt = servers.shipped(name)
    shown = server.get("/object_info")
    missing = {each["class_type"] for each in prompt.values()} - shown.keys()
    if missing and comfyui.version() < (0, 4):
        pytest.skip(f"this ComfyUI has no {', '.join(sorted(missing))}")
    assert not missing
    for each in prompt.values():
        inputs = shown[each["class_type"]]["input"]
        known = inputs.get("required", {})
        assert known.keys() <= each["inputs"].keys() <= {*known, *inputs.get("optional", ())}
    name_model_files(server.base / "models")
    with server.held():
        status, answer = server.post("/prompt", {"prompt": prompt})
    models = server.base / "models" / "diffusion_models"
    loaders = {
        at: models / each["inputs"]["unet_name"]
        for at, each in prompt.items()
        if each["class_type"] == "WanStreamLoadDiffusionModel"
    }
    empty = {at for at, file in loaders.items() if not file.stat().st_size}
    assert status == (400 if empty else 200), answer
    assert answer["node_errors"].keys() == empty
    for each in answer["node_errors"].values():
        (error,) = each["errors"]
        line = error["details"].splitlines()[0]
        assert line.endswith(".safetensors: is empty: download it again")


@pytest.mark.parametrize("name", OURS)
def test_workflow_gives_one_latent_in_both_hosts(comfyui, run, embedded, name):
    prompt = _prompt(name)
    latent, history = run(prompt)
    classes = {each["class_type"] for each in prompt.values()}
    if comfyui.version() >= (0, 33) and "LoadVideo" in classes:
        # ComfyUI's LoadVideo converts colours with another filter, and random experts amplify the
        # difference.
        assert (latent - embedded[name]).norm() < 0.1 * embedded[name].norm()
    else:
        assert torch.equal(latent, embedded[name])
    assert [step["expert"] for step in _timeline(history)["steps"]] == EXPERTS[name]


def test_native_mixed_runs(run):
    _, history = run(_prompt("native_mixed"))
    assert [step["expert"] for step in _timeline(history)["steps"]] == EXPERTS["native_mixed"]


def test_run_through_guider_is_announced_by_call_at_the_guider(server, run):
    run(_prompt("guider"))
    shown = server.get("/wanstream/runs")["runs"][-1]
    assert (shown["node"], shown["shown_at"]) == ("sampler", "guider")
    assert shown["title"] == "Wan Guider (streamed)"
    assert (shown["ended"], shown["error"]) == (True, None)
    assert [step["expert"] for step in shown["timeline"]["steps"]] == shown["experts"]


def test_benchmark_leaves_its_report(server, run):
    _, history = run(_prompt("benchmark"))
    shown = history["outputs"]["benchmark"]
    (chart,) = shown["images"]
    png = server.base / "output" / chart["subfolder"] / chart["filename"]
    report = json.loads(png.with_suffix(".json").read_text(encoding="utf-8"))
    assert report["finished"]
    assert report["method"]["With"].split(", ")[1].startswith("ComfyUI ")
    trials = [trial for variant in report["variants"] for trial in variant["trials"]]
    assert len(trials) == 8
    assert len({trial["latents"] for trial in trials}) == 1
    assert shown["text"][0].startswith("# WanStream benchmark")
    with Image.open(png) as picture:
        assert picture.format == "PNG"
    assert all(png.with_suffix(suffix).stat().st_size for suffix in (".csv", ".html"))


def test_other_seed_reloads_nothing(run, embedded):
    run(_prompt("t2v", experts={"storage": "fp8"}))  # closes the open pair
    _, first = run(_prompt("t2v", sampler={"seed": 45}))
    latent, history = run(_prompt("t2v", sampler={"seed": 43}))
    cached = dict(history["status"]["messages"])["execution_cached"]["nodes"]
    assert {"experts", "policy", "text", "latent"} <= {*cached}
    assert not torch.equal(embedded["t2v"], embedded[OTHER_SEED])
    assert torch.equal(latent, embedded[OTHER_SEED])
    assert _timeline(first)["non_block_bytes"] > 0
    assert _timeline(history)["non_block_bytes"] == 0, "the experts were opened again"


def test_errors_have_plain_words_without_the_path_of_the_pack(server):
    for name, files_of, message in (
        ("i2v", "t2v", "these are text-to-video experts, and a start image is connected"),
        ("guider", "i2v", "these are image-to-video experts, and no start image is connected"),
    ):
        given = _prompt(files_of)["experts"]["inputs"]
        files = {each: given[each] for each in ("high_noise", "low_noise")}
        error = servers.error_of(server.wait(server.queue(_prompt(name, experts=files))))
        assert error["exception_type"] == "wanstream.RequestError"
        assert message in error["exception_message"]
