"""Our experts and a native model on a real device, with ComfyUI's memory flags and dynamic VRAM."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.tools.comfyui import START_SECONDS, ComfyUI, Server, running_server

pytestmark = [pytest.mark.gpu, pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
HIGH, LOW = (f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors" for noise in ("high", "low"))
FLAGS = [
    (),
    ("--disable-dynamic-vram",),
    ("--highvram",),
    ("--lowvram",),
    ("--novram",),
    ("--disable-smart-memory",),
    ("--reserve-vram", "2"),
]
KEPT_BYTES = 64 * 2**20
"""Device bytes kept by libraries after first use."""

Prompt = dict[str, dict[str, Any]]


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _ours(seed: int) -> Prompt:
    sides = {
        "positive": ["text", 0],
        "negative": ["text", 1],
        "latent": ["latent", 0],
        "experts": ["files", 0],
    }
    numbers = {
        "steps": 4,
        "flow_shift": 5.0,
        "boundary_ratio": 0.875,
        "switch_step": -1,
        "start_step": 0,
    }
    words = {"solver": "euler", "schedule": "simple", "guidance_high": 2.0, "guidance_low": 1.0}
    encoder = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    return {
        "text": _node(
            "WanStreamTextEncode", text_encoder=encoder, positive="a boat", negative="blurry"
        ),
        "latent": _node("EmptyHunyuanLatentVideo", width=128, height=128, length=9, batch_size=1),
        "files": _node("WanStreamExperts", high_noise=HIGH, low_noise=LOW, compute_dtype="bf16"),
        "policy": _node(
            "WanStreamBlockSwap", blocks_to_swap=2, prefetch_blocks=1, weights_source="RAM"
        ),
        "sampler": _node(
            "WanStreamSampler", policy=["policy", 0], seed=seed, **sides, **numbers, **words
        ),
        "vae": _node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "frames": _node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "shown": _node("PreviewImage", images=["frames", 0]),
        "held": _node("TestHeld", latent=["sampler", 0]),
    }


def _native() -> Prompt:
    ours = _ours(0)
    sides = {
        "positive": ["text", 0],
        "negative": ["text", 1],
        "latent_image": ["latent", 0],
        "model": ["model", 0],
    }
    words = {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    kept = {name: ours[name] for name in ("text", "latent", "vae", "frames", "shown", "held")}
    return {
        **kept,
        "model": _node("UNETLoader", unet_name=LOW, weight_dtype="default"),
        "sampler": _node("KSampler", seed=1, steps=1, cfg=2.0, **words, **sides),
    }


@pytest.fixture(scope="module")
def on_gpu(comfyui: ComfyUI) -> ComfyUI:
    """ComfyUI, if its Python finds a CUDA device."""
    look = [
        str(comfyui.python),
        "-c",
        "import torch; raise SystemExit(not torch.cuda.is_available())",
    ]
    if subprocess.run(look, capture_output=True, timeout=START_SECONDS, check=False).returncode:
        pytest.skip("ComfyUI's Python finds no CUDA device")
    return comfyui


@pytest.fixture
def life(
    request: pytest.FixtureRequest, on_gpu: ComfyUI, sample_models: Path, tmp_path: Path
) -> Iterator[Server]:
    """A server on the GPU with the parameter's flags, this pack and the test model."""
    nodes = tmp_path / "custom_nodes"
    nodes.mkdir()
    (nodes / "wanstream").symlink_to(ROOT, target_is_directory=True)
    (nodes / "memory_nodes.py").symlink_to(Path(__file__).with_name("memory_nodes.py"))
    (tmp_path / "models").symlink_to(sample_models, target_is_directory=True)
    with running_server(on_gpu, tmp_path, *request.param, cpu=False) as server:
        yield server


def _said(server: Server) -> str:
    return (server.base / "server.log").read_text(errors="replace")


def _active(server: Server) -> int:
    """Device memory bytes in torch tensors."""
    (device, *_) = server.get("/system_stats")["devices"]
    return int(device["torch_vram_total"] - device["torch_vram_free"])


def _free(server: Server) -> None:
    """POST /free until ComfyUI has come round to it, and torch's tensors are gone."""
    deadline = time.monotonic() + 60
    while _active(server) > KEPT_BYTES:
        assert time.monotonic() < deadline, f"{_active(server)} bytes are still held"
        server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1)


@pytest.mark.parametrize(
    "life", FLAGS, indirect=True, ids=lambda flags: "_".join(flags) or "default"
)
def test_we_and_native_models_take_turns(life: Server) -> None:
    first = life.run(_ours(1))["outputs"]["held"]["latent"]
    life.run(_native())
    assert life.run(_ours(1))["outputs"]["held"]["latent"] == first
    _free(life)
    assert "the experts are unloaded" in _said(life)
    assert life.run(_ours(1))["outputs"]["held"]["latent"] == first


@pytest.mark.parametrize(
    "life", [(), ("--disable-dynamic-vram",)], indirect=True, ids=["dynamic", "legacy"]
)
def test_a_vae_that_finds_no_room_evicts_us(life: Server) -> None:
    """Another allocation leaves one gigabyte, less than ComfyUI requires for computing."""
    first = life.run(_ours(1))["outputs"]["held"]["latent"]
    taken = {**_native(), "taken": _node("TestTakeDevice", leave=2**30, latent=["latent", 0])}
    taken["sampler"]["inputs"]["latent_image"] = ["taken", 0]
    before = _said(life).count("freed ")
    life.run(taken)
    assert _said(life).count("freed ") > before
    assert life.run(_ours(1))["outputs"]["held"]["latent"] == first


@pytest.mark.parametrize("life", [()], indirect=True, ids=["default"])
def test_the_next_item_works_after_one_that_ran_out_of_memory(life: Server) -> None:
    first = life.run(_ours(1))["outputs"]["held"]["latent"]
    crowded = {**_ours(2), "taken": _node("TestTakeDevice", leave=2**20, latent=["latent", 0])}
    crowded["sampler"]["inputs"]["latent"] = ["taken", 0]
    failed = life.wait(life.queue(crowded))
    error = dict(failed["status"]["messages"])["execution_error"]
    assert "OutOfMemoryError" in error["exception_type"]
    assert life.run(_ours(1))["outputs"]["held"]["latent"] == first
