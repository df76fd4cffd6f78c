"""Streamed text encoder: peak memory of two blocks, the plain encoder's results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from wanstream.offload.formats.layout import streamed_names
from wanstream.schema import OffloadPolicy
from wanstream.testing.components import save_text_encoder_folders
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.testing.weights import make_text_encoder
from wanstream.wan.text.encoder import open_text_encoder
from wanstream.wan.vae.memory import TensorMemoryTracker

BLOCKS, TOKENS = 7, 16
PROMPTS = ["a cat", "rain"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    encoder = make_text_encoder(seed=3, vocabulary=len(VOCABULARY), layers=BLOCKS)
    save_text_encoder_folders(encoder, folder, dtype=torch.float32)
    return folder


def _block_bytes(folder: Path) -> int:
    with torch.device("meta"):
        block = UMT5EncoderModel(UMT5Config.from_pretrained(folder / "text_encoder")).encoder.block[
            0
        ]
    return sum(4 * math.prod(block.get_parameter(name).shape) for name in streamed_names(block))


def _encode(folder: Path, policy: OffloadPolicy | None) -> tuple[list[torch.Tensor], int]:
    encoder = open_text_encoder(folder, compute_dtype=torch.float32)
    with TensorMemoryTracker() as tracker:
        encoded = encoder.encode(PROMPTS, device="cpu", max_length=TOKENS, policy=policy)
    return encoded, tracker.peak


def test_the_peak_is_two_blocks_and_the_result_is_the_plain_one(pipeline: Path) -> None:
    encoded, peak = _encode(pipeline, None)
    block = _block_bytes(pipeline)
    assert 2 * block <= peak <= 2.25 * block, f"{peak / block:.2f} blocks"

    plain = UMT5EncoderModel.from_pretrained(pipeline / "text_encoder", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(pipeline / "tokenizer")
    diffusers = WanPipeline(tokenizer, plain, vae=None, scheduler=None)
    for prompt, embedding in zip(PROMPTS, encoded, strict=True):
        with torch.no_grad():
            expected, _ = diffusers.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=TOKENS
            )
        assert torch.equal(embedding, expected)


@pytest.mark.parametrize(
    ("policy", "blocks"), [(OffloadPolicy.layerwise(3), 4), (OffloadPolicy.resident(), BLOCKS)]
)
def test_another_policy_takes_what_it_says(
    pipeline: Path, policy: OffloadPolicy, blocks: int
) -> None:
    encoded, peak = _encode(pipeline, policy)
    block = _block_bytes(pipeline)
    assert blocks * block <= peak <= (blocks + 0.25) * block
    assert all(
        torch.equal(one, other)
        for one, other in zip(encoded, _encode(pipeline, None)[0], strict=True)
    )
