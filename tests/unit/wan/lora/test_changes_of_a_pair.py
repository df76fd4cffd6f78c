"""LoRAs changed between one pair's runs: reads, fetches and refusals."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from wanstream.offload import patch_work_bytes
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.fixtures import wait_for_embedders
from wanstream.tests.support.wan.opened_experts import (
    LAYERWISE,
    PINNED,
    RESIDENT,
    STEPS,
    SWAP,
    run_step,
    run_steps,
)
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

HIGH = {"seed": 1}
LOW = {"seed": 2}
FP32 = {"compute_dtype": torch.float32}
TIME = "diffusion_model.time_projection.1"


@pytest.fixture
def pair(tiny_expert_folder):
    with open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW), **FP32) as pair:
        yield pair


@pytest.fixture(scope="module")
def of_fresh_pairs():
    """Velocities per change on a separate pair, computed once: bit-equal under every policy."""
    return {}


def fresh_run(pair, lane, high=(), low=()):
    """Return the velocities of a new pair of the same files with these LoRAs."""
    with open_experts(pair.high.path, pair.low.path, **FP32) as fresh:
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
    two = open_lora(lora_file(seed=4))
    pair.set_loras([(one, 1.0)], [(two, 0.5), (one, 0.0)])
    predicted = pair.host_resident_bytes - without
    run_steps(pair, lane)
    read = [tensor for tensors in pair._factors._tensors.values() for tensor in tensors.values()]
    taken = sum(tensor.nbytes for tensor in read) + pair.host_bytes
    # A block's factors are padded to a page. Biases are not stored with them.
    assert abs(taken - predicted) < 8 * 4096


class TestChanges:
    """Changes between an engine's runs."""

    @pytest.mark.slow  # whole models
    @pytest.mark.parametrize("policy", [RESIDENT, PINNED], ids=str)
    def test_any_change_equals_a_fresh_pair(self, pair, lora_file, lane, policy, of_fresh_pairs):
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
        for at, (high, low) in enumerate(step_plan):
            pair.set_loras(high, low)
            found = run_steps(pair, lane, policy)
            if at not in of_fresh_pairs:
                of_fresh_pairs[at] = fresh_run(pair, lane, high, low)
            assert torch.equal(found, of_fresh_pairs[at])
        assert pair.engine(policy, "cpu") is engine

    @pytest.mark.parametrize(
        ("dtype", "policies"),
        [
            (torch.float32, (RESIDENT, PINNED)),
            (torch.bfloat16, (LAYERWISE, SWAP)),
        ],
        ids=["fp32", "bf16"],
    )
    def test_lycoris_kinds_have_equal_bits_under_all_policies(
        self, tiny_expert_folder, lora_file, lane, dtype, policies
    ):
        every = open_lora(lora_file(every_kind()))
        plain = open_lora(lora_file(seed=3))
        experts = tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)
        lane = replace(lane, latents=lane.latents.to(dtype), text=lane.text.to(dtype))
        with open_experts(*experts, compute_dtype=dtype) as pair:
            base = run_steps(pair, lane, policies[0])
            pair.set_loras([(every, 0.5), (plain, 1.0)], [(every, 1.0)])
            found, other = (run_steps(pair, lane, policy) for policy in policies)
            pair.set_loras([], [])
            assert torch.equal(run_steps(pair, lane, policies[1]), base), "nothing of them stays"
        assert torch.equal(found, other)
        assert (found - base).norm() > 1e-2 * base.norm()

    def test_codes_take_plain_loras_only(self, tiny_expert_file, lora_file, lane):
        """Others are refused before a run."""
        path = tiny_expert_file(fp8="scaled_fp8", **HIGH)
        plain = open_lora(lora_file(seed=3))
        with open_experts(path, path, arithmetic="as stored", **FP32) as pair:
            pair.set_loras([(plain, 1.0)], [])
            for layer, kind in enumerate(("a LoKr", "a LoHa", "a DoRA", "a difference")):
                of_block = {k: v for k, v in every_kind().items() if f".blocks.{layer}." in k}
                message = rf"is {kind}, and blocks.{layer}.attn1.to_q.weight is multi"
                with pytest.raises(CheckpointError, match=message):
                    pair.set_loras([(plain, 1.0)], [(open_lora(lora_file(of_block)), 1.0)])
            assert run_steps(pair, lane).isfinite().all(), "the LoRAs before are set"
            pair.set_loras([(open_lora(lora_file(time_lora())), 1.0)], [])

    def test_work_memory_of_loha_and_dora_is_planned(self, pair, lora_file):
        gpu = torch.device("cuda")
        before = pair.device_bytes(LAYERWISE, device=gpu)
        pair.set_loras([(open_lora(lora_file(seed=3)), 1.0)], [])
        assert pair.device_bytes(LAYERWISE, device=gpu) == before
        pair.set_loras([], [(open_lora(lora_file(every_kind())), 1.0)])
        work = patch_work_bytes(256 * 256, gpu)
        assert pair.device_bytes(LAYERWISE, device=gpu) == before + work > before

    def test_strength_0_is_none_to_the_bit(self, pair, lora_file, lane):
        plain = run_steps(pair, lane)
        lora = open_lora(lora_file(seed=3))
        for high, low, same in ((0.0, 0.0, True), (1.0, 1.0, False), (0, -0.0, True)):
            pair.set_loras([(lora, high)], [(lora, low)])
            assert torch.equal(run_steps(pair, lane), plain) is same

    @pytest.mark.slow  # whole models
    @pytest.mark.parametrize("policy", [PINNED, OffloadPolicy.block_swap(2, 1, source="pinned")])
    def test_pinned_weights_are_never_read_again(
        self, tiny_expert_folder, tmp_path, lora_file, lane, policy
    ):
        original = tiny_expert_folder(**HIGH)
        folder = shutil.copytree(original, tmp_path / "expert")
        one = open_lora(lora_file(seed=3))
        two = open_lora(lora_file(seed=4))
        with open_experts(folder, folder, **FP32) as pair, open_experts(original, original) as same:
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
    def test_lora_on_the_time_embedder_reads_only_that_again(self, pair, lora_file, lane):
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

    def test_another_strength_reads_no_lora_again(self, pair, lora_file, lane):
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

    def fetched(self, pair, lane, steps):
        """Return the blocks that a run without weights in files fetches."""
        engine = pair.engine(RESIDENT, "cpu")
        visits = step_visits(steps, engine.block_counts)
        with torch.inference_mode(), engine.run(visits) as engine_run:
            for step, expert in enumerate(steps):
                run_step(engine, engine_run, step, expert, lane)
            return [(fetch.block.expert, fetch.block.block) for fetch in engine_run.fetched]

    def test_loras_that_are_set_again_fetch_nothing_more(self, pair, lora_file, lane):
        path = lora_file(seed=3)
        fetched = []
        for strength in (1.0, 1.0, 0.5):
            pair.set_loras([(open_lora(path), strength)], [])
            fetched.append({expert for expert, _ in self.fetched(pair, lane, ["high", "low"])})
        assert fetched == [{"high", "low"}, set(), {"high"}]

    def test_lora_of_one_block_touches_no_other(self, pair, lora_file, lightning, lane):
        one_block = {k: v for k, v in lightning(seed=3).items() if ".blocks.2." in k}
        below = [(open_lora(lora_file(seed=4)), 1.0)]
        pair.set_loras(below, [])
        run_steps(pair, lane, RESIDENT)
        pair.set_loras([*below, (open_lora(lora_file(one_block)), 1.0)], [])
        assert self.fetched(pair, lane, ["high"]) == [("high", 2)]

    def test_not_during_a_run(self, pair, lora_file, lane):
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


class TestPair:
    def test_refused_loras_leave_the_former_ones(self, pair, lora_file, lightning, lane):
        lora = open_lora(lora_file(seed=3))
        pair.set_loras([(lora, 1.0)], [])
        before = run_steps(pair, lane)
        narrow = open_lora(lora_file(lightning(heads=1)))
        message = r"\[128, 128\]; .* of the expert is \[256, 256\]"
        for high, low in (([(narrow, 1.0)], []), ([], [(lora, 1.0), (narrow, 1.0)])):
            with pytest.raises(CheckpointError, match=message):
                pair.set_loras(high, low)
        for strength in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"strength of .* is (nan|inf): give a finite"):
                pair.set_loras([(lora, strength)], [])
        assert torch.equal(run_steps(pair, lane), before)

    def test_not_finite_numbers_are_refused_when_they_are_read(
        self, pair, lora_file, lightning, lane
    ):
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

    def test_factor_of_a_resident_parameter_is_refused(self, pair, lora_file):
        tensors = time_lora()
        tensors[f"{TIME}.lora_up.weight"][0, 0] = float("nan")
        pair.set_loras([], [(open_lora(lora_file(tensors)), 1.0)])
        with pytest.raises(CheckpointError, match=rf"{TIME}.lora_up.weight .* not finite"):
            pair.engine(LAYERWISE, "cpu")

    def test_changed_file_is_not_read(self, pair, lora_file, lane):
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

    def test_closing_releases_factors_and_keeps_the_loras(self, pair, lora_file, lane):
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

    def test_loaded_bytes(self, pair, lane):
        assert (pair.loaded_bytes, pair.pinned_bytes, pair.release_memory(10**9)) == (0, 0, 0)
        policy = SWAP
        run_steps(pair, lane, policy)
        planned = pair.device_bytes(policy, device="cpu")
        assert pair.loaded_bytes == planned
        freed = pair.release_memory(1)
        assert freed > 0
        assert (pair.loaded_bytes, pair.pinned_bytes) == (planned - freed, 0)
        run_steps(pair, lane, policy)
        assert pair.loaded_bytes == planned
