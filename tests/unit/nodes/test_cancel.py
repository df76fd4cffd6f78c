"""Cancel around sampling: only the current chunk, layer, block or frame is still computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
from wanstream.tests.support.embedded import embedded_host, run_workflow
from wanstream.tests.support.given_nodes import LATENT, NODES, PROMPTS, VIDEO, graph_around

SIZE = {"width": 32, "height": 32, "frames": 17, "batch_size": 1}
VAE, CLIP, UMT5 = (
    "wan_2.1_vae.safetensors",
    "clip_vision_h.safetensors",
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
)
SAVED = {"fps": 16.0, "filename_prefix": "x", "crf": 40}
CONTROL = {"vae": VAE, "control_video": VIDEO, **PROMPTS, **SIZE}
PHASES: dict[str, tuple[str, dict[str, Any], tuple[type, str]]] = {
    "encoding a control video": ("WanStreamFunControl", CONTROL, (WanEncoder3d, "forward")),
    "encoding a start image": (
        "WanStreamImageToVideo",
        {"vae": VAE, "image": VIDEO, **PROMPTS, **SIZE},
        (WanResidualBlock, "forward"),
    ),
    "encoding a source video": (
        "WanStreamBernini",
        {"vae": VAE, "source_video": VIDEO, **PROMPTS, **SIZE},
        (WanEncoder3d, "forward"),
    ),
    "seeing an image": (
        "WanStreamFunControl",
        {**CONTROL, "model": "Wan2.1 Fun Control", "clip_vision": CLIP, "start_image": VIDEO},
        (CLIPEncoderLayer, "forward"),
    ),
    "encoding a text": (
        "WanStreamTextEncode",
        {"text_encoder": UMT5, "positive": "a", "negative": "b"},
        (UMT5Block, "forward"),
    ),
    "decoding": ("WanStreamVAEDecode", {"vae": VAE, "latent": LATENT}, (WanDecoder3d, "forward")),
    "decoding in tiles": (
        "WanStreamVAEDecode",
        {"vae": VAE, "latent": LATENT, "tile_size": 64},
        (WanDecoder3d, "forward"),
    ),
    "saving": ("WanStreamSaveVideo", {"images": VIDEO, **SAVED}, (video_file, "_picture")),
}
"""Node, inputs, and the function for one chunk, layer, block or frame."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_cancel_ends_every_phase_with_the_work_in_hand(
    phase: str, calls: int, sample_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_type, inputs, (owner, name) = PHASES[phase]
    compute: Callable[..., Any] = getattr(owner, name)
    done = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if any(
            isinstance(value, torch.Tensor) and value.is_meta for value in args
        ):  # the memory is counted on meta
            return compute(*args, **kwargs)
        done += 1
        if done == calls:
            embedded_host.stop()
        return compute(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    prompt = graph_around(class_type, inputs, frames=17)
    with pytest.raises(Cancelled):
        run_workflow(prompt, nodes=NODES, models=sample_models, output=tmp_path, input_dir=tmp_path)
    # The text encoder computes each block once per prompt, twice in all.
    assert done <= calls + (phase == "encoding a text")
    assert not [*tmp_path.rglob("*.mp4*")]
