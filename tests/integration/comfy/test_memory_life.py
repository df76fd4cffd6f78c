"""A server's life: our workflow and a native one in turn, and the process's memory at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.testing.components import save_vae_file
from wanstream.testing.model import VAE_FILE
from wanstream.testing.weights import make_vae
from wanstream.tools.comfyui import ComfyUI, Server, running_server

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
ITEMS = 10
STEADY = 4
"""From this item on, nothing more is held than after the first one of its kind."""
ROOM = 0.02
HIGH, LOW = (f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors" for noise in ("high", "low"))
LORA = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
SIZE = {"width": 32, "height": 32, "batch_size": 1}

Prompt = dict[str, dict[str, Any]]


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _shared() -> Prompt:
    texts = {"positive": "a boat", "negative": "blurry"}
    encoder = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    return {
        "text": _node("WanStreamTextEncode", text_encoder=encoder, **texts),
        "latent": _node("EmptyHunyuanLatentVideo", length=5, **SIZE),
        "held": _node("TestHeld", latent=["sampler", 0]),
    }


def _experts(strength: float) -> Prompt:
    loras = {"high_noise": LORA.format("high"), "low_noise": LORA.format("low")}
    return {
        "files": _node("WanStreamExperts", high_noise=HIGH, low_noise=LOW, compute_dtype="bf16"),
        "lora": _node(
            "WanStreamLora",
            experts=["files", 0],
            strength_high=strength,
            strength_low=strength,
            **loras,
        ),
    }


def _ours(item: int) -> Prompt:
    """Three seeds and three strengths in turn: item 7 is item 1 again, and item 9 item 3."""
    sides = {
        "positive": ["text", 0],
        "negative": ["text", 1],
        "latent": ["latent", 0],
        "experts": ["lora", 0],
    }
    numbers = {
        "steps": 4,
        "flow_shift": 5.0,
        "boundary_ratio": 0.875,
        "switch_step": -1,
        "start_step": 0,
    }
    words = {"solver": "euler", "schedule": "simple", "guidance_high": 2.0, "guidance_low": 1.0}
    sampler = _node("WanStreamSampler", seed=item % 6, **sides, **numbers, **words)
    return {**_shared(), **_experts([1.0, 0.5, 0.0][item // 2 % 3]), "sampler": sampler}


def _native(item: int) -> Prompt:
    """A native one-expert checkpoint, one step, decoded."""
    sides = {
        "positive": ["text", 0],
        "negative": ["text", 1],
        "latent_image": ["latent", 0],
        "model": ["model", 0],
    }
    sampler = _node(
        "KSampler",
        seed=item,
        steps=1,
        cfg=2.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
        **sides,
    )
    return {
        **_shared(),
        "model": _node("UNETLoader", unet_name=LOW, weight_dtype="default"),
        "sampler": sampler,
        "vae": _node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "frames": _node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "shown": _node("PreviewImage", images=["frames", 0]),
    }


def _runs_out() -> Prompt:
    ours = _experts(1.0)
    sides = {"positive": ["text", 0], "negative": ["text", 1], "experts": ["lora", 0]}
    ratio, guidance = (
        {"boundary_ratio": 0.875},
        {"guidance_high": 1.0, "guidance_low": 1.0, "flow_shift": 5.0},
    )
    return {
        **_shared(),
        **ours,
        "guider": _node("WanStreamGuider", **sides, **ratio, **guidance),
        "noise": _node("RandomNoise", noise_seed=1),
        "sigmas": _node("WanStreamSigmas", schedule="simple", steps=4, flow_shift=5.0, denoise=1.0),
        "solver": _node("TestOutOfMemory"),
        "sampler": _node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["solver", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
    }


@pytest.fixture
def life(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    comfyui: ComfyUI,
    vae_width: int,
    sample_models: Path,
    tmp_path: Path,
) -> Iterator[Server]:
    """A separate server with the parameter's flags, this pack and the test model."""
    # One heap for all threads, without large blocks: the allocator's free lists must not count as a
    # leak.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    nodes = tmp_path / "custom_nodes"
    nodes.mkdir()
    (nodes / "wanstream").symlink_to(ROOT, target_is_directory=True)
    (nodes / "memory_nodes.py").symlink_to(Path(__file__).with_name("memory_nodes.py"))
    models = tmp_path / "models"
    models.mkdir()
    for entry in sample_models.iterdir():
        if entry.name != VAE_FILE.parent.name:
            (models / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    save_vae_file(make_vae(seed=0, base_dim=vae_width), models / VAE_FILE)
    with running_server(comfyui, tmp_path, *request.param) as server:
        yield server


def _said(server: Server) -> str:
    return (server.base / "server.log").read_text(errors="replace")


def _free(server: Server, times: int) -> None:
    """POST /free until we were unloaded `times` times.

    ComfyUI may sleep through a request that arrives as it falls asleep.
    """
    deadline = time.monotonic() + 60
    while _said(server).count("the experts are unloaded") < times:
        assert time.monotonic() < deadline, _said(server)[-4000:]
        server.post("/free", {"unload_models": True})
        time.sleep(1)


@pytest.mark.parametrize(
    "life", [(), ("--cache-none",), ("--cache-lru", "3")], indirect=True, ids="_".join
)
def test_ten_items_hold_no_more_than_four(life: Server) -> None:
    held: list[dict[str, Any]] = []
    for item in range(1, ITEMS + 1):
        ours = item % 2 == 1
        held.append(life.run((_ours if ours else _native)(item))["outputs"]["held"])
        if ours and item > 1:
            _free(life, item // 2)
    for first in (STEADY, STEADY + 1):
        rss = [entry["rss"][0] for entry in held[first - 1 :: 2]]
        # The lower value, because a leak raises both.
        assert min(rss[-2:]) <= rss[0] * (1 + ROOM), [
            f"{entry['rss'][0] / 1e6:.1f} MB" for entry in held
        ]
    assert [held[0]["latent"], held[2]["latent"]] == [held[6]["latent"], held[8]["latent"]]
    assert len({entry["latent"][0] for entry in held}) == ITEMS - 2
    assert "ExpertsPatcher" in held[0]["loaded"]
    assert "ExpertsPatcher" in held[1]["loaded"], "there is room, so nobody evicts us"
    assert "ExpertsPatcher" not in held[3]["loaded"], "/free did"


@pytest.mark.parametrize("life", [()], indirect=True, ids=["default"])
def test_the_next_item_works_after_one_that_ran_out_of_memory(life: Server) -> None:
    before = life.run(_ours(1))["outputs"]["held"]
    failed = life.wait(life.queue(_runs_out()))
    error = dict(failed["status"]["messages"])["execution_error"]
    assert "OutOfMemoryError" in error["exception_type"]
    assert "the experts are unloaded" in _said(life)
    again = _ours(1)
    again["sampler"]["inputs"]["steps"] = 3
    life.run(again)
    assert life.run(_ours(1))["outputs"]["held"]["latent"] == before["latent"]
