"""LoRAs changed between one pair's runs: reads, fetches and refusals."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from wanstream.offload import patch_work_bytes
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan_fixtures import wait_for_embedders
from wanstream.wan import forward_lanes
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

HIGH, LOW = {"seed": 1}, {"seed": 2}
STEPS = ["high", "high", "low"]
FP32 = {"compute_dtype": torch.float32}
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
}
TIME = "diffusion_model.time_projection.1"


@pytest.fixture
def pair(tiny_expert_folder):
    with open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW), **FP32) as pair:
        yield pair


@pytest.fixture(scope="module")
def of_fresh_pairs():
    """Velocities per change on a separate pair, computed once: bit-equal under every policy."""
    return {}


def run(pair, lane, policy=POLICIES["layerwise"], steps=STEPS):
    """Return concatenated velocities for one run with single steps."""
    engine = pair.engine(policy, "cpu")
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as engine_run:
        for step, expert in enumerate(steps):
            timestep = torch.tensor([990.0 - step])
            visit = lambda block, at=(step, expert): engine_run.visit(*at, block)  # noqa: E731
            velocities += forward_lanes(engine.models[expert], [lane], timestep, visit)
    return torch.cat(velocities)


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

    kinds = (
        {"lokr_w1": drawn(8, 4), "lokr_w2_a": drawn(32, 4), "lokr_w2_b": drawn(4, 64)},
        {
            f"hada_{w}_{f}": drawn(*((256, 4) if f == "a" else (4, 256)))
            for w in ("w1", "w2")
            for f in "ab"
        },
        {"lora_A": drawn(4, 256), "lora_B": drawn(256, 4), "dora_scale": 1 + drawn(256, 1)},
        {"diff": drawn(256, 256)},
    )
    outside = {"lokr_w1": drawn(12, 8), "lokr_w2": drawn(128, 32)}
    layers = [f"diffusion_model.blocks.{block}.self_attn.q" for block in range(4)]
    tensors = {
        f"{layer}.{key}": each
        for layer, kind in zip(layers, kinds, strict=True)
        for key, each in kind.items()
    }
    return tensors | {f"{TIME}.{key}": tensor for key, tensor in outside.items()}


def plain(pair, lane):
    with open_experts(pair.high.path, pair.low.path, **FP32) as plain:
        return run(plain, lane)


def test_the_ram_in_addition_to_slots_is_predicted(pair, lora_file, lane):
    engine, without = pair.engine(POLICIES["layerwise"], "cpu"), pair.host_resident_bytes
    assert wait_for_embedders(engine) == without, "what embeds time and text, of one expert"
    one, two = open_lora(lora_file(seed=3)), open_lora(lora_file(seed=4))
    pair.set_loras([(one, 1.0)], [(two, 0.5), (one, 0.0)])
    predicted = pair.host_resident_bytes - without
    run(pair, lane)
    factors = sum(
        tensor.nbytes for tensors in pair._factors._tensors.values() for tensor in tensors.values()
    )
    taken = factors + pair.host_bytes
    # A block's factors are padded to a page. Biases are not stored with them.
    assert abs(taken - predicted) < 8 * 4096


class TestChanges:
    """Changes between an engine's runs."""

    @pytest.mark.slow  # whole models
    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    def test_any_change_gives_what_a_fresh_pair_gives(
        self, pair, lora_file, lane, policy, of_fresh_pairs
    ):
        one, two = open_lora(lora_file(seed=3)), open_lora(lora_file({**time_lora()}))
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
            found = run(pair, lane, policy)
            if at not in of_fresh_pairs:
                with open_experts(pair.high.path, pair.low.path, **FP32) as fresh:
                    fresh.set_loras(high, low)
                    of_fresh_pairs[at] = run(fresh, lane)
            assert torch.equal(found, of_fresh_pairs[at])
        assert pair.engine(policy, "cpu") is engine

    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_lokr_loha_and_dora_give_the_same_bits_under_every_policy(
        self, tiny_expert_folder, lora_file, lane, dtype, policy, of_fresh_pairs
    ):
        every, plain = open_lora(lora_file(every_kind())), open_lora(lora_file(seed=3))
        experts = tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)
        lane = replace(lane, latents=lane.latents.to(dtype), text=lane.text.to(dtype))
        with open_experts(*experts, compute_dtype=dtype) as pair:
            base = run(pair, lane, policy)
            pair.set_loras([(every, 0.5), (plain, 1.0)], [(every, 1.0)])
            found = run(pair, lane, policy)
            pair.set_loras([], [])
            assert torch.equal(run(pair, lane, policy), base), "nothing of them stays"
        expected = of_fresh_pairs.setdefault((dtype, "every kind"), found)
        assert torch.equal(found, expected)
        assert (found - base).norm() > 1e-2 * base.norm()

    def test_codes_take_plain_loras_only_and_others_are_refused_before_a_run(
        self, tiny_expert_file, lora_file, lane
    ):
        path, plain = tiny_expert_file(fp8="scaled_fp8", **HIGH), open_lora(lora_file(seed=3))
        with open_experts(path, path, arithmetic="as stored", **FP32) as pair:
            pair.set_loras([(plain, 1.0)], [])
            for kind, layer in (("a LoKr", 0), ("a LoHa", 1), ("a DoRA", 2), ("a difference", 3)):
                of_block = {
                    key: each for key, each in every_kind().items() if f".blocks.{layer}." in key
                }
                with pytest.raises(
                    CheckpointError,
                    match=rf"is {kind}, and blocks.{layer}.attn1.to_q.weight is multi",
                ):
                    pair.set_loras([(plain, 1.0)], [(open_lora(lora_file(of_block)), 1.0)])
            assert run(pair, lane).isfinite().all(), "the LoRAs before are set"
            pair.set_loras([(open_lora(lora_file(time_lora())), 1.0)], [])

    def test_the_work_memory_of_loha_and_dora_is_planned(self, pair, lora_file):
        policy, gpu = POLICIES["layerwise"], torch.device("cuda")
        before = pair.device_bytes(policy, device=gpu)
        pair.set_loras([(open_lora(lora_file(seed=3)), 1.0)], [])
        assert pair.device_bytes(policy, device=gpu) == before
        pair.set_loras([], [(open_lora(lora_file(every_kind())), 1.0)])
        assert (
            pair.device_bytes(policy, device=gpu)
            == before + patch_work_bytes(256 * 256, gpu)
            > before
        )

    def test_strength_0_is_none_to_the_bit(self, pair, lora_file, lane):
        plain = run(pair, lane)
        lora = open_lora(lora_file(seed=3))
        pair.set_loras([(lora, 0.0)], [(lora, 0.0)])
        assert torch.equal(run(pair, lane), plain)
        pair.set_loras([(lora, 1.0)], [(lora, 1.0)])
        assert not torch.equal(run(pair, lane), plain)
        pair.set_loras([(lora, 0)], [(lora, -0.0)])
        assert torch.equal(run(pair, lane), plain)

    @pytest.mark.slow  # whole models
    @pytest.mark.parametrize(
        "policy", [POLICIES["layerwise pinned"], OffloadPolicy.block_swap(2, 1, source="pinned")]
    )
    def test_with_pinned_weights_no_change_reads_a_byte_of_the_base(
        self, tiny_expert_folder, tmp_path, lora_file, lane, policy
    ):
        folder = shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "expert")
        one, two = open_lora(lora_file(seed=3)), open_lora(lora_file(seed=4))
        with open_experts(folder, folder, **FP32) as pair:
            run(pair, lane, policy)
            for file in folder.glob("*.safetensors"):
                file.write_bytes(b"")  # any later read raises an error
            for high, low in (
                ([(one, 1.0)], []),
                ([(one, 0.5)], [(two, 1.0)]),
                ([], [(one, 1.0)]),
                ([], []),
            ):
                pair.set_loras(high, low)
                found = run(pair, lane, policy)
                with open_experts(
                    tiny_expert_folder(**HIGH), tiny_expert_folder(**HIGH), **FP32
                ) as fresh:
                    fresh.set_loras(high, low)
                    assert torch.equal(found, run(fresh, lane, policy))
            pair.close()
            with pytest.raises(OSError, match="was changed after it was opened"):
                run(pair, lane, policy)

    @pytest.mark.slow  # whole models
    def test_a_lora_on_the_time_embedder_reads_only_that_again(self, pair, lora_file, lane):
        """Only the changed expert's rows are computed again."""
        block, time = open_lora(lora_file(seed=3)), open_lora(lora_file(time_lora()))
        embeds_time = sum(
            tensor.nbytes
            for name, tensor in pair.high.weights.items()
            if name.startswith("condition_embedder.time_")
        )
        before = run(pair, lane)
        engine = pair.engine(POLICIES["layerwise"], "cpu")
        calls = STEPS.count("high")
        for high, reads in (
            ([(block, 1.0)], 0),
            ([(time, 1.0)], 1),
            ([(time, 0.5), (block, 1.0)], 1),
            ([], 1),
            ([], 0),
        ):
            pair.set_loras(high, [])
            read = engine.models.non_block_bytes
            found = run(pair, lane)
            assert engine.models.non_block_bytes - read == reads * calls * embeds_time, (
                "the timesteps are not prefetched: one read each"
            )
            with open_experts(pair.high.path, pair.low.path, **FP32) as fresh:
                fresh.set_loras(high, [])
                assert torch.equal(found, run(fresh, lane))
        assert torch.equal(found, before)

    def test_another_strength_reads_no_lora_again(self, pair, lora_file, lane):
        path = lora_file(seed=3)
        lora = open_lora(path)
        pair.set_loras([(lora, 1.0)], [])
        before = run(pair, lane)
        path.unlink()
        for strength in (0.5, 0.0, 1.0):
            pair.set_loras([(lora, strength)], [])
            found = run(pair, lane)
        assert torch.equal(found, before)
        pair.set_loras([], [])
        run(pair, lane)  # releases the factors
        pair.set_loras([(lora, 1.0)], [])
        with pytest.raises(OSError, match="lora_0"):
            run(pair, lane)

    def test_loras_that_are_set_again_fetch_nothing_more(self, pair, lora_file, lane):
        path, policy = lora_file(seed=3), POLICIES["resident"]
        fetched = []
        for strength in (1.0, 1.0, 0.5):
            pair.set_loras([(open_lora(path), strength)], [])
            engine = pair.engine(policy, "cpu")
            with (
                torch.inference_mode(),
                engine.run(step_visits(["high", "low"], engine.block_counts)) as engine_run,
            ):
                for step, expert in enumerate(["high", "low"]):
                    visit = partial(engine_run.visit, step, expert)
                    forward_lanes(engine.models[expert], [lane], torch.tensor([990.0]), visit)
                fetched.append({fetch.block.expert for fetch in engine_run.fetched})
        assert fetched == [{"high", "low"}, set(), {"high"}]

    @pytest.mark.parametrize("others", [False, True], ids=["alone", "on top of another"])
    def test_a_lora_of_one_block_touches_no_other(self, pair, lora_file, lightning, lane, others):
        one_block = {
            key: tensor for key, tensor in lightning(seed=3).items() if ".blocks.2." in key
        }
        below = [(open_lora(lora_file(seed=4)), 1.0)] if others else []
        pair.set_loras(below, [])
        run(pair, lane, POLICIES["resident"])
        pair.set_loras([*below, (open_lora(lora_file(one_block)), 1.0)], [])
        engine = pair.engine(POLICIES["resident"], "cpu")
        with (
            torch.inference_mode(),
            engine.run(step_visits(["high"], engine.block_counts)) as engine_run,
        ):
            visit = lambda block: engine_run.visit(0, "high", block)  # noqa: E731
            forward_lanes(engine.models["high"], [lane], torch.tensor([990.0]), visit)
            assert [fetch.block.block for fetch in engine_run.fetched] == [2]

    def test_not_during_a_run(self, pair, lora_file, lane):
        one, two = open_lora(lora_file(seed=3)), open_lora(lora_file(seed=4))
        pair.set_loras([(one, 1.0)], [])
        engine = pair.engine(POLICIES["layerwise"], "cpu")
        with engine.run(step_visits(["high"], engine.block_counts)):
            assert pair.engine(POLICIES["layerwise"], "cpu") is engine
            pair.set_loras([(one, 1.0), (two, 1.0)], [])
            with pytest.raises(RuntimeError, match="running"):
                pair.engine(POLICIES["layerwise"], "cpu")
            pair.set_loras([(one, 1.0)], [])
            assert pair.engine(POLICIES["layerwise"], "cpu") is engine
            pair.set_loras([(one, 1.0), (two, 1.0)], [])
        assert not torch.equal(run(pair, lane), plain(pair, lane))


class TestPair:
    def test_a_lora_of_another_model_is_refused_and_the_former_ones_stay(
        self, pair, lora_file, lightning, lane
    ):
        lora = open_lora(lora_file(seed=3))
        pair.set_loras([(lora, 1.0)], [])
        before = run(pair, lane)
        narrow = open_lora(lora_file(lightning(heads=1)))
        for high, low in (([(narrow, 1.0)], []), ([], [(lora, 1.0), (narrow, 1.0)])):
            with pytest.raises(
                CheckpointError, match=r"\[128, 128\]; .* of the expert is \[256, 256\]"
            ):
                pair.set_loras(high, low)
        assert torch.equal(run(pair, lane), before)

    @pytest.mark.parametrize("strength", [float("nan"), float("inf")])
    def test_a_strength_is_finite(self, pair, lora_file, strength):
        with pytest.raises(ValueError, match=r"strength of .* is (nan|inf): give a finite number"):
            pair.set_loras([(open_lora(lora_file(seed=3)), strength)], [])

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite_are_refused_when_they_are_read(
        self, pair, lora_file, lightning, lane, number
    ):
        tensors = lightning(seed=3)
        key = "diffusion_model.blocks.2.cross_attn.v.lora_up.weight"
        tensors[key][3, 1] = number
        pair.set_loras([(open_lora(lora_file(tensors)), 1.0)], [])
        for _ in range(2):
            with pytest.raises(
                CheckpointError,
                match=rf"{key} \[256, 4\] holds 1 of 1024 numbers that are not finite",
            ):
                run(pair, lane)
        pair.set_loras([], [])
        assert torch.equal(run(pair, lane), plain(pair, lane))

    def test_a_factor_of_a_resident_parameter_is_refused_before_the_run(self, pair, lora_file):
        tensors = time_lora()
        tensors[f"{TIME}.lora_up.weight"][0, 0] = float("nan")
        pair.set_loras([], [(open_lora(lora_file(tensors)), 1.0)])
        with pytest.raises(CheckpointError, match=rf"{TIME}.lora_up.weight .* not finite"):
            pair.engine(POLICIES["layerwise"], "cpu")

    def test_a_file_that_changed_after_it_was_opened_is_not_read(self, pair, lora_file, lane):
        path = lora_file(seed=3)
        pair.set_loras([(open_lora(path), 1.0)], [])
        assert pair.loras_are_current()
        lora_file(seed=4).replace(path)
        assert not pair.loras_are_current()
        with pytest.raises(OSError, match="was changed after it was opened"):
            run(pair, lane)
        pair.set_loras([(open_lora(path), 1.0)], [])
        assert pair.loras_are_current()
        run(pair, lane)
        path.unlink()
        assert not pair.loras_are_current()

    def test_closing_releases_factors_and_keeps_the_loras(self, pair, lora_file, lane):
        path = lora_file(seed=3)
        pair.set_loras([(open_lora(path), 1.0)], [])
        before = run(pair, lane)
        pair.close()
        assert pair.loaded_bytes == 0
        assert torch.equal(run(pair, lane), before)
        pair.close()
        path.unlink()
        with pytest.raises(OSError, match="lora_0"):
            run(pair, lane)

    def test_loaded_bytes_are_those_of_buffers_and_resident_parameters(self, pair, lane):
        assert (pair.loaded_bytes, pair.pinned_bytes, pair.release_memory(10**9)) == (0, 0, 0)
        policy = POLICIES["block swap"]
        run(pair, lane, policy)
        planned = pair.device_bytes(policy, device="cpu")
        assert pair.loaded_bytes == planned
        freed = pair.release_memory(1)
        assert freed > 0
        assert pair.loaded_bytes == planned - freed
        assert pair.pinned_bytes == 0
        run(pair, lane, policy)
        assert pair.loaded_bytes == planned
