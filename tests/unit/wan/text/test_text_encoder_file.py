"""ComfyUI's single-file text encoders: equality with the pipeline folder, memory, refused files."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources.file import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.testing.components import save_text_encoder_file, save_text_encoder_folders
from wanstream.testing.quantised import quantise, random_packs
from wanstream.testing.tokenizer import START, VOCABULARY, kind_of, sentencepiece_model
from wanstream.testing.weights import make_text_encoder
from wanstream.tests.support.number_formats import ENCODERS, MixedLayout
from wanstream.tests.support.quantised_files import FP8_LAYOUTS
from wanstream.wan.checkpoint import block_stack
from wanstream.wan.text.encoder import open_text_encoder
from wanstream.wan.text.sentence_model import gguf_sentence_model
from wanstream.wan.text.tokenizer import tokenizer_beside

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROMPTS = ["a cat walks through the snow", "", " caf\u00e9 &amp; \u65e5\u672c </s> x"]
LENGTH = 40
NOT_WEIGHTS = (
    ".scale_weight",
    ".weight_scale",
    ".scale_input",
    ".comfy_quant",
    "scaled_fp8",
    "spiece_model",
)

TABLE = "shared.weight"
QUERIES = "encoder.block.0.layer.0.SelfAttention.q.weight"
POSITIONS = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"

Tensors = dict[str, torch.Tensor]

# Encodes a prompt in a separate process and prints its peak memory in KiB.
PEAK = """
import sys
import torch
from wanstream.wan.text.encoder import open_text_encoder
from wanstream.wan.text.tokenizer import tokenizer_beside


def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


torch.ones(4, 4096) @ torch.ones(4096, 64)
encoder = open_text_encoder(sys.argv[1], compute_dtype=torch.float32)
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak counts from here
before = status("VmRSS")
encoder.encode(["cat"], device="cpu", max_length=8)
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def encoder_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `encoder_file(dtype=torch.float16, fp8=None)`, for read-only files.

    `fp8` is in FP8_LAYOUTS.
    """

    @functools.cache
    def file(*, dtype: torch.dtype = torch.float16, fp8: str | None = None) -> Path:
        path = tmp_path_factory.mktemp("encoder") / "umt5.safetensors"
        encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
        save_text_encoder_file(
            encoder, path, dtype=dtype, quantised=fp8 if fp8 is None else FP8_LAYOUTS[fp8]
        )
        return path

    return file


@pytest.fixture
def changed(encoder_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return `changed(edit, **file)`, a copy with tensors changed in place by `edit`."""

    def change(edit: Callable[[Tensors], Any], **file: Any) -> Path:
        tensors = load_file(encoder_file(**file))
        edit(tensors)
        save_file(tensors, tmp_path / "changed.safetensors", {"format": "pt"})
        return tmp_path / "changed.safetensors"

    return change


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Return `folder_of(file)`: a pipeline folder with the file's decoded values in fp32."""

    def write(path: Path) -> Path:
        tensors = load_file(path)
        save_text_encoder_folders(
            make_text_encoder(seed=0, vocabulary=len(VOCABULARY)), tmp_path, dtype=torch.float32
        )
        values = {}
        for name in tensors:
            if not name.endswith(NOT_WEIGHTS):
                layer = name.removesuffix(".weight")
                scale = tensors.get(f"{layer}.scale_weight", tensors.get(f"{layer}.weight_scale"))
                values[name] = tensors[name].float() * (1 if scale is None else scale.reshape(()))
        save_file(values, tmp_path / "text_encoder" / "model.safetensors", {"format": "pt"})
        return tmp_path

    return write


def embeddings(path: Path, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    with open_text_encoder(path, compute_dtype=dtype) as encoder:
        return encoder.encode(PROMPTS, device="cpu", max_length=LENGTH, **options)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for prompt, one, other in zip(PROMPTS, found, expected, strict=True):
        assert one.shape == (1, LENGTH, 4096)
        assert torch.equal(one, other), prompt


class TestAgainstTheFolder:
    @pytest.mark.parametrize(
        ("stored", "computed"),
        [
            *((stored, torch.float32) for stored in DTYPES),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.bfloat16),
        ],
        ids=str,
    )
    def test_equal_to_the_bit_where_the_stored_values_are(
        self,
        encoder_file: Callable[..., Path],
        tmp_path: Path,
        stored: torch.dtype,
        computed: torch.dtype,
    ) -> None:
        encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
        save_text_encoder_folders(encoder, tmp_path, dtype=stored)

        assert_equal(
            embeddings(encoder_file(dtype=stored), computed), embeddings(tmp_path, computed)
        )

    def test_fp8_is_equal_to_its_dequantised_values(
        self,
        encoder_file: Callable[..., Path],
        folder_of: Callable[[Path], Path],
        fp8_layout: str,
    ) -> None:
        path = encoder_file(fp8=fp8_layout)
        assert load_file(path)[QUERIES].dtype == FP8

        assert_equal(embeddings(path, torch.float32), embeddings(folder_of(path), torch.float32))

    @pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_a_plain_cast_is_loaded_with_a_note(
        self,
        changed: Callable[..., Path],
        folder_of: Callable[[Path], Path],
        caplog: pytest.LogCaptureFixture,
        fp8: torch.dtype,
    ) -> None:
        def cast(tensors: Tensors) -> None:
            tensors |= {name: t.to(fp8) for name, t in tensors.items() if name != "spiece_model"}

        path = changed(cast)

        assert_equal(embeddings(path, torch.bfloat16), embeddings(folder_of(path), torch.bfloat16))
        assert "plain casts to float8" in caplog.text

    @pytest.mark.parametrize("table", ["bf16", "fp8 with a scale"])
    def test_a_token_table_in_another_precision(
        self, changed: Callable[..., Path], folder_of: Callable[[Path], Path], table: str
    ) -> None:
        def edit(tensors: Tensors) -> None:
            if table == "bf16":
                tensors[TABLE] = tensors[TABLE].bfloat16()
            else:
                tensors[TABLE], tensors["shared.scale_weight"] = quantise(tensors[TABLE].float())

        path = changed(edit, fp8="scaled_fp8")

        assert_equal(embeddings(path, torch.float32), embeddings(folder_of(path), torch.float32))

    @pytest.mark.slow  # several whole models
    @pytest.mark.parametrize("name", ["int8", "int8 rows", "int8 ConvRot 64", "mxfp8", "nvfp4"])
    def test_packed_matrices_are_equal_to_their_values(self, name: str, tmp_path: Path) -> None:
        encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
        file, layout = tmp_path / "umt5.safetensors", MixedLayout(format_of=lambda _: name)
        save_text_encoder_file(encoder, file, dtype=torch.float32, quantised=layout)
        for module in encoder.encoder.block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(ENCODERS[name](module.weight).values)
        save_text_encoder_folders(encoder, tmp_path, dtype=torch.float32)
        assert_equal(embeddings(file, torch.float32), embeddings(tmp_path, torch.float32))

    def test_the_policy_changes_nothing(self, encoder_file: Callable[..., Path]) -> None:
        path = encoder_file(fp8="scaled_fp8")
        for policy in (OffloadPolicy.layerwise(1, source="pinned"), OffloadPolicy.resident()):
            assert_equal(
                embeddings(path, torch.bfloat16, policy=policy), embeddings(path, torch.bfloat16)
            )

    def test_the_other_name_of_the_token_table(
        self, encoder_file: Callable[..., Path], changed: Callable[..., Path]
    ) -> None:
        def rename(tensors: Tensors) -> None:
            tensors["encoder.embed_tokens.weight"] = tensors.pop(TABLE)

        assert_equal(
            embeddings(changed(rename), torch.float32), embeddings(encoder_file(), torch.float32)
        )


ORIGINAL = (
    ("encoder.final_layer_norm.", "norm."),
    ("shared.", "token_embedding."),
    ("encoder.block.", "blocks."),
    (".layer.0.SelfAttention.relative_attention_bias.", ".pos_embedding.embedding."),
    (".layer.0.SelfAttention.", ".attn."),
    (".layer.0.layer_norm.", ".norm1."),
    (".layer.1.layer_norm.", ".norm2."),
    (".layer.1.DenseReluDense.wi_0.", ".ffn.gate.0."),
    (".layer.1.DenseReluDense.wi_1.", ".ffn.fc1."),
    (".layer.1.DenseReluDense.wo.", ".ffn.fc2."),
)


def original_names(tensors: Tensors) -> None:
    """Rename as in Wan's own release, without a tokenizer."""
    del tensors["spiece_model"]
    for key in list(tensors):
        name = key
        for theirs, own in ORIGINAL:
            name = name.replace(theirs, own)
        tensors[name] = tensors.pop(key)


def prefixed(prefix: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    return edit


class TestFilesThatPeopleHave:
    @pytest.mark.parametrize(
        "fp8", [None, "scaled_fp8", "scaled_fp8, input scales", "comfy_quant, full precision"]
    )
    def test_names_of_wans_own_release(
        self,
        encoder_file: Callable[..., Path],
        changed: Callable[..., Path],
        tmp_path: Path,
        fp8: str | None,
    ) -> None:
        path = changed(original_names, fp8=fp8)
        (tmp_path / "other.safetensors").write_bytes(encoder_file().read_bytes())
        assert "blocks.0.attn.k.weight" in load_file(path)
        assert_equal(
            embeddings(path, torch.float32), embeddings(encoder_file(fp8=fp8), torch.float32)
        )

    @pytest.mark.parametrize(
        ("prefix", "fp8"),
        [
            ("text_encoders.umt5xxl.", None),
            ("text_encoders.umt5xxl.transformer.", "scaled_fp8"),
            ("model.", None),
            ("_orig_mod.", "scaled_fp8"),
            ("x.y.z.", None),
        ],
    )
    def test_a_prefix_is_removed(
        self,
        encoder_file: Callable[..., Path],
        changed: Callable[..., Path],
        prefix: str,
        fp8: str | None,
    ) -> None:
        path = changed(prefixed(prefix), fp8=fp8)
        assert_equal(
            embeddings(path, torch.float32), embeddings(encoder_file(fp8=fp8), torch.float32)
        )

    @pytest.mark.parametrize("place", ["text_encoders.spiece_model", "spiece_model"])
    def test_the_tokenizer_of_a_whole_checkpoint_is_above_the_names_of_the_encoder(
        self, encoder_file: Callable[..., Path], changed: Callable[..., Path], place: str
    ) -> None:
        def edit(tensors: Tensors) -> None:
            prefixed("text_encoders.umt5xxl.transformer.")(tensors)
            tensors[place] = tensors.pop("text_encoders.umt5xxl.transformer.spiece_model")

        path = changed(edit)
        assert open_text_encoder(path).notes == ()
        assert_equal(embeddings(path, torch.float32), embeddings(encoder_file(), torch.float32))

    @pytest.mark.parametrize(
        "extra",
        [
            "logit_scale",
            "lm_head.weight",
            "decoder.block.0.layer.0.SelfAttention.q.weight",
            "epoch",
        ],
    )
    def test_tensors_that_encoding_does_not_use_are_ignored_with_a_line(
        self, encoder_file: Callable[..., Path], changed: Callable[..., Path], extra: str
    ) -> None:
        path = changed(lambda tensors: tensors.update({extra: torch.zeros(2, 2)}))
        assert_equal(embeddings(path, torch.float32), embeddings(encoder_file(), torch.float32))
        assert open_text_encoder(path).notes == (
            f"changed.safetensors: 1 tensors that this model does not use are ignored: {extra}",
        )

    @pytest.mark.parametrize(
        "place",
        [
            "other.sft",
            "a.safetensors",
            "spiece.model",
            "google/umt5-xxl/spiece.model",
            "tokenizer/spiece.model",
        ],
    )
    def test_the_tokenizer_of_a_file_next_to_it(
        self,
        encoder_file: Callable[..., Path],
        changed: Callable[..., Path],
        tmp_path: Path,
        place: str,
    ) -> None:
        path, beside = changed(lambda tensors: tensors.pop("spiece_model")), tmp_path / place
        beside.parent.mkdir(parents=True, exist_ok=True)
        if beside.suffix == ".model":
            beside.write_bytes(sentencepiece_model())
        else:
            save_file({"encoder.spiece_model": load_file(encoder_file())["spiece_model"]}, beside)
        (tmp_path / "0.safetensors").write_bytes(b"damaged")
        save_file({"spiece_model": torch.zeros(9, dtype=torch.uint8)}, tmp_path / "1.safetensors")
        save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "2.safetensors")

        assert open_text_encoder(path).notes == (
            f"changed.safetensors has no tokenizer: that of {place} is used",
        )
        assert_equal(embeddings(path, torch.float32), embeddings(encoder_file(), torch.float32))

    @pytest.mark.parametrize(
        ("vocabulary", "rows"),
        [
            (VOCABULARY, len(VOCABULARY) - 1),
            (VOCABULARY, len(VOCABULARY) + 512),
            (("<pad>", "<eos>", "<bos>", *VOCABULARY[2:]), len(VOCABULARY) + 1),
        ],
        ids=["more pieces", "fewer pieces", "Gemma"],
    )
    def test_a_tokenizer_of_another_model_is_not_taken(
        self, tmp_path: Path, vocabulary: tuple[str, ...], rows: int
    ) -> None:
        (tmp_path / "spiece.model").write_bytes(sentencepiece_model(vocabulary))
        with pytest.raises(CheckpointFileError, match="has no tokenizer"):
            tokenizer_beside(tmp_path / "umt5.safetensors", rows=rows)

    def test_the_published_tokenizer_has_a_start_token_and_384_rows_less(
        self, tmp_path: Path
    ) -> None:
        vocabulary = (*VOCABULARY[:2], START, *VOCABULARY[2:])
        (tmp_path / "spiece.model").write_bytes(sentencepiece_model(vocabulary))
        borrowed = tokenizer_beside(tmp_path / "umt5.safetensors", rows=len(vocabulary) + 384)
        tokens = borrowed.tokenizer.tokens(["a b"], length=6)
        assert [vocabulary[token] for token in tokens.ids[0]] == [
            "\u2581",
            "a",
            "\u2581",
            "b",
            "</s>",
            "<pad>",
        ]


GGUF_NAMES = (
    ("encoder.final_layer_norm.", "enc.output_norm."),
    ("shared.", "token_embd."),
    ("encoder.block.", "enc.blk."),
    (".layer.0.SelfAttention.relative_attention_bias.", ".attn_rel_b."),
    (".layer.0.SelfAttention.", ".attn_"),
    (".layer.0.layer_norm.", ".attn_norm."),
    (".layer.1.layer_norm.", ".ffn_norm."),
    (".layer.1.DenseReluDense.wi_0.", ".ffn_gate."),
    (".layer.1.DenseReluDense.wi_1.", ".ffn_up."),
    (".layer.1.DenseReluDense.wo.", ".ffn_down."),
)


def save_gguf(tensors: Tensors, path: Path, kind: str, tokenizer: str) -> Tensors:
    """Write an encoder as llama.cpp, with matrices in this type where it fits.

    Return the values.
    """
    writer = GGUFWriter(path, "t5encoder")
    values = {}
    tokens = [*VOCABULARY, *(f"[PAD{index}]" for index in range(3))]
    if tokenizer != "none":
        writer.add_tokenizer_model("t5")
        writer.add_token_list(tokens)
        writer.add_token_scores(
            [0.0 if kind_of(token) > 1 else -1.0 for token in VOCABULARY] + [-10000.0] * 3
        )
        unused = {"whole": [5] * 3, "short": [5] * 2, "negative": [-5] * 3}[tokenizer]
        writer.add_token_types([*map(kind_of, VOCABULARY), *unused])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
    for name, tensor in tensors.items():
        if name == "spiece_model":
            continue
        own = name
        for theirs, ours in GGUF_NAMES:
            own = own.replace(theirs, ours)
        type_name = (
            "F32"
            if tensor.ndim == 1 or "rel_b" in own
            else kind
            if tensor.shape[-1] % 256 == 0
            else "Q8_0"
        )
        array = tensor.float().numpy()
        quant = GGMLQuantizationType[type_name]
        packs = (
            random_packs(array, quant, np.random.default_rng(7))
            if "_K" in type_name
            else quantize(array, quant)
        )
        values[name] = torch.from_numpy(dequantize(packs, quant).copy()).reshape(tensor.shape)
        writer.add_tensor(own, packs, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


class TestGguf:
    @pytest.fixture
    def tensors(self) -> Tensors:
        # As many rows as tokens in the header lists, as in the published files.
        encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY) + 3)
        return {name: parameter.detach().clone() for name, parameter in encoder.named_parameters()}

    @pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
    def test_values_are_those_of_the_dequantised_file(
        self, tensors: Tensors, tmp_path: Path, kind: str
    ) -> None:
        values = save_gguf(tensors, tmp_path / "umt5-xxl-encoder.gguf", kind, "whole")
        save_text_encoder_folders(
            make_text_encoder(seed=0, vocabulary=len(VOCABULARY) + 3), tmp_path, dtype=torch.float32
        )
        save_file(values, tmp_path / "text_encoder" / "model.safetensors", {"format": "pt"})
        for dtype in (torch.float32, torch.bfloat16)[: 2 if kind == "Q8_0" else 1]:
            assert_equal(
                embeddings(tmp_path / "umt5-xxl-encoder.gguf", dtype), embeddings(tmp_path, dtype)
            )

    def test_a_file_without_a_tokenizer_borrows_one(self, tensors: Tensors, tmp_path: Path) -> None:
        for tokenizer in ("whole", "none"):
            save_gguf(tensors, tmp_path / f"{tokenizer}.gguf", "Q8_0", tokenizer)
        (tmp_path / "spiece.model").write_bytes(sentencepiece_model())
        opened = open_text_encoder(tmp_path / "none.gguf")
        assert opened.notes == ("none.gguf has no tokenizer: that of spiece.model is used",)
        assert open_text_encoder(tmp_path / "whole.gguf").notes == ()
        model = gguf_sentence_model(tmp_path / "whole.gguf")
        assert gguf_sentence_model(tmp_path / "whole.gguf") is model, "converted once"
        os.utime(tmp_path / "whole.gguf", (1, 1))
        assert gguf_sentence_model(tmp_path / "whole.gguf") is not model, "a newer file"
        found, expected = (
            embeddings(tmp_path / f"{name}.gguf", torch.float32) for name in ("none", "whole")
        )
        assert_equal(found, expected)

    def test_other_files_are_refused(self, tensors: Tensors, tmp_path: Path) -> None:
        path = tmp_path / "x.gguf"
        for tokenizer, reason in (
            ("short", "lists of 196, 196, 195 values"),
            ("negative", "a damaged tokenizer"),
        ):
            save_gguf(tensors, path, "Q8_0", tokenizer)
            with pytest.raises(CheckpointFileError, match=reason):
                open_text_encoder(path)
        save_gguf(
            {name: each for name, each in tensors.items() if name != POSITIONS.format(1)},
            path,
            "Q8_0",
            "whole",
        )
        with pytest.raises(CheckpointFileError, match=r"is a T5 .*, not UMT5"):
            open_text_encoder(path)
        save_gguf({"blk.0.attn_q.weight": torch.zeros(64, 64)}, path, "Q8_0", "whole")
        with pytest.raises(
            CheckpointFileError, match=r"is not a UMT5 text encoder: .*first: blk\.0\.attn_q"
        ):
            open_text_encoder(path)


class TestMemory:
    def test_weights_are_read_once_for_all_prompts(
        self, encoder_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = []

        class RecordingSource(FileSource):
            def read_block(self, key: Any, into: torch.Tensor) -> None:
                read.append(key)
                super().read_block(key, into)

        monkeypatch.setattr(block_stack, "FileSource", RecordingSource)
        embeddings(encoder_file(fp8="scaled_fp8"), torch.bfloat16)

        assert sorted(read) == [BlockKey("umt5", 0), BlockKey("umt5", 1)]

    @pytest.mark.parametrize("fp8", [None, "scaled_fp8"])
    def test_the_token_table_is_never_loaded(
        self, encoder_file: Callable[..., Path], fp8: str | None
    ) -> None:
        encoder = open_text_encoder(encoder_file(fp8=fp8))
        encoder.encode(["a cat"], device="cpu")

        on_meta = {
            name for name, parameter in encoder._stack.model.named_parameters() if parameter.is_meta
        }
        streamed = (
            ".q.weight",
            ".k.weight",
            ".v.weight",
            ".o.weight",
            ".wi_0.weight",
            ".wi_1.weight",
            ".wo.weight",
        )
        rest = {name for name in on_meta if not name.endswith(streamed)} - {
            "encoder.embed_tokens.weight"
        }
        assert rest == {TABLE}

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
    @pytest.mark.parametrize("form", ["folder", "fp8 file"])
    def test_the_peak_is_two_blocks(self, tmp_path: Path, form: str) -> None:
        encoder = make_text_encoder(seed=0, vocabulary=4000, layers=10)
        block = (
            4 * sum(parameter.numel() for parameter in encoder.encoder.block[0].parameters()) / 1024
        )
        if form == "folder":
            save_text_encoder_folders(encoder, tmp_path / "umt5", dtype=torch.float32)
        else:
            fp8 = FP8_LAYOUTS["scaled_fp8"]
            save_text_encoder_file(encoder, tmp_path / "umt5", dtype=torch.float32, quantised=fp8)

        command = [sys.executable, "-c", PEAK, str(tmp_path / "umt5")]
        peak = int(
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        )

        # The file has ten blocks and a token table as large as six. Threads, activations and fp8
        # values copied to a buffer take two or three blocks more, depending on the processor (up
        # to 4.7).
        assert 2 < peak / block < 6


class TestBadFiles:
    def test_truncated(self, encoder_file: Callable[..., Path], tmp_path: Path) -> None:
        path = tmp_path / "umt5.safetensors"
        path.write_bytes(encoder_file().read_bytes()[:-100])
        with pytest.raises(
            CheckpointFileError, match=r"is truncated: has .* bytes; download it again"
        ):
            open_text_encoder(path)

    def test_a_pickle(self, tmp_path: Path) -> None:
        path = tmp_path / "umt5.safetensors"
        torch.save({TABLE: torch.zeros(1)}, path)
        with pytest.raises(CheckpointFileError, match="is a PyTorch pickle"):
            open_text_encoder(path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointFileError, match="neither a diffusers pipeline folder"):
            open_text_encoder(tmp_path / "umt5.safetensors")

    def test_a_scale_is_missing(self, changed: Callable[..., Path]) -> None:
        path = changed(
            lambda tensors: tensors.pop(QUERIES.replace(".weight", ".scale_weight")),
            fp8="scaled_fp8",
        )
        with pytest.raises(CheckpointFileError, match=r"SelfAttention\.q.* scale .*is missing"):
            open_text_encoder(path)

    def test_the_token_table_alone_is_fp8_without_a_scale(
        self, changed: Callable[..., Path]
    ) -> None:
        path = changed(lambda t: t.update({TABLE: t[TABLE].to(FP8)}), fp8="scaled_fp8")
        with pytest.raises(CheckpointFileError, match=r"its scale shared\.scale_weight is missing"):
            open_text_encoder(path)

    def test_a_packed_token_table(self, changed: Callable[..., Path]) -> None:
        def edit(tensors: Tensors) -> None:
            encoded = ENCODERS["int8 rows"](tensors[TABLE].float())
            marker = torch.tensor(list(json.dumps(encoded.settings).encode()), dtype=torch.uint8)
            tensors |= {f"shared.{ending}": tensor for ending, tensor in encoded.tensors.items()}
            tensors["shared.comfy_quant"] = marker

        with pytest.raises(CheckpointFileError, match=r"shared\.weight is int8; one of float32"):
            open_text_encoder(changed(edit))

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                lambda t: t.pop("spiece_model"),
                r"has no tokenizer \(spiece_model\), nor has .*umt5_xxl_fp16.* into its",
            ),
            (
                lambda t: t.update(spiece_model=t["spiece_model"][:-9].clone()),
                "spiece_model is not a tokenizer",
            ),
            (
                lambda t: t.update({TABLE: t[TABLE][:100].clone()}),
                "has 193 tokens, but the token table has 100 rows",
            ),
            (lambda t: t.pop(TABLE), r"shared\.weight is missing"),
            (
                lambda t: t.pop(QUERIES),
                "is not a UMT5 text encoder: use umt5_xxl_fp16.safetensors or ",
            ),
            (
                lambda t: t.pop("encoder.final_layer_norm.weight"),
                r"final_layer_norm\.weight \[4096\] is missing",
            ),
            (
                lambda t: t.pop(QUERIES.replace("0", "1", 1)),
                r"block\.1\.layer\.0\.SelfAttention\.q\.weight .* is missing",
            ),
            (
                lambda t: t.update({QUERIES: t[QUERIES][:, :2048].clone()}),
                r"SelfAttention\.q\.weight is \[64, 2048\]; \[rows, 4096\] is expected",
            ),
            (
                lambda t: t.update({QUERIES: t[QUERIES][:62].clone()}),
                r"relative_attention_bias\.weight is \[32, 4\]; .* a divisor of 62",
            ),
            (
                lambda t: t.update({QUERIES: t[QUERIES][:32].clone()}),
                r"block\.0.*SelfAttention\.k\.weight is \[64, 4096\]; the rest of the file "
                r"requires \[32, 4096\]",
            ),
            (
                lambda t: t.update({"encoder.block.7.x": torch.zeros(1)}),
                r"encoder\.block\.2 is missing",
            ),
            (
                lambda t: t.update({"encoder.other": torch.zeros(1)}),
                r"encoder\.other does not belong",
            ),
            (
                lambda t: t.update({QUERIES: t[QUERIES].to(torch.int8)}),
                r"q\.weight is torch\.int8; one of float32",
            ),
            (lambda t: t.pop(POSITIONS.format(1)), "is a T5 .*, not UMT5"),
            (
                lambda t: t.clear() or t.update({"text_model.x": torch.zeros(2)}),
                r"1 tensors, first: text_model.x",
            ),
        ],
    )
    def test_a_file_of_something_else(
        self, changed: Callable[..., Path], edit: Callable[[Tensors], Any], message: str
    ) -> None:
        with pytest.raises(CheckpointFileError, match=message):
            open_text_encoder(changed(edit))
