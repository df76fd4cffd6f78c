"""Expert pair: streamed shards, outer values, engines, changed files and LoRAs, shared RAM."""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from wanstream.block_kernels import ATTENTIONS, EXACT, INDUCTOR, Kernels
from wanstream.block_kernels.attention import KernelsError
from wanstream.host import auto_policy
from wanstream.offload import patch_work_bytes
from wanstream.offload.host_memory.shared_segment import PREFIX, SHM
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy, StepRange, StepStrengths
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.wan.fixtures import wait_for_embedders
from wanstream.tests.support.wan.opened_experts import (
    FIRST_TIME,
    LAYERWISE,
    PINNED,
    RESIDENT,
    STEPS,
    SWAP,
    plain_velocity,
    run_step,
    run_steps,
    streamed,
    whole_model,
)
from wanstream.tests.support.wan.process_counters import io_bytes
from wanstream.wan import ExpertsRegistry, open_experts, open_lora, open_pair
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.transformer.compiled_block import get_compiler

HIGH = {"seed": 1}
LOW = {"seed": 2}
FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
IN_FP32 = {"compute_dtype": FP32}
TIME = "diffusion_model.time_projection.1"
SHARED = OffloadPolicy.layerwise(1, source="pinned")
SOME = replace(SHARED, ram_blocks=8)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts what the system reads")


def test_streamed_shards_equal_from_pretrained(tiny_expert_folder, lane):
    """Some blocks lie in two files."""
    folders = {"high": tiny_expert_folder(**HIGH, shards=2), "low": tiny_expert_folder(**LOW)}
    models = {name: whole_model(folder, FP32) for name, folder in folders.items()}
    with open_experts(*folders.values(), **IN_FP32) as pair:
        pair.kernels = Kernels(math="exact")
        velocities = streamed(pair, SWAP, lane, steps=STEPS)
    for step, (expert, velocity) in enumerate(zip(STEPS, velocities, strict=True)):
        assert torch.equal(velocity, plain_velocity(models[expert], lane, FIRST_TIME - step))


@pytest.mark.parametrize(("stored", "compute"), [(FP32, BF16), (FP16, FP32), (BF16, FP16)], ids=str)
def test_outer_values_equal_diffusers(tiny_expert_folder, tiny_expert_file, stored, compute, lane):
    """Compare values and dtypes, also in parameters kept in fp32, and embedder rows."""
    model = whole_model(tiny_expert_folder(dtype=stored), compute)
    file = tiny_expert_file(dtype=stored)
    with open_experts(file, file, compute_dtype=compute) as pair:
        ours = pair.engine(LAYERWISE, "cpu").models["high"]
        resident = {name: p for name, p in ours.named_parameters() if p.numel() and not p.is_meta}
        # Weight and bias of two time layers, two text layers and the projection.
        embedders = 2 * 5
        assert len(resident) == len(list(model.parameters())) - 4 * 10 - embedders
        for name, tensor in resident.items():
            expected = model.get_parameter(name)
            assert tensor.dtype == expected.dtype, name
            assert torch.equal(tensor, expected), name
        for name, buffer in model.named_buffers():
            assert ours.get_buffer(name).dtype == buffer.dtype
            assert torch.equal(ours.get_buffer(name), buffer)
        time = torch.tensor([875.25])
        [found] = ours.condition_embedder.rows(time, [lane.text])
        assert all(parameter.is_meta for parameter in ours.condition_embedder.parameters())
    expected = model.condition_embedder(time, lane.text.to(compute), None)
    assert [tensor.dtype for tensor in found] == [compute] * 3
    assert all(map(torch.equal, found, expected[:3]))


def test_outer_fp8_weights_are_decoded(changed_expert, make_tiny_expert, lane):
    original = make_tiny_expert().condition_embedder.time_proj.weight
    name = "time_projection.1"
    codes = (original * 2).to(torch.float8_e4m3fn)
    change = {f"{name}.weight": codes, f"{name}.scale_weight": torch.tensor([0.5])}
    path = changed_expert(change, fp8="scaled_fp8")
    seen = []
    with open_experts(path, path) as pair:
        embedder = pair.engine(LAYERWISE, "cpu").models["high"].condition_embedder
        hook = lambda projection, *_: seen.append(projection.weight.clone())  # noqa: E731
        embedder.time_proj.register_forward_hook(hook)
        embedder.rows(torch.tensor([500.0]), [lane.text])
    assert len(seen) == 1
    assert torch.equal(seen[0], (codes.float() * 0.5).to(BF16))


def test_pipeline_folder_stands_for_both(tiny_expert_folder, tmp_path, lane):
    shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "transformer")
    shutil.copytree(tiny_expert_folder(**LOW), tmp_path / "transformer_2")
    experts = tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)
    with open_experts(tmp_path) as pair, open_experts(*experts) as other:
        assert torch.equal(run_steps(pair, lane), run_steps(other, lane))


@pytest.fixture
def decoded_pair(open_pair):
    """Experts in fp16, computed in fp32: blocks are decoded on arrival."""
    return open_pair(dtype=FP16, compute_dtype=FP32)


def test_engine_takes_on_another_policy(decoded_pair, lane):
    pair = decoded_pair
    engine = pair.engine(LAYERWISE, "cpu")
    expected = run_steps(pair, lane)
    assert pair.engine(LAYERWISE, torch.device("cpu")) is engine
    assert pair.engine(SWAP, "cpu") is engine
    assert torch.equal(run_steps(pair, lane, SWAP), expected)
    with pytest.raises(ValueError, match="blocks"):
        pair.engine(OffloadPolicy.block_swap(5, 1), "cpu")
    assert pair.engine(SWAP, "cpu") is engine


def test_closed_engine_does_nothing_and_the_pair_opens_again(decoded_pair, lane):
    pair = decoded_pair
    before = set(threading.enumerate())
    # Held, so closing has to end the threads, not the collector.
    engine = pair.engine(LAYERWISE, "cpu")
    first = run_steps(pair, lane)
    models = [weakref.ref(model) for model in engine.models.bare.values()]
    assert set(threading.enumerate()) > before
    visits = step_visits(["high"], engine.block_counts)
    gc.disable()
    try:
        pair.close()
        assert [model() for model in models] == [None] * len(models)
    finally:
        gc.enable()
    assert set(threading.enumerate()) == before
    for use, given in ((engine.run, visits), (engine.programs, visits), (engine.set_policy, None)):
        with pytest.raises(RuntimeError, match="detached"):
            use(given)
    pair.close()
    assert pair.engine(LAYERWISE, "cpu") is not engine
    assert torch.equal(run_steps(pair, lane), first)


def test_engine_made_in_inference_mode_serves_outside(pair):
    with torch.inference_mode():
        model = pair.engine(LAYERWISE, "cpu").models["high"]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_inference()] == []


def test_file_that_vanished_is_read_again_once_it_is_back(tiny_expert_folder, tmp_path, lane):
    folder = tmp_path / "expert"
    away = tmp_path / "away"
    shutil.copytree(tiny_expert_folder(**HIGH), folder)
    with open_experts(folder, folder) as pair:
        folder.rename(away)
        engine = pair.engine(LAYERWISE, "cpu")
        for _ in range(2):
            with pytest.raises(OSError, match="expert"):
                engine.models["high"]
        assert engine.models.non_block_bytes == 0
        away.rename(folder)
        run_steps(pair, lane)


def test_running_engine_is_not_taken_away(decoded_pair, lane):
    pair = decoded_pair
    engine = pair.engine(LAYERWISE, "cpu")
    visits = step_visits(["low"], engine.block_counts)
    with torch.inference_mode(), engine.run(visits) as engine_run:
        with pytest.raises(RuntimeError, match="running"):
            pair.engine(OffloadPolicy.layerwise(2), "cpu")
        assert pair.engine(LAYERWISE, "cpu") is engine
        run_step(engine, engine_run, 0, "low", lane)


def test_changed_file_never_runs_under_the_former_header(tiny_expert_file, tmp_path, lane):
    file = Path(shutil.copy(tiny_expert_file(**HIGH), tmp_path / "expert.safetensors"))
    pair = open_experts(file, file)
    assert pair.is_current()
    run_steps(pair, lane)
    pair.close()
    Path(shutil.copy(tiny_expert_file(**LOW), tmp_path / "other")).replace(file)
    assert not pair.is_current()
    with pytest.raises(OSError, match="was changed after it was opened"):
        run_steps(pair, lane)
    pair.close()
    file.unlink()
    assert not pair.is_current()


def fresh_run(pair, lane, high=(), low=()):
    """Return the velocities of a new pair of the same files with these LoRAs."""
    with open_experts(pair.high.path, pair.low.path, **IN_FP32) as fresh:
        fresh.set_loras(high, low)
        return run_steps(fresh, lane)


def time_lora():
    generator = torch.Generator().manual_seed(6)
    return {
        f"{TIME}.lora_down.weight": 0.1 * torch.randn(4, 256, generator=generator),
        f"{TIME}.lora_up.weight": 0.1 * torch.randn(6 * 256, 4, generator=generator),
    }


def every_kind():
    """A LoKr, a LoHa, a DoRA and a difference in a block each, and a LoKr outside the blocks."""
    generator = torch.Generator().manual_seed(8)

    def drawn(*shape):
        return 0.2 * torch.randn(shape, generator=generator)

    hada = {"w1_a": (256, 4), "w1_b": (4, 256), "w2_a": (256, 4), "w2_b": (4, 256)}
    kinds = (
        {"lokr_w1": drawn(8, 4), "lokr_w2_a": drawn(32, 4), "lokr_w2_b": drawn(4, 64)},
        {f"hada_{name}": drawn(*shape) for name, shape in hada.items()},
        {"lora_A": drawn(4, 256), "lora_B": drawn(256, 4), "dora_scale": 1 + drawn(256, 1)},
        {"diff": drawn(256, 256)},
    )
    layers = [f"diffusion_model.blocks.{block}.self_attn.q" for block in range(4)]
    outside = {"lokr_w1": drawn(12, 8), "lokr_w2": drawn(128, 32)}
    named = zip((*layers, TIME), (*kinds, outside), strict=True)
    return {f"{layer}.{key}": each for layer, kind in named for key, each in kind.items()}


def test_ram_in_addition_to_slots_is_predicted(pair, lora_file, lane):
    engine = pair.engine(LAYERWISE, "cpu")
    without = pair.host_resident_bytes
    assert wait_for_embedders(engine) == without, "what embeds time and text, of one expert"
    one = open_lora(lora_file(seed=3))
    pair.set_loras([(one, 1.0)], [(open_lora(lora_file(seed=4)), 0.5), (one, 0.0)])
    predicted = pair.host_resident_bytes - without
    run_steps(pair, lane)
    read = [tensor for tensors in pair._factors._tensors.values() for tensor in tensors.values()]
    taken = sum(tensor.nbytes for tensor in read) + pair.host_bytes
    # A block's factors are padded to a page. Biases are not stored with them.
    assert abs(taken - predicted) < 8 * 4096


@pytest.mark.slow  # whole models
@pytest.mark.parametrize("policy", [RESIDENT, PINNED], ids=str)
def test_any_change_equals_a_fresh_pair(pair, lora_file, lane, policy):
    one = open_lora(lora_file(seed=3))
    two = open_lora(lora_file(time_lora()))
    step_plan = [
        ([(one, 1.0)], []),
        ([(one, 0.3)], []),
        ([(one, 0.3), (two, 1.0)], [(two, 0.5)]),
        ([(two, 1.0)], [(one, -1.0)]),
        ([], []),
        ([], [(two, 2.0)]),
    ]
    engine = pair.engine(policy, "cpu")
    for high, low in step_plan:
        pair.set_loras(high, low)
        assert torch.equal(run_steps(pair, lane, policy), fresh_run(pair, lane, high, low))
    assert pair.engine(policy, "cpu") is engine


@pytest.mark.parametrize(
    ("dtype", "policies"),
    [(torch.float32, (RESIDENT, PINNED)), (torch.bfloat16, (LAYERWISE, SWAP))],
    ids=["fp32", "bf16"],
)
def test_lycoris_is_equal_under_all_policies(open_pair, lora_file, lane, dtype, policies):
    every = open_lora(lora_file(every_kind()))
    plain = open_lora(lora_file(seed=3))
    lane = replace(lane, latents=lane.latents.to(dtype), text=lane.text.to(dtype))
    pair = open_pair(compute_dtype=dtype)
    base = run_steps(pair, lane, policies[0])
    pair.set_loras([(every, 0.5), (plain, 1.0)], [(every, 1.0)])
    found, other = (run_steps(pair, lane, policy) for policy in policies)
    pair.set_loras([], [])
    assert torch.equal(run_steps(pair, lane, policies[1]), base), "nothing of them stays"
    assert torch.equal(found, other)
    assert (found - base).norm() > 1e-2 * base.norm()


def test_codes_take_plain_loras_only(tiny_expert_file, lora_file, lane):
    """Others are refused before a run."""
    path = tiny_expert_file(fp8="scaled_fp8", **HIGH)
    plain = open_lora(lora_file(seed=3))
    with open_experts(path, path, arithmetic="as stored", **IN_FP32) as pair:
        pair.set_loras([(plain, 1.0)], [])
        for layer, kind in enumerate(("a LoKr", "a LoHa", "a DoRA", "a difference")):
            of_block = {k: v for k, v in every_kind().items() if f".blocks.{layer}." in k}
            message = rf"is {kind}, and blocks.{layer}.attn1.to_q.weight is multiplied as it is "
            message += 'stored, .* plain LoRAs only: .* arithmetic "decoded"'
            with pytest.raises(CheckpointError, match=message):
                pair.set_loras([(plain, 1.0)], [(open_lora(lora_file(of_block)), 1.0)])
        assert run_steps(pair, lane).isfinite().all(), "the LoRAs before are set"
        pair.set_loras([(open_lora(lora_file(time_lora())), 1.0)], [])


def test_work_memory_of_loha_and_dora_is_planned(pair, lora_file):
    gpu = torch.device("cuda")
    before = pair.device_bytes(LAYERWISE, device=gpu)
    pair.set_loras([(open_lora(lora_file(seed=3)), 1.0)], [])
    assert pair.device_bytes(LAYERWISE, device=gpu) == before
    pair.set_loras([], [(open_lora(lora_file(every_kind())), 1.0)])
    work = patch_work_bytes(256 * 256, gpu)
    assert pair.device_bytes(LAYERWISE, device=gpu) == before + work > before


def test_strength_0_is_none_to_the_bit(pair, lora_file, lane):
    plain = run_steps(pair, lane)
    lora = open_lora(lora_file(seed=3))
    for high, low, same in ((0.0, 0.0, True), (1.0, 1.0, False), (0, -0.0, True)):
        pair.set_loras([(lora, high)], [(lora, low)])
        assert torch.equal(run_steps(pair, lane), plain) is same


@pytest.mark.slow  # whole models
@pytest.mark.parametrize("policy", [PINNED, OffloadPolicy.block_swap(2, 1, source="pinned")])
def test_pinned_weights_are_never_read_again(tiny_expert_folder, tmp_path, lora_file, lane, policy):
    original = tiny_expert_folder(**HIGH)
    folder = shutil.copytree(original, tmp_path / "expert")
    one = open_lora(lora_file(seed=3))
    two = open_lora(lora_file(seed=4))
    with open_experts(folder, folder, **IN_FP32) as pair, open_experts(original, original) as same:
        run_steps(pair, lane, policy)
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")  # any later read raises an error
        changes = [([(one, 1.0)], []), ([(one, 0.5)], [(two, 1.0)]), ([], [(one, 1.0)])]
        for high, low in (*changes, ([], [])):
            pair.set_loras(high, low)
            assert torch.equal(run_steps(pair, lane, policy), fresh_run(same, lane, high, low))
        pair.close()
        with pytest.raises(OSError, match="was changed after it was opened"):
            run_steps(pair, lane, policy)


@pytest.mark.slow  # whole models
def test_lora_on_the_time_embedder_reads_only_that_again(pair, lora_file, lane):
    """Only the changed expert's rows are computed again."""
    block = open_lora(lora_file(seed=3))
    time = open_lora(lora_file(time_lora()))
    weights = pair.high.weights.items()
    embedder = "condition_embedder.time_"
    embeds_time = sum(each.nbytes for name, each in weights if name.startswith(embedder))
    before = run_steps(pair, lane)
    engine = pair.engine(LAYERWISE, "cpu")
    # The timesteps are not prefetched: one read each.
    one_read = STEPS.count("high") * embeds_time
    both = [(time, 0.5), (block, 1.0)]
    for high, reads in (([(block, 1.0)], 0), ([(time, 1.0)], 1), (both, 1), ([], 1), ([], 0)):
        pair.set_loras(high, [])
        read = engine.models.non_block_bytes
        found = run_steps(pair, lane)
        assert engine.models.non_block_bytes - read == reads * one_read
        assert torch.equal(found, fresh_run(pair, lane, high))
    assert torch.equal(found, before)


def test_another_strength_reads_no_lora_again(pair, lora_file, lane):
    path = lora_file(seed=3)
    lora = open_lora(path)
    pair.set_loras([(lora, 1.0)], [])
    before = run_steps(pair, lane)
    path.unlink()
    for strength in (0.5, 0.0, 1.0):
        pair.set_loras([(lora, strength)], [])
        found = run_steps(pair, lane)
    assert torch.equal(found, before)
    pair.set_loras([], [])
    run_steps(pair, lane)  # releases the factors
    pair.set_loras([(lora, 1.0)], [])
    with pytest.raises(OSError, match="lora_0"):
        run_steps(pair, lane)


def fetched_blocks(pair, lane, steps):
    """Return the blocks that a run without weights in files fetches."""
    engine = pair.engine(RESIDENT, "cpu")
    visits = step_visits(steps, engine.block_counts)
    with torch.inference_mode(), engine.run(visits) as engine_run:
        for step, expert in enumerate(steps):
            run_step(engine, engine_run, step, expert, lane)
        return [(fetch.block.expert, fetch.block.block) for fetch in engine_run.fetched]


def test_loras_that_are_set_again_fetch_nothing_more(pair, lora_file, lane):
    path = lora_file(seed=3)
    fetched = []
    for strength in (1.0, 1.0, 0.5):
        pair.set_loras([(open_lora(path), strength)], [])
        fetched.append({expert for expert, _ in fetched_blocks(pair, lane, ["high", "low"])})
    assert fetched == [{"high", "low"}, set(), {"high"}]


def test_lora_of_one_block_touches_no_other(pair, lora_file, lightning, lane):
    one_block = {k: v for k, v in lightning(seed=3).items() if ".blocks.2." in k}
    below = [(open_lora(lora_file(seed=4)), 1.0)]
    pair.set_loras(below, [])
    run_steps(pair, lane, RESIDENT)
    pair.set_loras([*below, (open_lora(lora_file(one_block)), 1.0)], [])
    assert fetched_blocks(pair, lane, ["high"]) == [("high", 2)]


def test_loras_do_not_change_during_a_run(pair, lora_file, lane):
    one = open_lora(lora_file(seed=3))
    two = open_lora(lora_file(seed=4))
    pair.set_loras([(one, 1.0)], [])
    engine = pair.engine(LAYERWISE, "cpu")
    with engine.run(step_visits(["high"], engine.block_counts)):
        assert pair.engine(LAYERWISE, "cpu") is engine
        pair.set_loras([(one, 1.0), (two, 1.0)], [])
        with pytest.raises(RuntimeError, match="running"):
            pair.engine(LAYERWISE, "cpu")
        pair.set_loras([(one, 1.0)], [])
        assert pair.engine(LAYERWISE, "cpu") is engine
        pair.set_loras([(one, 1.0), (two, 1.0)], [])
    assert not torch.equal(run_steps(pair, lane), fresh_run(pair, lane))


def test_refused_loras_leave_the_former_ones(pair, lora_file, lightning, lane):
    lora = open_lora(lora_file(seed=3))
    pair.set_loras([(lora, 1.0)], [])
    before = run_steps(pair, lane)
    narrow = open_lora(lora_file(lightning(heads=1)))
    message = r"\[128, 128\]; .* of the expert is \[256, 256\]"
    for high, low in (([(narrow, 1.0)], []), ([], [(lora, 1.0), (narrow, 1.0)])):
        with pytest.raises(CheckpointError, match=message):
            pair.set_loras(high, low)
    late = StepStrengths(usual=1.0, ranges=(StepRange(0, 1, float("nan")),))
    for strength in (float("nan"), float("inf"), late):
        with pytest.raises(ValueError, match=r"strength of .* is (nan|inf): give a finite"):
            pair.set_loras([(lora, strength)], [])
    assert torch.equal(run_steps(pair, lane), before)


def test_not_finite_numbers_are_refused_when_they_are_read(pair, lora_file, lightning, lane):
    tensors = lightning(seed=3)
    key = "diffusion_model.blocks.2.cross_attn.v.lora_up.weight"
    tensors[key][3, 1] = float("inf")
    pair.set_loras([(open_lora(lora_file(tensors)), 1.0)], [])
    message = rf"{key} \[256, 4\] holds 1 of 1024 numbers that are not finite"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            run_steps(pair, lane)
    pair.set_loras([], [])
    assert torch.equal(run_steps(pair, lane), fresh_run(pair, lane))


def test_factor_of_a_resident_parameter_is_refused(pair, lora_file):
    tensors = time_lora()
    tensors[f"{TIME}.lora_up.weight"][0, 0] = float("nan")
    pair.set_loras([], [(open_lora(lora_file(tensors)), 1.0)])
    with pytest.raises(CheckpointError, match=rf"{TIME}.lora_up.weight .* not finite"):
        pair.engine(LAYERWISE, "cpu")


def test_changed_lora_is_not_read(pair, lora_file, lane):
    path = lora_file(seed=3)
    pair.set_loras([(open_lora(path), 1.0)], [])
    assert pair.loras_are_current()
    lora_file(seed=4).replace(path)
    assert not pair.loras_are_current()
    with pytest.raises(OSError, match="was changed after it was opened"):
        run_steps(pair, lane)
    pair.set_loras([(open_lora(path), 1.0)], [])
    assert pair.loras_are_current()
    run_steps(pair, lane)
    path.unlink()
    assert not pair.loras_are_current()


def test_closing_releases_factors_and_keeps_the_loras(pair, lora_file, lane):
    path = lora_file(seed=3)
    pair.set_loras([(open_lora(path), 1.0)], [])
    before = run_steps(pair, lane)
    pair.close()
    assert pair.loaded_bytes == 0
    assert torch.equal(run_steps(pair, lane), before)
    pair.close()
    path.unlink()
    with pytest.raises(OSError, match="lora_0"):
        run_steps(pair, lane)


def test_loaded_bytes_are_the_planned_ones(pair, lane):
    assert (pair.loaded_bytes, pair.pinned_bytes, pair.release_memory(10**9)) == (0, 0, 0)
    run_steps(pair, lane, SWAP)
    planned = pair.device_bytes(SWAP, device="cpu")
    assert pair.loaded_bytes == planned
    freed = pair.release_memory(1)
    assert freed > 0
    assert (pair.loaded_bytes, pair.pinned_bytes) == (planned - freed, 0)
    run_steps(pair, lane, SWAP)
    assert pair.loaded_bytes == planned


def matrices_of(pair, policy):
    """Return one matrix per block during a run, and the bytes read."""
    engine = pair.engine(policy, "cpu")
    assert all(engine.models[name] for name in ("high", "low"))  # loads the resident parameters
    before = io_bytes("rchar")
    seen = []
    visits = step_visits(["high", "low"], engine.block_counts)
    with engine.run(visits) as engine_run:
        for visit in visits:
            with engine_run.visit(*visit):
                block = engine.models[visit.expert].blocks[visit.block]
                seen.append(block.ffn.net[2].weight.clone())
    return seen, io_bytes("rchar") - before


def _segments() -> set[str]:
    """Return this process's mapped files in shared memory."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = [line for line in lines if f"{SHM}/{PREFIX}" in line and "deleted" not in line]
    return {line.split()[-1] for line in mapped}


@on_linux
@pytest.mark.parametrize(("policy", "storage"), [(SOME, "as stored"), (SHARED, "fp8")])
def test_second_pair_finds_what_the_first_one_has_read(tiny_expert_file, policy, storage):
    files = [tiny_expert_file(seed=seed) for seed in (1, 2)]
    opened = partial(open_experts, *files, **IN_FP32, storage=storage)
    with opened() as alone:
        expected, whole = matrices_of(alone, policy)
    with opened(shared=True) as first, opened(shared=True) as second:
        one, read = matrices_of(first, policy)
        two, read_again = matrices_of(second, policy)
        assert all(map(torch.equal, one, expected))
        assert all(map(torch.equal, two, expected))
        assert read >= whole / 2 > 10**6
        if storage == "as stored":  # each process computes row scales from the file
            assert read_again < whole / 100
    assert not _segments()


@on_linux
def test_pair_that_streams_from_files_takes_no_shared_memory(tiny_expert_file):
    file = tiny_expert_file(seed=1)
    with open_experts(file, file, **IN_FP32, shared=True) as pair:
        for policy, segments in ((OffloadPolicy.layerwise(1), 0), (SHARED, 1)):
            matrices_of(pair, policy)
            assert len(_segments()) == segments
        matrices_of(pair, OffloadPolicy.resident())
        assert not _segments()


@on_linux
def test_blocks_of_another_process_count_as_memory(tiny_expert_file, monkeypatch):
    file = tiny_expert_file(seed=1)
    monkeypatch.setattr(auto_policy, "available_bytes", lambda: 0)
    opened = partial(open_experts, file, file, **IN_FP32)
    with opened(shared=True) as first, opened(shared=True) as restarted, opened() as apart:
        assert first.shared_bytes == 0
        matrices_of(first, SHARED)
        blocks = restarted.shared_bytes
        assert blocks == sum(first.block_counts.values()) * first.block_bytes.stored
        assert auto_policy.free_memory(restarted, torch.device("cpu"), 0).ram_bytes == blocks
        assert auto_policy.free_memory(apart, torch.device("cpu"), 0).ram_bytes == 0
        assert first.engine(SHARED, "cpu").host_bytes == first.host_bytes > 0
    assert not _segments()


def test_kernels_change_between_runs_only(pair):
    """Kernels that cannot be used leave the former ones."""
    engine = pair.engine(LAYERWISE, "cpu")
    pair.kernels = Kernels(attention="cudnn")
    with pytest.raises(KernelsError, match="CUDA"):
        pair.engine(LAYERWISE, "cpu")
    assert engine.models.settings.backend is None
    pair.kernels = Kernels(attention="sdpa", math="exact", compiler="eager")
    with engine.run(step_visits(["high"], engine.block_counts)):
        said = "kernels cannot be changed while this engine is running"
        with pytest.raises(RuntimeError, match=said):
            pair.engine(LAYERWISE, "cpu")
    assert pair.engine(replace(LAYERWISE, chunk_tokens=8), "cpu") is engine
    settings = engine.models.settings
    assert settings.backend == settings.self_backend == ATTENTIONS["sdpa"].backend
    found = (settings.math, settings.compiler, settings.chunk_tokens)
    assert found == (EXACT, get_compiler("eager"), 8)


def test_experts_stay_open_when_only_their_kernels_change(tiny_expert_folder):
    high, low = (tiny_expert_folder(seed=seed) for seed in (1, 2))
    ref = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
    registry = ExpertsRegistry(open_pair)
    pair = registry.get(ref)
    engine = pair.engine(LAYERWISE, "cpu")
    assert registry.get(replace(ref, attention="sdpa", compile=True)) is pair
    assert pair.kernels == Kernels(attention="sdpa", compiler=INDUCTOR)
    packages = {"flash": "flash_attn", "sage": "sageattention", "xformers": "xformers"}
    missing = [name for name, package in packages.items() if find_spec(package) is None]
    for name in ("radial", *missing):
        with pytest.raises(KernelsError, match=f"attention (is )?'{name}'"):
            registry.get(replace(ref, attention=name))
    assert registry.get(ref) is pair
    assert pair.kernels == Kernels()
    assert pair.engine(LAYERWISE, "cpu") is engine
    registry.free()
