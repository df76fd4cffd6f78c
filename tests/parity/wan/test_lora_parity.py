"""LoRAs on streamed experts in every spelling, against diffusers' fused LoRA and manual sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import q4_k_m, save_expert_gguf
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.checkpoint.key_names import native_transformer_name
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

pytestmark = pytest.mark.slow  # merges LoRAs into whole models with diffusers

HIGH, LOW = {"seed": 1}, {"seed": 2}
STEPS = ["high", "high", "low"]
TOLERANCE = 1e-6
FP32 = {"compute_dtype": torch.float32}
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
}
TIME = "diffusion_model.time_projection.1"
# Spellings read by diffusers, and whether biases are read too.
DIFFUSERS_READS = {
    "lightning": True,
    "lora_A": True,
    "lora_A without alpha": True,
    "musubi": False,
    "diffusers": True,
}

# Every spelling, and every policy.
FUSED = [
    *((spelling, biases, "layerwise") for spelling, biases in DIFFUSERS_READS.items()),
    *(("lightning", True, policy) for policy in POLICIES if policy != "layerwise"),
]


@pytest.fixture
def pair(tiny_expert_folder):
    with open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW), **FP32) as pair:
        yield pair


def run(pair, lane, policy=POLICIES["layerwise"], steps=STEPS):
    """Return concatenated velocities for single steps in one run."""
    engine = pair.engine(policy, "cpu")
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as engine_run:
        for step, expert in enumerate(steps):
            timestep = torch.tensor([990.0 - step])
            visit = lambda block, at=(step, expert): engine_run.visit(*at, block)  # noqa: E731
            velocities += forward_lanes(engine.models[expert], [lane], timestep, visit)
    return torch.cat(velocities)


def run_plain(models, lane, steps=STEPS):
    """Return the same velocities from whole models."""
    with torch.no_grad():
        return torch.cat(
            [
                models[expert](
                    lane.latents, torch.tensor([990.0 - step]), lane.text, return_dict=False
                )[0]
                for step, expert in enumerate(steps)
            ]
        )


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def plain_models(tiny_expert_folder):
    def load():
        folders = {"high": tiny_expert_folder(**HIGH), "low": tiny_expert_folder(**LOW)}
        return {
            name: WanTransformer3DModel.from_pretrained(folder).eval()
            for name, folder in folders.items()
        }

    return load


@pytest.fixture
def fused(plain_models):
    """`fused([(path, strength), ...], low=[...])`: both experts with LoRAs fused by diffusers."""

    def load(high, low=()):
        models = plain_models()
        pipeline = WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=FlowMatchEulerDiscreteScheduler(),
            transformer=models["high"],
            transformer_2=models["low"],
        )
        for expert, stack in (("high", high), ("low", low)):
            names = [f"{expert}{number}" for number in range(len(stack))]
            for name, (path, _) in zip(names, stack, strict=True):
                pipeline.load_lora_weights(
                    path, adapter_name=name, load_into_transformer_2=expert == "low"
                )
            if names:
                models[expert].set_adapters(names, weights=[strength for _, strength in stack])
                models[expert].fuse_lora(adapter_names=names)
        return models

    return load


def by_hand(model, lora, strength):
    """Add a lightning LoRA, alpha / rank 1/2, to a whole model."""
    for name, parameter in model.named_parameters():
        layer = "diffusion_model." + native_transformer_name(name).removesuffix(
            ".weight"
        ).removesuffix(".bias")
        if name.endswith(".bias") and f"{layer}.diff_b" in lora:
            parameter.data += strength * lora[f"{layer}.diff_b"]
        elif name.endswith(".weight") and f"{layer}.lora_up.weight" in lora:
            parameter.data += (
                strength * 0.5 * lora[f"{layer}.lora_up.weight"] @ lora[f"{layer}.lora_down.weight"]
            )


def time_lora():
    generator = torch.Generator().manual_seed(6)
    return {
        f"{TIME}.lora_down.weight": 0.1 * torch.randn(4, 256, generator=generator),
        f"{TIME}.lora_up.weight": 0.1 * torch.randn(6 * 256, 4, generator=generator),
    }


class TestAgainstDiffusers:
    @pytest.mark.parametrize(("spelling", "biases", "policy"), FUSED, ids=str)
    def test_fused_lora(
        self, pair, fused, lora_file, lane, record_property, spelling, biases, policy
    ):
        high, low = (lora_file(seed=seed, style=spelling, biases=biases) for seed in (3, 4))
        expected = run_plain(fused([(high, 0.7)], [(low, -1.2)]), lane)
        plain = run(pair, lane, POLICIES[policy])
        pair.set_loras([(open_lora(high), 0.7)], [(open_lora(low), -1.2)])
        found = run(pair, lane, POLICIES[policy])
        record_property("rel_l2", distance(found, expected))
        assert distance(found, expected) <= TOLERANCE
        assert distance(plain, expected) > 1e-2

    @pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
    def test_a_stack_of_two(self, pair, fused, lora_file, lane):
        first, second = (lora_file(seed=seed) for seed in (3, 4))
        expected = run_plain(fused([(first, 0.7), (second, 0.4)], [(second, 1.0)]), lane)
        one, two = open_lora(first), open_lora(second)
        pair.set_loras([(one, 0.7), (two, 0.4)], [(two, 1.0)])
        assert distance(run(pair, lane), expected) <= TOLERANCE

    @pytest.mark.parametrize("settings", [{"lora_alpha": 2}, {"lora_alpha": 2, "use_rslora": True}])
    def test_the_settings_that_diffusers_writes_into_the_header(
        self, pair, fused, lora_file, lane, settings
    ):
        adapter = {
            "r": 4,
            **settings,
            "rank_pattern": {},
            "alpha_pattern": {"blocks.1.attn1.to_k": 1.0},
            "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
        }
        metadata = {
            "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in adapter.items()})
        }
        path = lora_file(
            seed=3, style="diffusers", biases=False, metadata=metadata | {"format": "pt"}
        )
        expected = run_plain(fused([(path, 1.0)]), lane)
        pair.set_loras([(open_lora(path), 1.0)], [])
        assert distance(run(pair, lane), expected) <= TOLERANCE
        without = lora_file(seed=3, style="diffusers", biases=False)
        pair.set_loras([(open_lora(without), 1.0)], [])
        assert distance(run(pair, lane), expected) > 1e-3


@pytest.fixture(scope="module")
def of_the_baseline():
    """The velocities with the first spelling, computed by the first test."""
    return []


class TestSpellings:
    def test_all_give_the_same_bits(self, pair, lora_file, lane, style, caplog, of_the_baseline):
        other = open_lora(lora_file(seed=3, style=style))
        assert other.unmatched == ()
        assert not caplog.records
        if not of_the_baseline:
            baseline = open_lora(lora_file(seed=3))
            pair.set_loras([(baseline, 0.7)], [(baseline, 1.0)])
            of_the_baseline.append(run(pair, lane, steps=["high", "low"]))
        pair.set_loras([(other, 0.7)], [(other, 1.0)])
        assert torch.equal(run(pair, lane, steps=["high", "low"]), of_the_baseline[0])

    def test_the_baseline_is_what_is_added_by_hand(
        self, pair, plain_models, lora_file, lightning, lane
    ):
        models = plain_models()
        by_hand(models["high"], lightning(seed=3), 0.7)
        by_hand(models["low"], lightning(seed=4), 1.3)
        pair.set_loras([(open_lora(lora_file(seed=3)), 0.7)], [(open_lora(lora_file(seed=4)), 1.3)])
        assert distance(run(pair, lane), run_plain(models, lane)) <= TOLERANCE


class TestEveryParameter:
    def test_differences_of_all_of_them(self, pair, plain_models, lora_file, lane):
        models, tensors = plain_models(), {}
        generator = torch.Generator().manual_seed(5)
        for name, parameter in models["high"].named_parameters():
            change = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.5 * change
            tensors[f"diffusion_model.{native_transformer_name(name)}.diff"] = change
        pair.set_loras([(open_lora(lora_file(tensors)), 0.5)], [])
        assert distance(run(pair, lane), run_plain(models, lane)) <= TOLERANCE

    def test_low_rank_of_all_weights(self, pair, plain_models, lora_file, lane):
        models, tensors = plain_models(), {}
        generator = torch.Generator().manual_seed(5)
        for rank, (name, parameter) in enumerate(models["high"].named_parameters(), start=1):
            if parameter.ndim < 2 or not name.endswith(".weight"):
                continue
            layer = "diffusion_model." + native_transformer_name(name).removesuffix(".weight")
            rank = rank % 5 + 1  # layers of different ranks
            # A convolution's factors have the dimensions of the kernel.
            up = 0.05 * torch.randn(
                parameter.shape[0], rank, *[1] * (parameter.ndim - 2), generator=generator
            )
            down = 0.05 * torch.randn(rank, *parameter.shape[1:], generator=generator)
            tensors |= {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down}
            parameter.data += (up.flatten(1) @ down.flatten(1)).reshape(parameter.shape)
        pair.set_loras([(open_lora(lora_file(tensors)), 1.0)], [])
        assert distance(run(pair, lane), run_plain(models, lane)) <= TOLERANCE

    def test_a_difference_and_a_low_rank_product_of_one_weight_are_both_added(
        self, pair, plain_models, lora_file, lightning, lane
    ):
        lora, models = lightning(seed=3), plain_models()
        by_hand(models["high"], lora, 1.0)
        change = 0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(5))
        models["high"].blocks[1].attn1.to_q.weight.data += change
        lora["diffusion_model.blocks.1.self_attn.q.diff"] = change
        pair.set_loras([(open_lora(lora_file(lora)), 1.0)], [])
        assert distance(run(pair, lane), run_plain(models, lane)) <= TOLERANCE


class TestOtherFamily:
    def test_a_text_to_video_lora_on_image_to_video_experts(
        self, tiny_expert_file, lora_file, lightning
    ):
        """Everything is added except for the patch embedding."""
        shared = lightning(seed=3) | {
            "diffusion_model.blocks.1.diff_m": 0.1 * torch.ones(1, 6, 256)
        }
        other = {"diffusion_model.patch_embedding.diff": torch.ones(256, 16, 1, 2, 2)}
        one, two = open_lora(lora_file(shared)), open_lora(lora_file(shared | other))
        generator = torch.Generator().manual_seed(0)
        lane = Lane(
            latents=torch.randn(1, 36, 2, 4, 6, generator=generator),
            text=torch.randn(1, 5, 4096, generator=generator),
        )
        path = tiny_expert_file(in_channels=36)
        with open_experts(path, path, **FP32) as pair:
            plain = run(pair, lane)
            pair.set_loras([(one, 1.0)], [(one, 1.0)])
            expected = run(pair, lane)
            pair.set_loras([(two, 1.0)], [(two, 1.0)])
            assert torch.equal(run(pair, lane), expected)
            assert not torch.equal(expected, plain)


class TestPackedBase:
    def test_gguf(self, make_tiny_expert, lora_file, lightning, lane, tmp_path):
        """Packed values are decoded first, and the whole LoRA is added to the decoded values."""
        path = tmp_path / "expert.gguf"
        model = save_expert_gguf(make_tiny_expert(**HIGH), path, types=q4_k_m)
        by_hand(model, lightning(seed=3), 0.05)
        lora = open_lora(lora_file(seed=3))
        with open_experts(path, path, **FP32) as pair:
            pair.set_loras([(lora, 0.05)], [(lora, 0.05)])
            assert (
                distance(run(pair, lane), run_plain({"high": model, "low": model}, lane))
                <= TOLERANCE
            )

    def test_fp8_scaled(self, tiny_expert_file, make_tiny_expert, lora_file, lightning, lane):
        """The result equals the decoded model plus LoRA. No LoRA value goes through fp8."""
        path = tiny_expert_file(fp8="scaled_fp8", dtype=torch.float16, **HIGH)
        model = make_tiny_expert(dequantised_from=torch.float16, **HIGH)
        by_hand(model, lightning(seed=3), 0.05)
        lora = open_lora(lora_file(seed=3))
        with open_experts(path, path, **FP32) as pair:
            pair.set_loras([(lora, 0.05)], [(lora, 0.05)])
            assert (
                distance(run(pair, lane), run_plain({"high": model, "low": model}, lane))
                <= TOLERANCE
            )


class TestBf16:
    def test_what_stays_rounds_once(self, tiny_expert_file, make_tiny_expert, lora_file, lane):
        """Patched bf16 weights are as close to the exact ones as bf16 allows."""
        path = tiny_expert_file(dtype=torch.bfloat16, **HIGH)
        lora = open_lora(lora_file({k: v.bfloat16() for k, v in time_lora().items()}))
        with open_experts(path, path) as pair:
            pair.set_loras([(lora, 1.0)], [])
            model = pair.engine(POLICIES["layerwise"], "cpu").models["high"]
            seen = []
            model.condition_embedder.time_proj.register_forward_hook(
                lambda proj, *_: seen.append(proj.weight.clone())
            )
            model.condition_embedder.rows(torch.tensor([500.0]), [lane.text])
            (found,) = seen
            exact = make_tiny_expert(**HIGH).condition_embedder.time_proj.weight.bfloat16().float()
            tensors = time_lora()
            exact += tensors[f"{TIME}.lora_up.weight"].bfloat16().float() @ (
                tensors[f"{TIME}.lora_down.weight"].bfloat16().float()
            )
            assert ((found.float() - exact).abs() <= exact.abs() * 2**-8).all()


def test_the_sample_loras_keep_the_result_in_order(sample_models):
    """The LoRAs change the result noticeably, but not beyond recognition."""
    names = [
        f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{expert}_noise.safetensors"
        for expert in ("high", "low")
    ]
    loras = [open_lora(sample_models / "loras" / name) for name in names]
    generator = torch.Generator().manual_seed(0)
    lane = Lane(
        latents=torch.randn(1, 16, 1, 4, 4, generator=generator), text=torch.randn(1, 5, 4096)
    )
    with open_experts(Path(sample_models, "diffusers/Wan2.2-T2V-A14B-Diffusers")) as pair:
        plain = run(pair, lane)
        pair.set_loras([(loras[0], 1.0)], [(loras[1], 1.0)])
        assert 0.02 < distance(run(pair, lane), plain) < 1
