"""Queue items on a server with two streamed native models, a VAE and `/free` between them.

The tests check the memory held afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wanstream.testing.components import save_vae_file
from wanstream.testing.model import VAE_FILE
from wanstream.testing.weights import make_vae
from wanstream.tools.comfyui import ComfyUI, Server, running_server

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
ITEMS, ROOM = 5, 0.02
WRITE = """
import native_life_cases
native_life_cases.write_expert(*arguments)
answer = None
"""

Prompt = dict[str, dict[str, Any]]


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _item(number: int) -> Prompt:
    """A graph as for Wan2.2 14B: first steps with one model, the rest with the other, decoded."""
    common = {
        "noise_seed": number,
        "steps": 4,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
    }
    text = {"positive": ["family", 0], "negative": ["family", 1]}
    start = {
        "add_noise": "enable",
        "start_at_step": 0,
        "end_at_step": 2,
        "return_with_leftover_noise": "enable",
    }
    rest = {
        "add_noise": "disable",
        "start_at_step": 2,
        "end_at_step": 99,
        "return_with_leftover_noise": "disable",
    }
    policy = {
        "blocks_to_swap": 4,
        "prefetch_blocks": 1,
        "weights_source": "disk",
        "ram_blocks": 80,
        "chunk_tokens": 0,
    }
    return {
        "policy": _node("WanStreamBlockSwap", **policy),
        "family": _node("TestFamily", family="wan_t2v"),
        **{
            name: _node(
                "WanStreamLoadDiffusionModel",
                unet_name=f"{name}.safetensors",
                weight_dtype="default",
                policy=["policy", 0],
            )
            for name in ("high", "low")
        },
        "first": _node(
            "KSamplerAdvanced",
            model=["high", 0],
            latent_image=["family", 2],
            **common,
            **text,
            **start,
        ),
        "second": _node(
            "KSamplerAdvanced",
            model=["low", 0],
            latent_image=["first", 0],
            **common,
            **text,
            **rest,
        ),
        "held": _node("TestHeld", latent=["second", 0]),
        "vae": _node("VAELoader", vae_name=VAE_FILE.name),
        "frames": _node("VAEDecode", samples=["second", 0], vae=["vae", 0]),
        "shown": _node("PreviewImage", images=["frames", 0]),
    }


@pytest.fixture
def life(
    in_comfyui: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    comfyui: ComfyUI,
    vae_width: int,
    tmp_path: Path,
) -> Iterator[Server]:
    """A separate server with this pack, two 200 MB experts and a VAE."""
    # One heap for all threads, without large blocks: the allocator's free lists must not count as a
    # leak.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    nodes, models = tmp_path / "custom_nodes", tmp_path / "models" / "diffusion_models"
    for folder in (nodes, models):
        folder.mkdir(parents=True)
    (nodes / "wanstream").symlink_to(ROOT, target_is_directory=True)
    for name in ("memory_nodes.py", "native_nodes.py"):
        (nodes / name).symlink_to(Path(__file__).with_name(name))
    in_comfyui(WRITE, str(models / "high.safetensors"))
    (models / "low.safetensors").hardlink_to(models / "high.safetensors")
    save_vae_file(make_vae(seed=0, base_dim=vae_width), tmp_path / "models" / VAE_FILE)
    with running_server(comfyui, tmp_path) as server:
        yield server


def _free(server: Server, times: int) -> None:
    """POST /free until two models were unloaded so many times.

    ComfyUI may sleep through the first request.
    """
    deadline = time.monotonic() + 60
    while (server.base / "server.log").read_text(errors="replace").count(
        "are unloaded"
    ) < 2 * times:
        assert time.monotonic() < deadline, (server.base / "server.log").read_text(
            errors="replace"
        )[-4000:]
        server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1)


def test_five_items_hold_no_more_than_two(life: Server) -> None:
    """The process holds the same within 2 % from the second item on.

    Other items give other latents.
    """
    held = []
    for item in range(1, ITEMS + 1):
        held.append(life.run(_item(item % 4))["outputs"]["held"])
        _free(life, item)
    sizes = [entry["rss"][0] for entry in held[1:]]
    assert max(sizes) <= min(sizes) * (1 + ROOM), [
        f"{entry['rss'][0] / 1e6:.1f} MB" for entry in held
    ]
    assert all(entry["loaded"].count("NativePatcher") == 2 for entry in held)
    latents = [entry["latent"][0] for entry in held]
    assert latents[4] == latents[0]
    assert len(set(latents)) == 4
