"""Streamed text encoders: equal to `WanPipeline.encode_prompt`, ComfyUI's files to the folder."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from wanstream.offload.formats import CheckpointFileError, streamed_names
from wanstream.offload.sources.file import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.testing.components import save_text_encoder_file, save_text_encoder_folders
from wanstream.testing.quantised import quantise, random_packs
from wanstream.testing.tokenizer import VOCABULARY, kind_of, sentencepiece_model
from wanstream.testing.weights import make_text_encoder
from wanstream.tests.support.offload.edited_files import (
    Edits,
    Tensors,
    close_gguf,
    renamed,
    rewrite,
    zeros,
)
from wanstream.tests.support.wan.number_formats import ENCODERS, MixedLayout, json_tensor
from wanstream.tests.support.wan.quantised_files import FP8_LAYOUTS
from wanstream.wan.checkpoint import block_stack
from wanstream.wan.text.encoder import PromptError, open_text_encoder
from wanstream.wan.text.sentence_model import gguf_sentence_model
from wanstream.wan.vae.memory import TensorMemoryTracker

FP8 = torch.float8_e4m3fn
FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
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
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
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
        save_file({key: tensors[key] for key in tensors if places[key] == shard}, folder / shard)
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


OF_FILES = ["a cat walks through the snow", "", " caf\u00e9 &amp; \u65e5\u672c </s> x"]
LENGTH = 40
SCALES = (".scale_weight", ".weight_scale")
BESIDE = (*SCALES, ".scale_input", ".comfy_quant", "scaled_fp8", "spiece_model")
TABLE = "shared.weight"
TOKENS = "spiece_model"
BLOCK = "encoder.block.{}.layer.0.SelfAttention."
QUERIES, LATER_QUERIES = (BLOCK.format(n) + "q.weight" for n in (0, 1))
LATER_POSITIONS = BLOCK.format(1) + "relative_attention_bias.weight"

# Encodes a prompt in a separate process and prints its peak memory.
PEAK = """
import sys
from pathlib import Path
import torch
from wanstream.tests.support.wan.process_counters import memory_bytes
from wanstream.wan.text.encoder import open_text_encoder

torch.ones(4, 4096) @ torch.ones(4096, 64)
encoder = open_text_encoder(sys.argv[1], compute_dtype=torch.float32)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory_bytes("VmRSS")
encoder.encode(["cat"], device="cpu", max_length=8)
print(memory_bytes("VmHWM") - before)
"""


def tiny_encoder() -> torch.nn.Module:
    return make_text_encoder(seed=0, vocabulary=len(VOCABULARY))


@pytest.fixture(scope="module")
def encoder_file(tmp_path_factory):
    """`encoder_file(dtype=torch.float16, fp8=None)`: a read-only file. `fp8` is in FP8_LAYOUTS."""

    @functools.cache
    def file(*, dtype: torch.dtype = FP16, fp8: str | None = None) -> Path:
        path = tmp_path_factory.mktemp("encoder") / "umt5.safetensors"
        layout = None if fp8 is None else FP8_LAYOUTS[fp8]
        save_text_encoder_file(tiny_encoder(), path, dtype=dtype, quantised=layout)
        return path

    return file


@pytest.fixture
def changed(encoder_file, tmp_path):
    """`changed(change, **file)`: a changed copy."""
    path = tmp_path / "changed.safetensors"
    return lambda change, **file: rewrite(encoder_file(**file), path, change)


def save_folder(values: Tensors, folder: Path, encoder: torch.nn.Module) -> None:
    """Write a pipeline folder with these values."""
    save_text_encoder_folders(encoder, folder, dtype=FP32)
    save_file(values, folder / "text_encoder" / "model.safetensors", {"format": "pt"})


def embeddings(path: Path, dtype: torch.dtype = FP32) -> torch.Tensor:
    encoder = open_text_encoder(path, compute_dtype=dtype)
    return torch.cat(encoder.encode(OF_FILES, device="cpu", max_length=LENGTH))


unchanged_embeddings = functools.cache(embeddings)
"""Embeddings of a file that no test changes."""


def assert_equal(path: Path, other: Path, dtype: torch.dtype = FP32) -> None:
    """Compare the embeddings of two encoders."""
    found = embeddings(path, dtype)
    assert found.shape == (len(OF_FILES), LENGTH, 4096)
    assert torch.equal(found, embeddings(other, dtype))


@pytest.mark.parametrize(("stored", "computed"), [(FP16, FP32), (BF16, BF16)], ids=str)
def test_file_equals_the_folder(encoder_file, tmp_path, stored, computed):
    save_text_encoder_folders(tiny_encoder(), tmp_path, dtype=stored)
    assert_equal(encoder_file(dtype=stored), tmp_path, computed)


def _fp8_table(tensors: Tensors) -> Edits:
    codes, scale = quantise(tensors[TABLE].float())
    return {TABLE: codes, "shared.scale_weight": scale}


def _cast(tensors: Tensors) -> Edits:
    return {key: each.to(FP8) for key, each in tensors.items() if key != TOKENS}


@pytest.mark.parametrize(
    ("change", "fp8"),
    [({}, "scaled_fp8"), ({}, "metadata"), (_fp8_table, "scaled_fp8"), (_cast, None)],
)
def test_fp8_equals_its_values(changed, tmp_path, caplog, change, fp8):
    path = changed(change, fp8=fp8)
    tensors = load_file(path)
    values = {}
    assert tensors[QUERIES].dtype == FP8
    for name in tensors:
        if not name.endswith(BESIDE):
            layer = name.removesuffix(".weight")
            scales = (tensors[layer + end] for end in SCALES if layer + end in tensors)
            values[name] = tensors[name].float() * next(scales, torch.ones(1)).reshape(())
    save_folder(values, tmp_path, tiny_encoder())
    assert_equal(path, tmp_path)
    assert ("plain casts to float8" in caplog.text) == (fp8 is None)


@pytest.mark.slow  # several whole models
@pytest.mark.parametrize("name", ["int8", "int8 rows", "int8 ConvRot 64", "mxfp8", "nvfp4"])
def test_packed_matrices_equal_their_values(name, tmp_path):
    encoder = tiny_encoder()
    layout = MixedLayout(format_of=lambda _: name)
    file = tmp_path / "umt5.safetensors"
    save_text_encoder_file(encoder, file, dtype=FP32, quantised=layout)
    for module in encoder.encoder.block.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(ENCODERS[name](module.weight).values)
    save_text_encoder_folders(encoder, tmp_path, dtype=FP32)
    assert_equal(file, tmp_path)


SPELLINGS = (
    ("encoder.final_layer_norm.", "norm.", "enc.output_norm."),
    ("shared.", "token_embedding.", "token_embd."),
    ("encoder.block.", "blocks.", "enc.blk."),
    (".layer.0.SelfAttention.relative_attention_bias", ".pos_embedding.embedding", ".attn_rel_b"),
    (".layer.0.SelfAttention.", ".attn.", ".attn_"),
    (".layer.0.layer_norm.", ".norm1.", ".attn_norm."),
    (".layer.1.layer_norm.", ".norm2.", ".ffn_norm."),
    (".layer.1.DenseReluDense.wi_0.", ".ffn.gate.0.", ".ffn_gate."),
    (".layer.1.DenseReluDense.wi_1.", ".ffn.fc1.", ".ffn_up."),
    (".layer.1.DenseReluDense.wo.", ".ffn.fc2.", ".ffn_down."),
)
"""Parts of names in diffusers, in the original release and in GGUF."""


def _original(key: str, spelling: int = 1) -> str:
    return functools.reduce(lambda text, row: text.replace(row[0], row[spelling]), SPELLINGS, key)


def _in_a_checkpoint(tokenizer: str) -> Callable[[str], str]:
    return lambda key: tokenizer if key == TOKENS else f"text_encoders.umt5xxl.transformer.{key}"


@pytest.mark.parametrize(
    ("rename", "fp8"),
    [
        (_original, "scaled_fp8, input scales"),
        (_original, "comfy_quant, full precision"),
        (lambda key: key.replace(TABLE, "encoder.embed_tokens.weight"), None),
        (_in_a_checkpoint("text_encoders.spiece_model"), None),
        (_in_a_checkpoint("spiece_model"), None),
        (lambda key: f"_orig_mod.x.{key}", None),
    ],
)
def test_other_names(encoder_file, changed, rename, fp8):
    path = changed(renamed(rename), fp8=fp8)
    assert open_text_encoder(path).notes == ()
    assert torch.equal(embeddings(path), unchanged_embeddings(encoder_file(fp8=fp8)))


def test_unused_tensors_are_ignored_with_a_note(changed):
    extra = ["decoder.block.0.layer.0.SelfAttention.q.weight", "epoch", "lm_head.weight"]
    assert open_text_encoder(changed({key: zeros(2, 2) for key in extra})).notes == (
        "changed.safetensors: 3 tensors that this model does not use are ignored: "
        + ", ".join(extra),
    )


@pytest.mark.parametrize(
    "place", ["a.sft", "a.safetensors", "google/umt5-xxl/spiece.model", "tokenizer/tokenizer.model"]
)
def test_tokenizer_in_a_file_beside(encoder_file, changed, tmp_path, place):
    path = changed({TOKENS: None})
    beside = tmp_path / place
    beside.parent.mkdir(parents=True, exist_ok=True)
    if beside.suffix == ".model":
        beside.write_bytes(sentencepiece_model())
    else:
        save_file({"encoder.spiece_model": load_file(encoder_file())[TOKENS]}, beside)
    (tmp_path / "0.safetensors").write_bytes(b"damaged")
    save_file({TOKENS: zeros(9, dtype=torch.uint8)}, tmp_path / "1.safetensors")
    save_file({"model.norm.weight": zeros(2)}, tmp_path / "2.safetensors")
    note = f"changed.safetensors has no tokenizer: that of {place} is used"
    assert open_text_encoder(path).notes == (note,)
    assert torch.equal(embeddings(path), unchanged_embeddings(encoder_file()))


PADS = 3
"""Unused tokens behind the vocabulary."""


def save_gguf(tensors, path, kind="Q8_0", unused=None):
    """Write an encoder as llama.cpp, with matrices in this type where it fits.

    `unused` has the kinds of the tokens behind the vocabulary. None: no tokenizer.

    Returns:
        The values.
    """
    writer = GGUFWriter(path, "t5encoder")
    values = {}
    if unused is not None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([*VOCABULARY, *(f"[PAD{index}]" for index in range(PADS))])
        scores = [0.0 if kind_of(token) > 1 else -1.0 for token in VOCABULARY]
        writer.add_token_scores([*scores, *([-10000.0] * PADS)])
        writer.add_token_types([*map(kind_of, VOCABULARY), *unused])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
    for name, tensor in tensors.items():
        own = _original(name, 2)
        fitting = kind if tensor.shape[-1] % 256 == 0 else "Q8_0"
        is_plain = tensor.ndim == 1 or "rel_b" in own
        quant = GGMLQuantizationType["F32" if is_plain else fitting]
        array = tensor.float().numpy()
        if "_K" in quant.name:
            packs = random_packs(array, quant, np.random.default_rng(7))
        else:
            packs = quantize(array, quant)
        values[name] = torch.from_numpy(dequantize(packs, quant).copy()).reshape(tensor.shape)
        writer.add_tensor(own, packs, raw_dtype=quant)
    close_gguf(writer)
    return values


@pytest.fixture
def tensors():
    # As many rows as tokens in the header lists, as in the published files.
    encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY) + PADS)
    return {name: parameter.detach().clone() for name, parameter in encoder.named_parameters()}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_values_of_gguf_are_those_of_the_dequantised_file(tensors, tmp_path, kind):
    path = tmp_path / "umt5-xxl-encoder.gguf"
    values = save_gguf(tensors, path, kind, [5] * PADS)
    save_folder(values, tmp_path, make_text_encoder(seed=0, vocabulary=len(VOCABULARY) + PADS))
    assert_equal(path, tmp_path, BF16 if kind == "Q8_0" else FP32)


def test_gguf_without_a_tokenizer_borrows_one(tensors, tmp_path):
    whole = tmp_path / "whole.gguf"
    none = tmp_path / "none.gguf"
    save_gguf(tensors, whole, unused=[5] * PADS)
    save_gguf(tensors, none)
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model())
    note = "none.gguf has no tokenizer: that of spiece.model is used"
    assert open_text_encoder(none).notes == (note,)
    assert open_text_encoder(whole).notes == ()
    assert_equal(none, whole)
    model = gguf_sentence_model(whole)
    assert gguf_sentence_model(whole) is model, "converted once"
    os.utime(whole, (1, 1))
    assert gguf_sentence_model(whole) is not model, "a newer file"


def test_other_gguf_files_are_refused(tensors, tmp_path):
    path = tmp_path / "x.gguf"
    unused = [5] * PADS
    t5 = {name: each for name, each in tensors.items() if name != LATER_POSITIONS}
    for stored, kinds, reason in (
        (tensors, [5] * 2, "lists of 196, 196, 195 values"),
        (tensors, [-5] * 3, "a damaged tokenizer"),
        (t5, unused, r"is a T5 .*, not UMT5"),
        ({"blk.0.attn_q.weight": zeros(64, 64)}, unused, r"not a UMT5 .*first: blk\.0\.attn"),
    ):
        save_gguf(stored, path, unused=kinds)
        with pytest.raises(CheckpointFileError, match=reason):
            open_text_encoder(path)


@pytest.mark.parametrize("fp8", [None, "scaled_fp8"])
def test_token_table_is_never_loaded(encoder_file, fp8):
    encoder = open_text_encoder(encoder_file(fp8=fp8))
    encoder.encode(["a cat"], device="cpu", max_length=8)
    parameters = encoder._stack.model.named_parameters()
    on_meta = {name for name, parameter in parameters if parameter.is_meta}
    streamed = tuple(f".{name}.weight" for name in ("q", "k", "v", "o", "wi_0", "wi_1", "wo"))
    # transformers 5.0 does not tie the table's two names before it loads a file.
    rest = {name for name in on_meta if not name.endswith(streamed)}
    assert rest - {"encoder.embed_tokens.weight"} == {TABLE}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("form", ["folder", "fp8 file"])
def test_peak_is_two_blocks(tmp_path, form):
    encoder = make_text_encoder(seed=0, vocabulary=4000, layers=10)
    block = 4 * sum(each.numel() for each in encoder.encoder.block[0].parameters())
    if form == "folder":
        save_text_encoder_folders(encoder, tmp_path / "umt5", dtype=FP32)
    else:
        fp8 = FP8_LAYOUTS["scaled_fp8"]
        save_text_encoder_file(encoder, tmp_path / "umt5", dtype=FP32, quantised=fp8)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "umt5")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    # The file has ten blocks and a token table as large as six. Threads, activations and fp8
    # values copied to a buffer take two or three blocks more, depending on the processor (up
    # to 4.7).
    assert 2 < int(done.stdout) / block < 6


def _int8_table(tensors: Tensors) -> Edits:
    encoded = ENCODERS["int8 rows"](tensors[TABLE].float())
    packed = {f"shared.{ending}": tensor for ending, tensor in encoded.tensors.items()}
    return {**packed, "shared.comfy_quant": json_tensor(encoded.settings)}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({QUERIES.replace(".weight", ".scale_weight"): None}, r"SelfAttention\.q.* scale "),
        (lambda t: {TABLE: t[TABLE].to(FP8)}, r"scale shared\.scale_weight "),
    ],
)
def test_missing_scale_is_refused(changed, change, name):
    with pytest.raises(CheckpointFileError, match=f"{name}.*is missing"):
        open_text_encoder(changed(change, fp8="scaled_fp8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_int8_table, r"shared\.weight is int8; one of float32"),
        ({TOKENS: None}, r"has no tokenizer \(spiece_model\), nor has .*umt5_xxl_fp16"),
        (lambda t: {TABLE: t[TABLE][:100]}, "193 tokens, but the token table has 100 rows"),
        ({TABLE: None}, r"shared\.weight is missing"),
        ({QUERIES: None}, "is not a UMT5 text encoder: use umt5_xxl_fp16.safetensors or "),
        ({LATER_QUERIES: None}, r"block\.1\.\S*SelfAttention\.q\.weight .* is missing"),
        (lambda t: {QUERIES: t[QUERIES][:, :9]}, r"is \[64, 9\]; \[rows, 4096\] is expected"),
        (lambda t: {QUERIES: t[QUERIES][:62]}, r"bias\.weight is \[32, 4\]; .* divisor of 62"),
        (lambda t: {QUERIES: t[QUERIES][:32]}, r"k\.weight is \[64, 4096\]; .* \[32, 4096\]"),
        ({"encoder.block.7.x": zeros(1)}, r"encoder\.block\.2 is missing"),
        ({"encoder.other": zeros(1)}, r"encoder\.other does not belong"),
        (lambda t: {QUERIES: t[QUERIES].to(torch.int8)}, r"torch\.int8; one of float32"),
        ({LATER_POSITIONS: None}, "is a T5 .*, not UMT5"),
        (lambda t: {**dict.fromkeys(t), "x": zeros(2)}, "1 tensors, first: x"),
    ],
)
def test_damaged_files_are_refused(changed, change, message):
    with pytest.raises(CheckpointFileError, match=message):
        open_text_encoder(changed(change))
