"""Base directories for ComfyUI servers, small workflows, and the results of runs."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from wanstream.testing.components import save_vae_file
from wanstream.testing.model import VAE_FILE
from wanstream.testing.weights import make_vae
from wanstream.tests.support.archive import archived_files
from wanstream.tests.support.host.shipped import WORKFLOWS, node
from wanstream.tools.comfyui import PACK, START_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

Prompt = dict[str, dict[str, Any]]


def make_base(folder, *nodes, archived_as=""):
    """Make a base directory with files from `custom_nodes` here and this pack, or its archive."""
    for name in ("custom_nodes", "input", "output"):
        (folder / name).mkdir(parents=True)
    pack = folder / "custom_nodes" / (archived_as or PACK)
    for name in archived_files() if archived_as else ():
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, pack / name)
    if not archived_as:
        pack.symlink_to(ROOT, target_is_directory=True)
    for name in nodes:
        (folder / "custom_nodes" / name).symlink_to(HERE / "custom_nodes" / name)
    return folder


def add_models(base, models, *, vae_width):
    """Link models into a base directory, and write a VAE with a width that ComfyUI can load."""
    for entry in models.glob("*/*"):
        link = base / "models" / entry.relative_to(models)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(entry, target_is_directory=entry.is_dir())
    (base / "models" / VAE_FILE).unlink()
    save_vae_file(make_vae(seed=0, base_dim=vae_width), base / "models" / VAE_FILE)


def python_runs(comfyui, code):
    """Return True if ComfyUI's Python runs code without an error."""
    command = [comfyui.python, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=START_SECONDS, check=False)
    return done.returncode == 0


def shipped(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def small(workflow, *, steps=4, height=48, **changes):
    """A shipped workflow, small enough for a CPU, with `changes` to inputs by node.

    ComfyUI's text encoder loader supports only the real one, so the test node replaces it.
    """
    prompt = shipped(workflow)
    sizes = {"width": 64, "height": height, "frames": 9, "length": 9, "steps": steps}
    for each in prompt.values():
        inputs = each["inputs"]
        # A benchmark's steps are a text.
        inputs |= {key: size for key, size in sizes.items() if isinstance(inputs.get(key), int)}
        if each["class_type"] == "CLIPLoader":
            each["class_type"] = "TestClip"
    for name, inputs in changes.items():
        prompt[name]["inputs"] |= inputs
    return prompt


def tapped(prompt):
    """Return the workflow with a node that saves the sampler's latent."""
    return {**prompt, "tap": node("SaveLatent", samples=["sampler", 0], filename_prefix="tap")}


def wan_item(*, native, seed, **size):
    """Our sampler on a pair of experts, or a native one-expert checkpoint for a step, decoded."""
    high, low = (f"wan2.2_t2v_{side}_noise_14B_fp8_scaled.safetensors" for side in ("high", "low"))
    encoder = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    texts = {"positive": "a boat", "negative": "blurry"}
    sides = {"positive": ["text", 0], "negative": ["text", 1]}
    prompt = {
        "text": node("WanStreamTextEncode", text_encoder=encoder, **texts),
        "latent": node("EmptyHunyuanLatentVideo", batch_size=1, **size),
        "held": node("TestHeld", latent=["sampler", 0]),
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "frames": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "shown": node("PreviewImage", images=["frames", 0]),
    }
    if native:
        prompt["model"] = node("UNETLoader", unet_name=low, weight_dtype="default")
        settings = {"steps": 1, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        links = {"model": ["model", 0], "latent_image": ["latent", 0], **sides}
        prompt["sampler"] = node("KSampler", seed=seed, cfg=2.0, **settings, **links)
        return prompt
    files = {"high_noise": high, "low_noise": low}
    prompt["files"] = node("WanStreamExperts", compute_dtype="bf16", **files)
    settings = {"steps": 4, "solver": "euler", "schedule": "simple", "flow_shift": 5.0}
    settings |= {"boundary_ratio": 0.875, "switch_step": -1, "start_step": 0}
    settings |= {"guidance_high": 2.0, "guidance_low": 1.0}
    links = {"experts": ["files", 0], "latent": ["latent", 0], **sides}
    prompt["sampler"] = node("WanStreamSampler", seed=seed, **settings, **links)
    return prompt


def latent_of(server, history, tap="tap"):
    """The latent saved in a run of a `tapped` workflow."""
    (saved,) = history["outputs"][tap]["latents"]
    file = server.base / "output" / saved["subfolder"] / saved["filename"]
    return load_file(file)["latent_tensor"]


def error_of(history):
    """The error that ended a run."""
    return dict(history["status"]["messages"])["execution_error"]


def said(server):
    return (server.base / "server.log").read_text(errors="replace")


def free_until(server, done, *, memory=True, limit_s=60):
    """POST /free until it has had an effect.

    ComfyUI may sleep through a request that arrives as it falls asleep.
    """
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, said(server)[-4000:]
        server.post("/free", {"unload_models": True, "free_memory": memory})
        time.sleep(1)
