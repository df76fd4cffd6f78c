"""A server's life: our workflow and a native one in turn, and the process's memory at the end."""

from functools import partial

import pytest

from wanstream.tests.integration.comfy import servers
from wanstream.tests.support.host.shipped import node
from wanstream.tools.comfyui import running_server

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(900)]

ITEMS = 10
STEADY = 4
"""From this item on, nothing more is held than after the first one of its kind."""
ROOM = 0.02
LORA = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
SHORT = {"width": 32, "height": 32, "length": 5}


def _ours(item):
    """Three seeds and three strengths in turn: item 7 is item 1 again, and item 9 item 3."""
    prompt = servers.wan_item(native=False, seed=item % 6, **SHORT)
    strength = [1.0, 0.5, 0.0][item // 2 % 3]
    files = {"high_noise": LORA.format("high"), "low_noise": LORA.format("low")}
    strengths = {"strength_high": strength, "strength_low": strength}
    prompt["lora"] = node("WanStreamLora", experts=["files", 0], **strengths, **files)
    prompt["sampler"]["inputs"]["experts"] = ["lora", 0]
    return prompt


@pytest.fixture
def life(request, monkeypatch, comfyui, vae_width, sample_models, tmp_path):
    """A separate server with the parameter's flags, this pack and the test model."""
    # One heap for all threads, without large blocks: the allocator's free lists must not count as a
    # leak.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    base = servers.make_base(tmp_path / "base", "memory.py")
    servers.add_models(base, sample_models, vae_width=vae_width)
    with running_server(comfyui, base, *request.param) as server:
        yield server


def _unloaded(server, times):
    return servers.said(server).count(" are unloaded") >= times


@pytest.mark.parametrize(
    "life", [(), ("--cache-none",), ("--cache-lru", "3")], indirect=True, ids="_".join
)
def test_ten_items_hold_no_more_than_four(life):
    held = []
    for item in range(1, ITEMS + 1):
        ours = item % 2 == 1
        prompt = _ours(item) if ours else servers.wan_item(native=True, seed=item, **SHORT)
        held.append(life.run(prompt)["outputs"]["held"])
        if ours and item > 1:
            servers.free_until(life, partial(_unloaded, life, item // 2))
    for first in (STEADY, STEADY + 1):
        rss = [entry["rss"][0] for entry in held[first - 1 :: 2]]
        # The lower value, because a leak raises both.
        assert min(rss[-2:]) <= rss[0] * (1 + ROOM), [each["rss"] for each in held]
    assert [held[0]["latent"], held[2]["latent"]] == [held[6]["latent"], held[8]["latent"]]
    assert len({entry["latent"][0] for entry in held}) == ITEMS - 2
    assert "ExpertsPatcher" in held[0]["loaded"]
    assert "ExpertsPatcher" in held[1]["loaded"], "there is room, so nobody evicts us"
    assert "ExpertsPatcher" not in held[3]["loaded"], "/free did"
