"""Experts in GGUF files: every layout, streamed against plain models with the decoded values."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from wanstream.testing.quantised import q4_k_m, save_expert_gguf
from wanstream.tests.support.offload.edited_files import close_gguf
from wanstream.tests.support.wan.opened_experts import LAYERWISE, assert_holds, streamed
from wanstream.tests.support.wan.quantised_files import matrices
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.open import is_merged, open_expert
from wanstream.wan.experts.open import open_experts

PREFIX = "model.diffusion_model."
PATCHES = "patch_embedding.weight"
NORM = "blocks.1.norm3.bias"
LAYERS = 2
TYPES = {
    **{name: matrices(name) for name in ("BF16", "Q4_K", "Q8_0")},
    "Q4_K_M": q4_k_m,
    "everything BF16": lambda name: "BF16",
    "Q8_0, others F16": matrices("Q8_0", others="F16"),
}


@pytest.fixture(scope="module")
def gguf_expert(tmp_path_factory, make_tiny_expert):
    """`gguf_expert(types="Q4_K_M", seed=0, ...)`: a path, and the fp32 model with its values."""

    @functools.cache
    def write(*, types="Q4_K_M", seed=0, in_channels=16, **how):
        path = tmp_path_factory.mktemp("gguf") / "expert.gguf"
        model = make_tiny_expert(seed=seed, in_channels=in_channels, layers=LAYERS)
        return path, save_expert_gguf(model, path, types=TYPES[types], seed=seed, **how)

    return write


@pytest.fixture
def edited(gguf_expert, tmp_path):
    """`edited(changes, architecture="wan", **fields)`: a Q8_0 file with these arrays and texts.

    None leaves an array out.
    """

    def write(changes, architecture="wan", **fields):
        path = tmp_path / "edited.gguf"
        writer = GGUFWriter(path, architecture or "wan")
        if architecture is None:
            writer.kv_data[0].clear()
        for field, text in fields.items():
            writer.add_string(field, text)
        whole = GGUFReader(gguf_expert(types="Q8_0")[0])
        if PATCHES not in changes:
            shape = f"comfy.gguf.orig_shape.{PATCHES}"
            writer.add_array(shape, whole.get_field(shape).contents())
        for tensor in whole.tensors:
            if tensor.name not in changes:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        for name, array in changes.items():
            if array is not None:
                writer.add_tensor(name, array)
        close_gguf(writer)
        return path

    return write


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype=dtype)


class TestOpened:
    @pytest.mark.parametrize("types", TYPES)
    def test_values_of_every_type(self, gguf_expert, types):
        path, model = gguf_expert(types=types)
        expert = open_expert(path)
        assert_holds(expert, model)
        assert expert.scales == {}
        assert (expert.config.family, expert.config.num_layers) == ("t2v", LAYERS)

    @pytest.mark.parametrize(
        ("patches", "prefix", "in_channels"),
        [("shape field", "", 16), ("five dimensions", PREFIX, 36), ("merged", "", 36)],
    )
    def test_five_dimensions(self, gguf_expert, patches, prefix, in_channels):
        path, model = gguf_expert(patches=patches, prefix=prefix, in_channels=in_channels)
        expert = open_expert(path)
        assert expert.weights[PATCHES].shape == (256, in_channels, 1, 2, 2)
        assert_holds(expert, model)

    @pytest.mark.parametrize("architecture", ["pig", None])
    def test_architectures(self, edited, gguf_expert, architecture):
        assert_holds(open_expert(edited({}, architecture)), gguf_expert(types="Q8_0")[1])

    def test_leading_ones_may_be_gone(self, edited, gguf_expert):
        """ggml counts dimensions from the other end and so drops leading ones in files."""
        model = gguf_expert(types="Q8_0")[1]
        tables = {f"blocks.{i}.modulation": b.scale_shift_table for i, b in enumerate(model.blocks)}
        tables["head.modulation"] = model.scale_shift_table
        path = edited({name: table.detach().numpy()[0] for name, table in tables.items()})
        assert_holds(open_expert(path), model)

    @pytest.mark.parametrize("shape", [(256, 16, 2, 2), (256, 64), (256 * 64,)])
    def test_merged_patch_embeddings(self, edited, gguf_expert, shape):
        model = gguf_expert(types="Q8_0")[1]
        weight = model.patch_embedding.weight.detach().numpy().reshape(shape)
        assert_holds(open_expert(edited({PATCHES: weight})), model)

    @pytest.mark.parametrize(
        ("stored", "original", "merged"),
        [
            ((6, 5), (1, 6, 5), True),
            ((30,), (1, 6, 5), True),
            ((5, 6), (6, 5), False),
            ((3, 10), (6, 5), False),
            ((6, 5, 1), (6, 5), True),
            ((4096, 1, 2, 2), (256, 16, 1, 2, 2), True),
            ((16, 256, 1, 2, 2), (256, 16, 1, 2, 2), False),
            ((256, 16, 2), (256, 16, 1, 2, 2), False),
            ((256,), (256, 16), False),
            ((256, 16), (256,), False),
            ((), (1,), True),
            ((0, 3), (0, 3), True),
            ((0,), (0, 3), False),
            ((0, 5), (6, 5), False),
        ],
    )
    def test_merged_shapes(self, stored, original, merged):
        assert is_merged(stored, original) is merged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PATCHES: None}, "patch_embedding.weight is missing"),
        ({"patch_embedding.bias": None, PATCHES: zeros(256, 64)}, r"weight is \[256, 64\]"),
        ({PATCHES: zeros(256, 63)}, r"patch_embedding.weight is \[256, 63\]; 5 sizes"),
        ({PATCHES: zeros(64, 256)}, r"patch_embedding.weight is \[64, 256\]; 5 sizes"),
        ({"blocks.1.ffn.0.weight": zeros(256, 512)}, r"\[256, 512\]; \[512, 256\] is expected"),
        ({"blocks.1.modulation": zeros(5, 256)}, r"\[5, 256\]; \[1, 6, 256\] is expected"),
        ({NORM: zeros(256, dtype=np.int32)}, "norm3.bias is torch.int32; weights are"),
        ({f"{PREFIX}head.head.bias": zeros(64)}, "head.head.bias means the same parameter"),
    ],
)
def test_wrong_tensors_are_refused(edited, changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_expert(edited(changes))


def test_config_in_the_header_is_read(edited):
    with pytest.raises(CheckpointError, match="model_type is 'animate2'"):
        open_expert(edited({}, config='{"transformer": {"model_type": "animate2"}}'))


@pytest.mark.parametrize("architecture", ["llama", "Wan"])
def test_other_architectures_are_refused(edited, architecture):
    with pytest.raises(CheckpointError, match=f"is a GGUF of '{architecture}', not of 'wan'"):
        open_expert(edited({}, architecture))


class TestStreamed:
    def test_bytes_are_those_of_the_file_and_the_compute_dtype(self, gguf_expert, lane):
        path = gguf_expert(types="Q4_K")[0]
        with open_experts(path, path, compute_dtype=torch.bfloat16) as pair:
            streamed(pair, LAYERWISE, lane, steps=["high", "low"])
            assert pair.loaded_bytes == pair.device_bytes(LAYERWISE, device="cpu")
            weights = pair.high.weights.values()
            assert 512 * 144 in {each.nbytes for each in weights if each.shape == (512, 256)}
            in_blocks = LAYERS * (8 * 256 * 256 + 2 * 256 * 512) // 256 * 144
            outside = sum(tensor.nbytes for tensor in weights) - in_blocks
            assert pair.engine(LAYERWISE, "cpu").models.non_block_bytes == 2 * outside

    @pytest.mark.parametrize(("types", "same"), [("Q4_K_M", True), ("BF16", False)])
    def test_fp8_storage_changes_only_what_is_not_packed(self, gguf_expert, lane, types, same):
        path = gguf_expert(types=types)[0]
        with open_experts(path, path) as plain, open_experts(path, path, storage="fp8") as kept:
            assert (kept.block_bytes.stored == plain.block_bytes.stored) is same
            both = [streamed(pair, LAYERWISE, lane) for pair in (plain, kept)]
            assert all(map(torch.equal, *both)) is same
