"""Streamed text encoder: equality with `WanPipeline.encode_prompt`, refused files."""

from __future__ import annotations

import functools
import io
import json
import shutil

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, UMT5EncoderModel

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources.file import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.wan.checkpoint import block_stack
from wanstream.wan.text.encoder import PromptError, open_text_encoder
from wanstream.wan.text.tokenizer import clean_prompt

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROMPTS = [
    "a cat walks through the snow",
    "",
    "words " * 200,  # far more than 512 characters, each a token
    "  fish &amp;amp; chips,\n\tcaf\u00e9  \u65e5\u672c ",
]


@pytest.fixture
def diffusers_encode(tiny_pipeline):
    """Return `diffusers_encode(dtype, prompt)`: diffusers' embedding, [1, 512, 4096] in `dtype`."""

    @functools.cache
    def pipeline_in(dtype):
        folder = tiny_pipeline()
        encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
        if dtype == torch.bfloat16:
            encoder.to(dtype)  # transformers 5.0 alone keeps `wo` in fp32 for bf16 too
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        return WanPipeline(tokenizer, encoder, vae=None, scheduler=None)

    def encode(dtype, prompt, length=512):
        with torch.no_grad():
            return pipeline_in(dtype).encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=length
            )[0]

    return encode


@pytest.fixture
def pipeline_copy(tiny_pipeline, tmp_path):
    """Return a pipeline folder for the test to damage."""
    return shutil.copytree(tiny_pipeline(), tmp_path / "pipeline")


class TestAgainstDiffusers:
    @pytest.mark.slow  # whole models
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_prompt_is_equal_to_the_bit_alone_and_in_company(
        self, tiny_pipeline, diffusers_encode, dtype
    ):
        encoder = open_text_encoder(tiny_pipeline(), compute_dtype=dtype)
        # Half precision takes a hundred times as long where the CPU has no units for it.
        prompts, length = (PROMPTS, 512) if dtype == torch.float32 else (PROMPTS[::2], 48)
        together = encoder.encode(prompts, device="cpu", max_length=length)
        alone = [encoder.encode([prompt], device="cpu", max_length=length)[0] for prompt in prompts]

        for prompt, one, other in zip(prompts, together, alone, strict=True):
            expected = diffusers_encode(dtype, prompt, length)
            assert one.shape == (1, length, 4096)
            assert one.dtype == torch.float32
            assert torch.equal(one, expected.float()), prompt
            assert torch.equal(other, expected.float()), prompt

    @pytest.mark.parametrize(
        "policy",
        [
            OffloadPolicy.layerwise(1, source="pinned"),
            OffloadPolicy.block_swap(1, 1),
            OffloadPolicy.resident(),
        ],
        ids=["layerwise, pinned", "block swap", "resident"],
    )
    def test_the_policy_changes_nothing(self, tiny_pipeline, diffusers_encode, policy):
        encoder = open_text_encoder(tiny_pipeline(), compute_dtype=torch.float32)

        (embedding,) = encoder.encode(PROMPTS[:1], device="cpu", policy=policy)

        assert torch.equal(embedding, diffusers_encode(torch.float32, PROMPTS[0]))

    def test_weights_are_read_once_for_all_prompts(self, tiny_pipeline, monkeypatch):
        read = []

        class RecordingSource(FileSource):
            def read_block(self, key, into):
                read.append(key)
                super().read_block(key, into)

        monkeypatch.setattr(block_stack, "FileSource", RecordingSource)
        open_text_encoder(tiny_pipeline()).encode(PROMPTS, device="cpu")

        assert sorted(read) == [BlockKey("umt5", 0), BlockKey("umt5", 1)]

    def test_another_length(self, tiny_pipeline, diffusers_encode):
        encoder = open_text_encoder(tiny_pipeline(), compute_dtype=torch.float32)

        (embedding,) = encoder.encode(PROMPTS[:1], device="cpu", max_length=10)

        assert torch.equal(embedding, diffusers_encode(torch.float32, PROMPTS[0], length=10))

    def test_it_works_inside_inference_mode_and_outside_again(self, tiny_pipeline):
        encoder = open_text_encoder(tiny_pipeline(), compute_dtype=torch.float32)
        with torch.inference_mode():
            (inside,) = encoder.encode(["x"], device="cpu")

        assert torch.equal(encoder.encode(["x"], device="cpu")[0], inside)

    def test_sharded_weights_and_the_other_name_of_the_token_table(
        self, pipeline_copy, diffusers_encode
    ):
        folder = pipeline_copy / "text_encoder"
        shard_by_hand(
            folder,
            {
                "encoder.embed_tokens.weight": load_file(folder / "model.safetensors")[
                    "shared.weight"
                ]
            },
        )

        encoder = open_text_encoder(folder, compute_dtype=torch.float32)

        assert torch.equal(
            encoder.encode(["a"], device="cpu")[0], diffusers_encode(torch.float32, "a")
        )


def shard_by_hand(folder, extra=None):
    """Turn `model.safetensors` into two shards under an index."""
    tensors = load_file(folder / "model.safetensors")
    if extra:
        del tensors["shared.weight"]
        tensors |= extra
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:9],
        "model-00002-of-00002.safetensors": names[9:],
    }
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class TestEmbedding:
    def test_rows_after_the_end_are_zero_and_the_end_is_not(self, tiny_pipeline):
        encoder = open_text_encoder(tiny_pipeline())

        (embedding,) = encoder.encode(["cat"], device="cpu")

        tokens = len("_cat") + 1
        assert embedding[0, :tokens].abs().sum(dim=1).min() > 0
        assert torch.count_nonzero(embedding[0, tokens:]) == 0

    def test_prompts_differ(self, tiny_pipeline):
        first, second = open_text_encoder(tiny_pipeline()).encode(["a cat", "a dog"], device="cpu")

        assert not torch.allclose(first, second, atol=0.1)

    @pytest.mark.parametrize(("prompts", "length"), [([], 512), (["a"], 0)])
    def test_nothing_to_encode(self, tiny_pipeline, prompts, length):
        with pytest.raises(PromptError, match="at least one"):
            open_text_encoder(tiny_pipeline()).encode(prompts, device="cpu", max_length=length)

    def test_the_token_table_is_never_loaded(self, tiny_pipeline):
        encoder = open_text_encoder(tiny_pipeline())
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
        # transformers 5.0 does not tie the table's two names before it loads a file.
        rest = {name for name in on_meta if not name.endswith(streamed)} - {
            "encoder.embed_tokens.weight"
        }
        assert rest == {"shared.weight"}


class TestCleaning:
    @pytest.mark.parametrize(
        ("prompt", "cleaned"),
        [
            ("  a\n b\t\tc ", "a b c"),
            ("&amp;quot;x&amp;quot;", '"x"'),
            ("caf\u00c3\u00a9", "caf\u00e9"),
            ("\uff21", "A"),
            ("", ""),
        ],
    )
    def test_as_diffusers_does(self, prompt, cleaned):
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        assert clean_prompt(prompt) == prompt_clean(prompt) == cleaned


class TestBadFiles:
    def test_nothing_there(self, tmp_path):
        with pytest.raises(CheckpointFileError, match="neither a diffusers pipeline folder"):
            open_text_encoder(tmp_path)

    def test_no_tokenizer(self, pipeline_copy):
        shutil.rmtree(pipeline_copy / "tokenizer")

        with pytest.raises(CheckpointFileError, match="the tokenizer is missing"):
            open_text_encoder(pipeline_copy)

    @pytest.mark.parametrize("text", ["", "{}", '{"model": '])
    def test_a_damaged_tokenizer(self, pipeline_copy, text):
        (pipeline_copy / "tokenizer" / "tokenizer.json").write_text(text)
        (pipeline_copy / "tokenizer" / "spiece.model").unlink()

        with pytest.raises(CheckpointFileError, match="is not a tokenizer"):
            open_text_encoder(pipeline_copy)

    @pytest.mark.parametrize(
        ("settings", "config"),
        [
            ({"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}, {}),
            ({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}, {}),
            ({"auto_map": ["evil.Evil", None], "tokenizer_class": "Evil"}, {}),
            (
                {"tokenizer_class": "Evil"},
                {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}},
            ),
            ({}, {"model_type": "umt5", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}),
        ],
        ids=[
            "of a known class",
            "of its own class",
            "as a list",
            "of a config",
            "of an old config",
        ],
    )
    def test_python_in_a_tokenizer_folder_never_runs_and_nobody_is_asked(
        self, pipeline_copy, monkeypatch, settings, config
    ):
        folder, answers = pipeline_copy / "tokenizer", io.StringIO("y\n" * 9)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        if config:
            (folder / "config.json").write_text(json.dumps(config))
        (folder / "evil.py").write_text(
            f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\nEvil = dict\n"
        )
        monkeypatch.setattr("sys.stdin", answers)

        # transformers releases differ in which of these open with their own class.
        refusal = ""
        try:
            open_text_encoder(pipeline_copy)
        except CheckpointFileError as err:
            refusal = str(err)
        assert "trust_remote_code" not in refusal
        assert not (folder / "ran").exists()
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
    def test_a_config_of_something_else(self, pipeline_copy, change, message):
        path = pipeline_copy / "text_encoder" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

        with pytest.raises(CheckpointFileError, match=message):
            open_text_encoder(pipeline_copy)

    def test_a_truncated_shard(self, pipeline_copy):
        folder = pipeline_copy / "text_encoder"
        shard_by_hand(folder)
        shard = folder / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])

        with pytest.raises(CheckpointFileError, match=r"model-00002.*: is truncated"):
            open_text_encoder(pipeline_copy)

    def test_a_missing_shard(self, pipeline_copy):
        folder = pipeline_copy / "text_encoder"
        shard_by_hand(folder)
        (folder / "model-00001-of-00002.safetensors").unlink()

        with pytest.raises(CheckpointFileError, match="this shard is missing"):
            open_text_encoder(pipeline_copy)

    def test_a_pickle_in_its_place(self, pipeline_copy):
        folder = pipeline_copy / "text_encoder"
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

        with pytest.raises(CheckpointFileError, match="pickles"):
            open_text_encoder(pipeline_copy)
