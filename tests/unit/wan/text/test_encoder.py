"""Streamed text encoder: equality with `WanPipeline.encode_prompt`, memory, refused folders."""

from __future__ import annotations

import functools
import io
import json
import math
import shutil

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from wanstream.offload.formats.layout import streamed_names
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources.file import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.testing.components import save_text_encoder_folders
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.testing.weights import make_text_encoder
from wanstream.wan.checkpoint import block_stack
from wanstream.wan.text.encoder import PromptError, open_text_encoder
from wanstream.wan.vae.memory import TensorMemoryTracker

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP32 = torch.float32
PROMPTS = [
    "a cat walks through the snow",
    "",
    "words " * 200,  # far more than 512 characters, each a token
    "  fish &amp;amp; chips,\n\tcaf\u00e9  \u65e5\u672c ",
]
BLOCKS = 4


@functools.cache
def diffusers_pipeline(folder, dtype):
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    if dtype == torch.bfloat16:
        encoder.to(dtype)  # transformers 5.0 alone keeps `wo` in fp32 for bf16 too
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return WanPipeline(tokenizer, encoder, vae=None, scheduler=None)


def diffusers_encode(folder, prompt, length=512, dtype=FP32):
    """Return diffusers' embedding, [1, length, 4096] in fp32."""
    with torch.no_grad():
        embedding, _ = diffusers_pipeline(folder, dtype).encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=length
        )
    return embedding.float()


@pytest.fixture
def pipeline_copy(tiny_pipeline, tmp_path):
    """Return a pipeline folder for the test to damage."""
    return shutil.copytree(tiny_pipeline(), tmp_path / "pipeline")


@pytest.fixture(scope="module")
def deep_pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    encoder = make_text_encoder(seed=3, vocabulary=len(VOCABULARY), layers=BLOCKS)
    save_text_encoder_folders(encoder, folder, dtype=FP32)
    return folder


@pytest.mark.parity
@pytest.mark.slow  # whole models
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_alone_and_in_company_equal_diffusers(tiny_pipeline, dtype):
    encoder = open_text_encoder(tiny_pipeline(), compute_dtype=dtype)
    # Half precision takes a hundred times as long where the CPU has no units for it.
    prompts, length = (PROMPTS, 512) if dtype == FP32 else (PROMPTS[::2], 48)
    together = encoder.encode(prompts, device="cpu", max_length=length)
    alone = [encoder.encode([prompt], device="cpu", max_length=length)[0] for prompt in prompts]
    for prompt, one, other in zip(prompts, together, alone, strict=True):
        expected = diffusers_encode(tiny_pipeline(), prompt, length, dtype)
        assert (one.shape, one.dtype) == ((1, length, 4096), FP32)
        assert torch.equal(one, expected), prompt
        assert torch.equal(other, expected), prompt


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        (None, 2),
        (OffloadPolicy.resident(), BLOCKS),
        (OffloadPolicy.block_swap(1, 1, source="pinned"), None),
    ],
)
def test_policies_equal_diffusers_in_their_memory(deep_pipeline, policy, blocks):
    encoder = open_text_encoder(deep_pipeline, compute_dtype=FP32)
    prompts = PROMPTS[::3]
    with TensorMemoryTracker() as tracker:
        encoded = encoder.encode(prompts, device="cpu", max_length=16, policy=policy)
    for prompt, embedding in zip(prompts, encoded, strict=True):
        assert torch.equal(embedding, diffusers_encode(deep_pipeline, prompt, 16)), prompt
    if blocks is None:
        return
    with torch.device("meta"):
        config = UMT5Config.from_pretrained(deep_pipeline / "text_encoder")
        block = UMT5EncoderModel(config).encoder.block[0]
    streamed = sum(4 * math.prod(block.get_parameter(n).shape) for n in streamed_names(block))
    assert blocks * streamed <= tracker.peak <= (blocks + 0.25) * streamed


def test_weights_are_read_once_for_all_prompts(tiny_pipeline, monkeypatch):
    read = []

    class RecordingSource(FileSource):
        def read_block(self, key, into):
            read.append(key)
            super().read_block(key, into)

    monkeypatch.setattr(block_stack, "FileSource", RecordingSource)
    open_text_encoder(tiny_pipeline()).encode(PROMPTS, device="cpu", max_length=16)
    assert sorted(read) == [BlockKey("umt5", 0), BlockKey("umt5", 1)]


def test_inference_mode_does_not_affect_later_calls(tiny_pipeline):
    encoder = open_text_encoder(tiny_pipeline(), compute_dtype=FP32)
    with torch.inference_mode():
        (inside,) = encoder.encode(["x"], device="cpu", max_length=8)
    assert torch.equal(encoder.encode(["x"], device="cpu", max_length=8)[0], inside)


def test_shards_and_the_other_name_of_the_token_table(pipeline_copy, tiny_pipeline):
    folder = pipeline_copy / "text_encoder"
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + (at > 8)}-of-00002" for at, name in enumerate(sorted(tensors))}
    places = {name: f"{shard}.safetensors" for name, shard in places.items()}
    for shard in set(places.values()):
        save_file(
            {name: tensors[name] for name in tensors if places[name] == shard}, folder / shard
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    encoder = open_text_encoder(folder, compute_dtype=FP32)
    found = encoder.encode(["a"], device="cpu", max_length=9)[0]
    assert torch.equal(found, diffusers_encode(tiny_pipeline(), "a", 9))


@pytest.mark.parametrize(("prompts", "length"), [([], 512), (["a"], 0)])
def test_nothing_to_encode_is_refused(tiny_pipeline, prompts, length):
    with pytest.raises(PromptError, match="at least one"):
        open_text_encoder(tiny_pipeline()).encode(prompts, device="cpu", max_length=length)


def test_missing_parts_are_refused(pipeline_copy, tmp_path):
    with pytest.raises(CheckpointFileError, match="neither a diffusers pipeline folder"):
        open_text_encoder(tmp_path)
    shutil.rmtree(pipeline_copy / "tokenizer")
    with pytest.raises(CheckpointFileError, match="the tokenizer is missing"):
        open_text_encoder(pipeline_copy)


@pytest.mark.parametrize("text", ["", "{}", '{"model": '])
def test_damaged_tokenizer_is_refused(pipeline_copy, text):
    (pipeline_copy / "tokenizer" / "tokenizer.json").write_text(text)
    (pipeline_copy / "tokenizer" / "spiece.model").unlink()
    with pytest.raises(CheckpointFileError, match="is not a tokenizer"):
        open_text_encoder(pipeline_copy)


EVIL = ["evil.Evil", "evil.Evil"]


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"auto_map": {"AutoTokenizer": EVIL}}, {}),
        ({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}, {}),
        ({"auto_map": ["evil.Evil", None], "tokenizer_class": "Evil"}, {}),
        ({"tokenizer_class": "Evil"}, {"model_type": "evil", "auto_map": {"AutoConfig": EVIL[0]}}),
        ({}, {"model_type": "umt5", "auto_map": {"AutoTokenizer": EVIL}}),
    ],
    ids=["known class", "own class", "list", "config", "old config"],
)
def test_python_in_a_tokenizer_folder_never_runs(pipeline_copy, monkeypatch, settings, config):
    """Nobody is asked on stdin either."""
    folder = pipeline_copy / "tokenizer"
    answers = io.StringIO("y\n" * 9)
    path = folder / "tokenizer_config.json"
    ran = folder / "ran"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nEvil = dict\n"
    (folder / "evil.py").write_text(code)
    monkeypatch.setattr("sys.stdin", answers)
    # transformers releases differ in which of these open with their own class.
    refusal = ""
    try:
        open_text_encoder(pipeline_copy)
    except CheckpointFileError as err:
        refusal = str(err)
    assert "trust_remote_code" not in refusal
    assert not ran.exists()
    assert answers.tell() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5', 'umt5' is expected"),
        ({"d_model": 2048}, "d_model is 2048"),
        ({"num_layers": 3}, r"encoder\.block\.2.* is missing"),
        ({"num_layers": 1}, r"encoder\.block\.1.* does not belong"),
        ({"vocab_size": 100}, r"shared\.weight is \[193, 4096\]"),
        ({"d_ff": "wide"}, "d_ff is 'wide'; a whole number"),
        ({"num_heads": 0}, "num_heads is 0; a whole number"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj is 'relu'"),
    ],
    ids=str,
)
def test_other_config_is_refused(pipeline_copy, change, message):
    path = pipeline_copy / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointFileError, match=message):
        open_text_encoder(pipeline_copy)
