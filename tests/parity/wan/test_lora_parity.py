"""LoRAs on streamed experts, against diffusers' fused LoRA and manual sums."""

from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from wanstream.tests.support.rounding import distance
from wanstream.tests.support.wan.opened_experts import (
    FIRST_TIME,
    LAYERWISE,
    PINNED,
    RESIDENT,
    STEPS,
    SWAP,
    plain_velocity,
    run_steps,
)
from wanstream.wan import Lane, open_experts, open_lora
from wanstream.wan.checkpoint.key_names import native_transformer_name

pytestmark = [pytest.mark.slow, pytest.mark.parity]  # merges LoRAs into whole models with diffusers

TOLERANCE = 1e-6
# Spellings read by diffusers, and whether biases are read too.
DIFFUSERS_READS = {"lightning": True, "lora_A": True, "lora_A without alpha": True}
DIFFUSERS_READS |= {"musubi": False, "diffusers": True}
# Every spelling, and every policy.
FUSED = [
    *((spelling, biases, LAYERWISE) for spelling, biases in DIFFUSERS_READS.items()),
    *(("lightning", True, policy) for policy in (RESIDENT, PINNED, SWAP)),
]


def run_plain(models, lane):
    """Return the same velocities from whole models."""
    pairs = zip([FIRST_TIME - step for step in range(len(STEPS))], STEPS, strict=True)
    return torch.cat([plain_velocity(models[expert], lane, time) for time, expert in pairs])


def set_loras(pair, high, low=()):
    """Set LoRAs as paths and strengths."""
    opened = ([(open_lora(path), strength) for path, strength in loras] for loras in (high, low))
    pair.set_loras(*opened)


@pytest.fixture
def fused(plain_models):
    """`fused([(path, strength), ...], low=[...])`: both experts with LoRAs fused by diffusers."""

    def load(high, low=()):
        models = plain_models()
        parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
        parts |= {"transformer": models["high"], "transformer_2": models["low"]}
        pipeline = WanPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
        for expert, stack in (("high", high), ("low", low)):
            names = [f"{expert}{number}" for number in range(len(stack))]
            how = {"load_into_transformer_2": expert == "low"}
            for name, (path, _) in zip(names, stack, strict=True):
                pipeline.load_lora_weights(path, adapter_name=name, **how)
            if names:
                models[expert].set_adapters(names, weights=[strength for _, strength in stack])
                models[expert].fuse_lora(adapter_names=names)
        return models

    return load


@pytest.mark.parametrize(("spelling", "biases", "policy"), FUSED, ids=str)
def test_fused_lora(pair, fused, lora_file, lane, record_property, spelling, biases, policy):
    high, low = (lora_file(seed=seed, style=spelling, biases=biases) for seed in (3, 4))
    expected = run_plain(fused([(high, 0.7)], [(low, -1.2)]), lane)
    plain = run_steps(pair, lane, policy)
    set_loras(pair, [(high, 0.7)], [(low, -1.2)])
    found = run_steps(pair, lane, policy)
    record_property("rel_l2", distance(found, expected))
    assert distance(found, expected) <= TOLERANCE
    assert distance(plain, expected) > 1e-2


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_stack_of_two(pair, fused, lora_file, lane):
    first, second = (lora_file(seed=seed) for seed in (3, 4))
    loras = [(first, 0.7), (second, 0.4)], [(second, 1.0)]
    expected = run_plain(fused(*loras), lane)
    set_loras(pair, *loras)
    assert distance(run_steps(pair, lane), expected) <= TOLERANCE


def test_differences_and_products_of_all_parameters(pair, plain_models, lora_file, lane):
    """Added by hand. Layers have different ranks, and every matrix has a change of both kinds."""
    models = plain_models()
    loras = []
    generator = torch.Generator().manual_seed(5)
    for expert, strength in (("high", 0.7), ("low", 1.3)):
        tensors = {}
        for number, (name, parameter) in enumerate(models[expert].named_parameters(), start=1):
            native = f"diffusion_model.{native_transformer_name(name)}"
            change = 0.02 * torch.randn(parameter.shape, generator=generator)
            layer, _, kind = native.rpartition(".")
            tensors[f"{layer}.diff_b" if kind == "bias" else f"{native}.diff"] = change.clone()
            if parameter.ndim >= 2 and name.endswith(".weight"):
                # A convolution's factors have the dimensions of the kernel.
                rank = number % 5 + 1
                kernel = [1] * (parameter.ndim - 2)
                up = 0.05 * torch.randn(parameter.shape[0], rank, *kernel, generator=generator)
                down = 0.05 * torch.randn(rank, *parameter.shape[1:], generator=generator)
                tensors |= {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down}
                tensors[f"{layer}.alpha"] = torch.tensor(rank / 2)
                change += (up.flatten(1) @ down.flatten(1)).reshape(parameter.shape) / 2
            parameter.data += strength * change
        loras.append([(lora_file(tensors), strength)])
    set_loras(pair, *loras)
    assert distance(run_steps(pair, lane), run_plain(models, lane)) <= TOLERANCE


def test_the_sample_loras_keep_the_result_in_order(sample_models):
    """The LoRAs change the result noticeably, but not beyond recognition."""
    name = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
    high, low = (sample_models / "loras" / name.format(expert) for expert in ("high", "low"))
    latents = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    lane = Lane(latents=latents, text=torch.randn(1, 5, 4096))
    with open_experts(Path(sample_models, "diffusers/Wan2.2-T2V-A14B-Diffusers")) as pair:
        plain = run_steps(pair, lane)
        set_loras(pair, [(high, 1.0)], [(low, 1.0)])
        assert 0.02 < distance(run_steps(pair, lane), plain) < 1
