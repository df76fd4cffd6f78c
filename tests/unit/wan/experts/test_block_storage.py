"""Pair with quantising storage: byte counts, unchanged tensors and refusals."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.block_kernels import EXACT, Kernels
from wanstream.offload.formats import decode_work_bytes
from wanstream.offload.sources.base import SourceError
from wanstream.plan.memory import RAW_SLOTS
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.experts.open import open_experts
from wanstream.wan.transformer.compiled_block import get_compiler

POLICY = OffloadPolicy.layerwise(1)
VALUES = 8 * 256 * 256 + 2 * 256 * 512
"""Matrix values in a tiny block."""
ROWS = 8 * 256 + 512 + 256
QUANTISED = VALUES + 4 * ROWS
"""Bytes of a block in fp8 or int8, with row scales."""


def velocity(pair: ExpertPair, lane: Lane, expert: str = "high") -> torch.Tensor:
    engine = pair.engine(POLICY, "cpu")
    with torch.inference_mode(), engine.run(step_visits([expert], engine.block_counts)) as run:
        [velocity] = forward_lanes(
            engine.models[expert],
            [lane],
            torch.tensor([990.0]),
            lambda block: run.visit(0, expert, block),
        )
    return velocity


@pytest.mark.parametrize(
    ("stored", "fp8", "storage", "file", "kept"),
    [
        (torch.bfloat16, None, "as stored", 2 * VALUES, 2 * VALUES),
        (torch.bfloat16, None, "fp8", 2 * VALUES, QUANTISED),
        (torch.float16, None, "fp8", 2 * VALUES, QUANTISED),
        (torch.float32, None, "fp8", 4 * VALUES, QUANTISED),
        (torch.bfloat16, "scaled_fp8", "fp8", VALUES, VALUES),
        (torch.bfloat16, None, "int8 ConvRot", 2 * VALUES, QUANTISED),
        (torch.bfloat16, "scaled_fp8", "int8 ConvRot", VALUES, QUANTISED),
    ],
)
def test_bytes_are_told_before_anything_is_read(tiny_expert_file, stored, fp8, storage, file, kept):
    path = tiny_expert_file(dtype=stored, fp8=fp8)
    with open_experts(path, path, compute_dtype=torch.bfloat16, storage=storage) as pair:
        block = pair.block_bytes
        assert (block.file, block.stored, block.computed) == (file, kept, 2 * VALUES)
        assert pair.loaded_bytes == 0
        beside = pair.device_bytes(POLICY) - pair.device_bytes(POLICY, device="cpu")
        work = (
            decode_work_bytes(256 * 512, torch.device("cuda")) if storage == "int8 ConvRot" else 0
        )
        assert beside == (RAW_SLOTS * kept + work if storage != "as stored" else 0)


def test_opening_reads_headers_only(tiny_expert_file):
    path = tiny_expert_file()

    def bytes_read() -> int:
        with open("/proc/self/io", encoding="ascii") as counters:
            return int(counters.readline().removeprefix("rchar: "))

    if not Path("/proc/self/io").exists():
        pytest.skip("bytes are counted in /proc")
    open_experts(path, path).close()
    before = bytes_read()
    open_experts(path, path, storage="fp8").close()
    assert bytes_read() - before < 0.05 * path.stat().st_size


def test_two_pairs_of_one_file_with_different_storage_do_not_touch_each_other(
    tiny_expert_file, lane
):
    path = tiny_expert_file()
    with open_experts(path, path) as plain, open_experts(path, path, storage="fp8") as kept:
        first, second = velocity(plain, lane), velocity(kept, lane)
        assert not torch.equal(first, second)
        assert torch.equal(velocity(plain, lane), first)
        assert torch.equal(velocity(kept, lane), second)


@pytest.fixture
def cast_file(tiny_expert_file, tmp_path) -> Path:
    """File with matrices cast to fp8 without scales."""
    tensors = load_file(tiny_expert_file(dtype=torch.bfloat16))
    cast = {
        key: tensor.to(torch.float8_e4m3fn)
        for key, tensor in tensors.items()
        if is_matrix_of_block(key, tensor)
    }
    save_file({**tensors, **cast}, tmp_path / "cast.safetensors")
    return tmp_path / "cast.safetensors"


def is_matrix_of_block(key: str, tensor: torch.Tensor) -> bool:
    return key.startswith("blocks.") and key.endswith(".weight") and tensor.dim() == 2


def test_fp8_files_are_unchanged_and_logged(tiny_expert_file, cast_file, lane, caplog):
    for path in (tiny_expert_file(fp8="scaled_fp8"), cast_file):
        caplog.clear()
        with caplog.at_level(logging.INFO), open_experts(path, path, storage="fp8") as kept:
            [message] = [
                record.getMessage()
                for record in caplog.records
                if "changes nothing" in record.getMessage()
            ]
            assert str(path) in message
            with open_experts(path, path) as plain:
                assert (
                    kept.block_bytes.stored
                    == plain.block_bytes.stored
                    == plain.block_bytes.file
                    == VALUES
                )
                assert torch.equal(velocity(kept, lane), velocity(plain, lane))


def test_a_pair_of_a_bf16_and_an_fp8_file_quantises_only_the_bf16_file(
    tiny_expert_file, lane, caplog
):
    high, low = (
        tiny_expert_file(seed=1, dtype=torch.bfloat16),
        tiny_expert_file(seed=2, fp8="scaled_fp8"),
    )
    with caplog.at_level(logging.INFO), open_experts(high, low, storage="fp8") as kept:
        [message] = [
            record.getMessage()
            for record in caplog.records
            if "changes nothing" in record.getMessage()
        ]
        assert str(low) in message
        with open_experts(high, low) as plain:
            assert not torch.equal(velocity(kept, lane), velocity(plain, lane))
            assert torch.equal(velocity(kept, lane, "low"), velocity(plain, lane, "low"))
        assert kept.block_bytes.file == 2 * VALUES
        assert kept.block_bytes.stored == QUANTISED


@pytest.mark.parametrize("storage", ["fp8", "int8 ConvRot"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_broken_weight_is_refused_by_file_tensor_and_row(
    tiny_expert_file, tmp_path, lane, bad, storage
):
    tensors = load_file(tiny_expert_file())
    whole, path = tiny_expert_file(), tmp_path / "broken.safetensors"
    tensors["blocks.2.ffn.0.weight"][77, 5] = bad
    save_file(tensors, path)
    with open_experts(path, whole, storage=storage) as pair:
        with pytest.raises(
            SourceError, match=r"broken\.safetensors: ffn\.\S+ of block 2 .* row 77"
        ):
            velocity(pair, lane)
        velocity(pair, lane, "low")  # the pair is still usable


def test_another_storage_is_refused_with_those_there_are(tiny_expert_file):
    with pytest.raises(
        ValueError,
        match="storage is 'int8'; blocks can be kept 'as stored' or 'fp8' or 'int8 ConvRot'",
    ):
        open_experts(tiny_expert_file(), tiny_expert_file(), storage="int8")


def test_another_policy_keeps_the_kernels(tiny_expert_file):
    path = tiny_expert_file()
    with open_experts(path, path) as pair:
        pair.kernels = Kernels(math="exact", compiler="eager")
        pair.engine(POLICY, "cpu")
        settings = pair.engine(replace(POLICY, chunk_tokens=8), "cpu").models.settings
        assert (settings.math, settings.compiler, settings.chunk_tokens) == (
            EXACT,
            get_compiler("eager"),
            8,
        )
