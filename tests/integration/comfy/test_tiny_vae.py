"""Tiny VAEs next to ComfyUI's own decoder, and moving previews from a real server.

Both decoders read the same files. The previews arrive on the websocket.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from wanstream.testing.model import write_tiny_model
from wanstream.testing.weights import TINY_VAE_WIDTHS, make_tiny_vae
from wanstream.tools.comfyui import ComfyUI, Server, names_of_workflows
from wanstream.wan.latents import WAN21, WAN22, LatentSpace
from wanstream.wan.vae import open_vae

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).parents[3]
OTHER_SPACE = "taew2_2.safetensors"
"""A tiny VAE for another model's latents than the workflow's."""
FILES = {"lighttaew2_1": WAN21, "lighttaew2_2": WAN22}

# ComfyUI takes fp32 files with 16 channels for Wan's.
THEIRS = """
import comfy.sd, comfy.utils
from safetensors.torch import load_file, save_file

latents, found = load_file(arguments[1]), {}
for name in latents:
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(f"{arguments[0]}/{name}.safetensors"))
    found[name] = nodes.VAEDecode().decode(vae, {"samples": latents[name]})[0].float().contiguous()
save_file(found, arguments[2])
answer = None
"""

# Queues a prompt and returns all our events until it ends, as a websocket client gets them.
LISTEN = """
import asyncio, json, sys
import aiohttp

async def main(url, prompt):
    async with aiohttp.ClientSession() as session, session.ws_connect(
        f"{url}/ws", params={"clientId": "listener"}, max_msg_size=0
    ) as socket:
        async with session.post(
            f"{url}/prompt", json={"prompt": prompt, "client_id": "listener"}
        ) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        events = []
        async for message in socket:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            if event["type"].startswith("wanstream."):
                events.append(event)
            if (
                event["type"].startswith("execution_")
                and event["data"].get("prompt_id") == prompt_id
            ):
                if event["type"] in (
                    "execution_success", "execution_error", "execution_interrupted"
                ):
                    return {"id": prompt_id, "events": events}

print(json.dumps(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))))
"""


def latents_of(space: LatentSpace) -> torch.Tensor:
    return torch.randn(1, space.channels, 3, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def their_frames(
    comfyui: ComfyUI, in_comfyui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The files' folder, and ComfyUI's frames."""
    if not (comfyui.path / "comfy" / "taesd" / "taehv.py").exists():
        pytest.skip("AN OLDER COMFYUI: it decodes no tiny VAE for videos")
    folder = tmp_path_factory.mktemp("tiny")
    for seed, (name, space) in enumerate(FILES.items()):
        save_file(
            make_tiny_vae(space, seed=seed, widths=TINY_VAE_WIDTHS), folder / f"{name}.safetensors"
        )
    # ComfyUI passes on these latents as they are, so they are raw, as `lighttae*` takes them.
    save_file(
        {"lighttaew2_1": latents_of(WAN21), "lighttaew2_2": latents_of(WAN22)}, folder / "given"
    )
    in_comfyui(THEIRS, str(folder), str(folder / "given"), str(folder / "found"))
    return folder, load_file(folder / "found")


@pytest.mark.parametrize("name", FILES)
def test_frames_are_those_of_comfyui(
    their_frames: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    folder, theirs = their_frames
    with open_vae(folder / f"{name}.safetensors") as vae:
        (ours,) = vae.decode(latents_of(FILES[name]), device="cpu")
    found = theirs[name].reshape(ours.shape).clamp(0, 1)  # ComfyUI leaves this to the nodes behind
    assert found.std() > 0.03
    assert (found - ours).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def stocked(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = names_of_workflows(["draft"]) | {OTHER_SPACE}
    sample = write_tiny_model(tmp_path_factory.mktemp("sample"), names=names).folder
    for entry in sample.glob("*/*"):
        link = base / "models" / entry.relative_to(sample)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(entry, target_is_directory=entry.is_dir())
    return base


def draft(seed: int, **preview: Any) -> dict[str, Any]:
    """The shipped workflow, small enough for a CPU.

    Without previews if they get no settings.
    """
    prompt: dict[str, Any] = json.loads(
        (ROOT / "workflows" / "api" / "draft.json").read_text(encoding="utf-8")
    )
    prompt["latent"]["inputs"] |= {"width": 64, "height": 48, "frames": 9}
    prompt["sampler"]["inputs"] |= {"steps": 4, "seed": seed}
    prompt["tap"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": ["sampler", 0], "filename_prefix": "tap"},
    }
    if preview:
        prompt["preview"]["inputs"] |= preview
    else:
        del prompt["preview"], prompt["sampler"]["inputs"]["preview"]
    return prompt


def latent_of(history: dict[str, Any], base: Path) -> torch.Tensor:
    (saved,) = history["outputs"]["tap"]["latents"]
    return load_file(base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


def test_previews_arrive_at_a_page_and_change_nothing(
    comfyui: ComfyUI, server: Server, stocked: Path
) -> None:
    prompt = draft(seed=7, frames=9, every_s=0.0)
    done = subprocess.run(
        [comfyui.python, "-c", LISTEN, server.url, json.dumps(prompt)],
        env=comfyui.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    watched = json.loads(done.stdout)
    kinds = [event["type"] for event in watched["events"] if event["type"] != "wanstream.notices"]
    assert (kinds[0], kinds[-1]) == ("wanstream.begin", "wanstream.end")
    previews = [
        event["data"] for event in watched["events"] if event["type"] == "wanstream.preview"
    ]
    assert previews, "the first step is shown at once"
    assert previews[0]["done"] == 1
    for frames, preview in zip([5] + [9] * (len(previews) - 1), previews, strict=True):
        assert (preview["node"], preview["prompt_id"]) == ("sampler", watched["id"])
        head, _, data = preview["image"].partition(",")
        assert head == "data:image/webp;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            assert (picture.format, picture.n_frames, picture.size) == ("WEBP", frames, (64, 48))
    with_previews = latent_of(server.wait(watched["id"]), stocked)
    # Nobody is connected now.
    unwatched = latent_of(server.run(draft(seed=7, frames=5, every_s=0.0)), stocked)
    without = latent_of(server.run(draft(seed=7)), stocked)
    assert torch.equal(with_previews, without)
    assert torch.equal(unwatched, without)
    assert without.std() > 0.1


def test_a_tiny_vae_of_the_other_space_is_refused_with_both_numbers(
    server: Server, stocked: Path
) -> None:
    prompt = draft(seed=8)
    prompt["save"]["inputs"]["vae"] = OTHER_SPACE
    history = server.wait(server.queue(prompt))
    (failed,) = (
        data for event, data in history["status"]["messages"] if event == "execution_error"
    )
    assert failed["node_id"] == "save"
    assert "[1, 16, 3, 6, 8]" in failed["exception_message"]
    assert (
        "48 channels: take lighttaew2_1.safetensors or taew2_1.safetensors"
        in failed["exception_message"]
    )
