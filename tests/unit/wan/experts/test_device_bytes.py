"""A pair's predicted device memory, against the real model's figures and against an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.offload.sharding.group import Sharded
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.shapes import T2V_A14B
from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.experts.open import open_experts
from wanstream.wan.experts.storage import resident_bytes

A14B = WanConfig(
    num_attention_heads=40,
    num_layers=40,
    ffn_dim=13824,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    patch_size=(1, 2, 2),
)


def test_the_real_model() -> None:
    small = 702_870_528 - T2V_A14B.streamed_bytes()
    tables = 2 * 1024 * 128 * 4
    patch_and_output = 2 * (5120 * 65 + 64 * 5121) + 4 * 2 * 5120
    resident = patch_and_output + 40 * small + tables
    assert resident == T2V_A14B.resident_bytes() + tables == 15_394_944
    assert resident_bytes(A14B, torch.bfloat16) == resident


class Only:
    """Single-rank group."""

    rank, size = 0, 1

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        return (said,)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        into.copy_(own)

    def abort(self) -> None:
        raise AssertionError("a group of one rank cannot fail")


def test_resident_shards_are_predicted_too(tiny_expert_file: Callable[..., Path]) -> None:
    file, policy = tiny_expert_file(), OffloadPolicy.block_swap(2, 1)
    with open_experts(file, file, compute_dtype=torch.float32) as pair:
        plain = pair.device_bytes(policy, device="cpu")
        pair.shard(Sharded(gather=Only(), on_device=True))
        predicted = pair.device_bytes(policy, device="cpu")
        assert predicted - plain == 2 * 4 * pair.block_bytes.stored
        engine = pair.engine(policy, "cpu")
        assert all(engine.models[name] for name in ("high", "low"))  # loads the resident parameters
        visits = step_visits(["high", "low"], engine.block_counts)
        with engine.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    pass
        assert pair.loaded_bytes == predicted
        assert pair.host_bytes == 0
        pair.shard(Sharded(gather=Only(), on_device=True))
        assert pair.engine(policy, "cpu") is engine, "another meeting with the same shards"
        for other in (Sharded(gather=Only()), None):
            pair.shard(other)
            assert pair.device_bytes(policy, device="cpu") == plain
            before, engine = engine, pair.engine(policy, "cpu")
            assert engine is not before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8", [None, "scaled_fp8"])
def test_an_engine_takes_what_was_told(
    tiny_expert_file: Callable[..., Path], dtype: torch.dtype, fp8: str | None
) -> None:
    file, policy = tiny_expert_file(fp8=fp8), OffloadPolicy.block_swap(2, 1)
    with open_experts(file, file, compute_dtype=dtype) as pair:
        predicted = pair.device_bytes(policy, device="cpu")
        engine = pair.engine(policy, "cpu")
        engine.allocate_buffers()
        models = [engine.models[name] for name in ("high", "low")]
        parameters = [
            parameter
            for model in models
            for parameter in model.parameters()
            if not parameter.is_meta
        ]
        # Streamed weights are empty while their block is not in a buffer. Embedder weights are
        # on meta.
        buffers = 4 * (8 * 256 * 256 + 2 * 256 * 512) * dtype.itemsize
        tables = 2 * 2 * 1024 * 128 * 4
        assert (
            predicted
            == buffers + sum(parameter.nbytes for parameter in parameters) + tables
            == pair.loaded_bytes
        )
        assert pair.device_bytes(OffloadPolicy.layerwise(1), device="cpu") < predicted
        with pytest.raises(ValueError, match="only 4 blocks"):
            pair.device_bytes(OffloadPolicy.block_swap(5))


@pytest.mark.parametrize(
    ("fp8", "stored", "dtype", "bytes_per_value"),
    [
        (None, torch.bfloat16, torch.bfloat16, 0),
        (None, torch.float32, torch.bfloat16, 4),
        (None, torch.bfloat16, torch.float32, 2),
        ("scaled_fp8", torch.bfloat16, torch.bfloat16, 1),
    ],
)
def test_a_gpu_also_has_two_blocks_that_are_decoded(
    tiny_expert_file: Callable[..., Path],
    fp8: str | None,
    stored: torch.dtype,
    dtype: torch.dtype,
    bytes_per_value: int,
) -> None:
    policy = OffloadPolicy.layerwise(1)
    decoded, plain = tiny_expert_file(fp8=fp8, dtype=stored), tiny_expert_file(dtype=dtype)
    for high, low in ((decoded, plain), (plain, decoded)):
        with open_experts(high, low, compute_dtype=dtype) as pair:
            beside = pair.device_bytes(policy) - pair.device_bytes(policy, device="cpu")
            assert beside == 2 * bytes_per_value * (8 * 256 * 256 + 2 * 256 * 512)
