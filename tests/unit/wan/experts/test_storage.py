"""Bytes of a pair in every storage, as predicted before a read, and quantised blocks."""

import logging
import math
import sys
from pathlib import Path

import pytest
import torch

from wanstream.offload.formats import decode_work_bytes
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.reader import HAS_DIRECT
from wanstream.plan.memory import RAW_SLOTS
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.offload.fixtures import ThreadGroup
from wanstream.tests.support.wan.opened_experts import LAYERWISE, SWAP, streamed, wan_config
from wanstream.tests.support.wan.process_counters import io_bytes, memory_bytes
from wanstream.wan.experts.open import open_experts
from wanstream.wan.experts.storage import resident_bytes

FP32 = torch.float32
BF16 = torch.bfloat16
VALUES = 8 * 256 * 256 + 2 * 256 * 512
"""Matrix values in a tiny block."""
QUANTISED = VALUES + 4 * (8 * 256 + 512 + 256)
"""Bytes of a block in fp8 or int8, with row scales."""
A14B = wan_config(heads=40, layers=40, ffn_dim=13824)


def velocity(pair, lane, expert="high"):
    return streamed(pair, LAYERWISE, lane, steps=[expert])[0]


def test_resident_bytes_of_the_real_model():
    small = 702_870_528 - T2V_A14B.streamed_bytes()
    tables = 2 * 1024 * 128 * 4
    patch_and_output = 2 * (5120 * 65 + 64 * 5121) + 4 * 2 * 5120
    resident = patch_and_output + 40 * small + tables
    assert resident == T2V_A14B.resident_bytes() + tables == 15_394_944
    assert resident_bytes(A14B, BF16) == resident


def test_resident_shards_are_predicted(tiny_expert_file):
    file = tiny_expert_file()
    with open_experts(file, file, compute_dtype=FP32) as pair:
        plain = pair.device_bytes(SWAP, device="cpu")
        pair.shard(*ThreadGroup(1).ranks(on_device=True))
        predicted = pair.device_bytes(SWAP, device="cpu")
        assert predicted - plain == 2 * 4 * pair.block_bytes.stored
        engine = pair.engine(SWAP, "cpu")
        assert all(engine.models[name] for name in ("high", "low"))  # loads the resident parameters
        visits = step_visits(["high", "low"], engine.block_counts)
        with engine.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    pass
        assert (pair.loaded_bytes, pair.host_bytes) == (predicted, 0)
        pair.shard(*ThreadGroup(1).ranks(on_device=True))
        assert pair.engine(SWAP, "cpu") is engine, "another meeting with the same shards"
        for other in (*ThreadGroup(1).ranks(), None):
            pair.shard(other)
            assert pair.device_bytes(SWAP, device="cpu") == plain
            before = engine
            engine = pair.engine(SWAP, "cpu")
            assert engine is not before


@pytest.mark.parametrize(("dtype", "fp8"), [(FP32, None), (BF16, "scaled_fp8")])
def test_engine_takes_the_predicted_bytes(tiny_expert_file, dtype, fp8):
    file = tiny_expert_file(fp8=fp8)
    with open_experts(file, file, compute_dtype=dtype) as pair:
        predicted = pair.device_bytes(SWAP, device="cpu")
        engine = pair.engine(SWAP, "cpu")
        engine.allocate_buffers()
        models = [engine.models[name] for name in ("high", "low")]
        parameters = (parameter for model in models for parameter in model.parameters())
        # Streamed weights are empty while their block is not in a buffer. Embedder weights are
        # on meta.
        loaded = sum(parameter.nbytes for parameter in parameters if not parameter.is_meta)
        buffers = 4 * VALUES * dtype.itemsize
        tables = 2 * 2 * 1024 * 128 * 4
        assert predicted == buffers + loaded + tables == pair.loaded_bytes
        assert pair.device_bytes(LAYERWISE, device="cpu") < predicted
        with pytest.raises(ValueError, match="only 4 blocks"):
            pair.device_bytes(OffloadPolicy.block_swap(5))


@pytest.mark.parametrize(
    ("stored", "fp8", "compute", "storage", "file", "kept"),
    [
        (BF16, None, BF16, "as stored", 2 * VALUES, 2 * VALUES),
        (FP32, None, BF16, "as stored", 4 * VALUES, 4 * VALUES),
        (BF16, "scaled_fp8", BF16, "as stored", VALUES, VALUES),
        (FP32, None, BF16, "fp8", 4 * VALUES, QUANTISED),
        (BF16, "scaled_fp8", BF16, "fp8", VALUES, VALUES),
        (BF16, "scaled_fp8", BF16, "int8 ConvRot", VALUES, QUANTISED),
    ],
)
def test_bytes_are_known_before_a_read(tiny_expert_file, stored, fp8, compute, storage, file, kept):
    """A GPU has the stored bytes of decoded blocks too, also if only one expert is decoded."""
    path = tiny_expert_file(dtype=stored, fp8=fp8)
    plain = tiny_expert_file(dtype=compute)
    work = decode_work_bytes(256 * 512, torch.device("cuda")) if storage == "int8 ConvRot" else 0
    is_decoded = kept != compute.itemsize * VALUES
    with open_experts(path, path, compute_dtype=compute, storage=storage) as pair:
        block = pair.block_bytes
        computed = compute.itemsize * VALUES
        assert (block.file, block.stored, block.computed) == (file, kept, computed)
        assert pair.loaded_bytes == 0
        beside = pair.device_bytes(LAYERWISE) - pair.device_bytes(LAYERWISE, device="cpu")
        assert beside == (RAW_SLOTS * kept + work if is_decoded else 0)
    if storage != "as stored":
        return
    for experts in ((path, plain), (plain, path)):
        with open_experts(*experts, compute_dtype=compute) as pair:
            on_cpu = pair.device_bytes(LAYERWISE, device="cpu")
            assert beside == pair.device_bytes(LAYERWISE) - on_cpu


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc")
@pytest.mark.parametrize(("fp8", "storage"), [(None, "fp8"), ("comfy_quant", "as stored")])
def test_opening_reads_headers_and_markers_only(tiny_expert_file, fp8, storage):
    path = tiny_expert_file(fp8=fp8)
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    open_experts(path, path, storage=storage).close()
    before = io_bytes("rchar")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
    resident = memory_bytes("VmRSS")
    open_experts(path, path, storage=storage).close()
    # Python's buffered reader reads more than was requested.
    assert io_bytes("rchar") - before < 2 * header_bytes + 200_000
    assert path.stat().st_size > 20 * header_bytes + 200_000
    assert memory_bytes("VmHWM") - resident < path.stat().st_size / 4


def test_two_pairs_of_one_file_do_not_touch_each_other(tiny_expert_file, lane):
    path = tiny_expert_file()
    with open_experts(path, path) as plain, open_experts(path, path, storage="fp8") as kept:
        first = velocity(plain, lane)
        second = velocity(kept, lane)
        assert not torch.equal(first, second)
        assert torch.equal(velocity(plain, lane), first)
        assert torch.equal(velocity(kept, lane), second)


def cast_matrices(tensors):
    """Cast to fp8 without scales."""
    names = (key for key in tensors if key.startswith("blocks.") and key.endswith(".weight"))
    return {key: tensors[key].to(torch.float8_e4m3fn) for key in names if tensors[key].dim() == 2}


@pytest.mark.parametrize("form", ["cast", "bf16 and fp8"])
def test_fp8_files_are_unchanged_and_logged(tiny_expert_file, changed_expert, lane, caplog, form):
    caplog.set_level(logging.INFO)
    low = tiny_expert_file(seed=2, fp8="scaled_fp8")
    if form == "cast":
        low = changed_expert(cast_matrices, dtype=BF16)
    mixed = form == "bf16 and fp8"
    high = tiny_expert_file(seed=1, dtype=BF16) if mixed else low
    with open_experts(high, low, storage="fp8") as kept, open_experts(high, low) as plain:
        logged = [record.getMessage() for record in caplog.records]
        [message] = [text for text in logged if "changes nothing" in text]
        assert str(low) in message
        stored = (kept.block_bytes.stored, plain.block_bytes.stored, plain.block_bytes.file)
        assert stored == ((QUANTISED, 2 * VALUES, 2 * VALUES) if mixed else (VALUES,) * 3)
        assert torch.equal(velocity(kept, lane), velocity(plain, lane)) == (not mixed)
        assert torch.equal(velocity(kept, lane, "low"), velocity(plain, lane, "low"))


@pytest.mark.parametrize(("storage", "bad"), [("fp8", math.nan), ("int8 ConvRot", -math.inf)])
def test_broken_weight_is_refused_by_name(tiny_expert_file, changed_expert, lane, bad, storage):
    """By file, tensor and row."""

    def spoil(tensors):
        tensors["blocks.2.ffn.0.weight"][77, 5] = bad
        return tensors

    whole = tiny_expert_file()
    with open_experts(changed_expert(spoil), whole, storage=storage) as pair:
        said = r"changed\.safetensors: ffn\.\S+ of block 2 .* row 77"
        with pytest.raises(SourceError, match=said):
            velocity(pair, lane)
        velocity(pair, lane, "low")  # the pair is still usable


@pytest.mark.skipif(sys.platform != "linux" or not HAS_DIRECT, reason="needs O_DIRECT and /proc")
def test_blocks_read_past_the_page_cache_are_the_same(tiny_expert_folder, lane):
    high, low = (tiny_expert_folder(seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    found = []
    from_storage = []
    # In this order: the files are in the page cache when they are read past it.
    for direct in (False, True):
        with open_experts(high, low, direct=direct) as pair:
            before = io_bytes("read_bytes")
            found.append(streamed(pair, LAYERWISE, lane, steps=["high", "low"]))
            from_storage.append(io_bytes("read_bytes") - before)
    assert all(map(torch.equal, *found))
    if from_storage[1] == 0:
        pytest.skip("the temporary folder is on no disk")
    assert from_storage[1] > 4 * 2 * 10 * 128 * 128 * 2
