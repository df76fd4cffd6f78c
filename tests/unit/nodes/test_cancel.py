"""Cancel around sampling: only the current chunk, layer, block or frame is still computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanDecoder3d,
    WanEncoder3d,
    WanResidualBlock,
)
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.umt5.modeling_umt5 import UMT5Block

from wanstream.nodes.runs import video_file
from wanstream.schema import Cancelled
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import (
    CLIP,
    LATENT,
    PROMPTS,
    UMT5,
    VAE,
    VIDEO,
    graph_around,
)

ENCODED = {"vae": VAE, **PROMPTS, "width": 32, "height": 32, "frames": 17, "batch_size": 1}
CONTROL = {**ENCODED, "control_video": VIDEO}
SEEN = {"model": "Wan2.1 Fun Control", "clip_vision": CLIP, "start_image": VIDEO}
TEXT = {"text_encoder": UMT5, "positive": "a", "negative": "b"}
DECODED = {"vae": VAE, "latent": LATENT}
SAVED = {"images": VIDEO, "fps": 16.0, "filename_prefix": "x", "crf": 40}
PHASES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "control video": ("FunControl", CONTROL, WanEncoder3d, "forward"),
    "start image": ("ImageToVideo", {**ENCODED, "image": VIDEO}, WanResidualBlock, "forward"),
    "source video": ("Bernini", {**ENCODED, "source_video": VIDEO}, WanEncoder3d, "forward"),
    "seen image": ("FunControl", {**CONTROL, **SEEN}, CLIPEncoderLayer, "forward"),
    "text": ("TextEncode", TEXT, UMT5Block, "forward"),
    "decode": ("VAEDecode", DECODED, WanDecoder3d, "forward"),
    "decode in tiles": ("VAEDecode", {**DECODED, "tile_size": 64}, WanDecoder3d, "forward"),
    "save": ("SaveVideo", SAVED, video_file, "_picture"),
}
"""Node, inputs, and the function for one chunk, layer, block or frame."""


@pytest.mark.parametrize(
    ("phase", "calls"), [(phase, 1 + at % 2) for at, phase in enumerate(PHASES)]
)
def test_cancel_ends_every_phase_with_the_work_in_hand(phase, calls, run, output, monkeypatch):
    class_type, inputs, owner, name = PHASES[phase]
    compute: Callable[..., Any] = getattr(owner, name)
    done = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        # The memory is counted on meta.
        if not any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            done += 1
            if done == calls:
                embedded_host.stop()
        return compute(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    with pytest.raises(Cancelled):
        run(graph_around(f"WanStream{class_type}", inputs, frames=17))
    # The text encoder computes each block once per prompt, twice in all.
    assert done <= calls + (phase == "text")
    assert not [*output.rglob("*.mp4*")]
