"""LoKr, LoHa and DoRA: patched weights against fp64 formulas and PEFT, and bits when streamed."""

from __future__ import annotations

from collections.abc import Mapping

import peft
import pytest
import torch
from torch import nn

from wanstream.offload.transfers.weight_patch import add_patch, write_sum
from wanstream.wan.lora.apply import LoraFactors, combine_patches
from wanstream.wan.lora.file import open_lora

ROWS, COLUMNS, RANK, ALPHA = 256, 512, 4, 2.0
WEIGHT = "blocks.1.ffn.net.2.weight"
LAYERS = {
    "musubi": "lora_unet_blocks_1_ffn_2.",
    "SimpleTuner": "lycoris_blocks_1_ffn_net_2.",
    "ai-toolkit": "diffusion_model.blocks.1.ffn.2.",
    "PEFT": "base_model.model.blocks.1.ffn.net.2.",
}

Tensors = dict[str, torch.Tensor]


def drawn(**shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


LOKR_W1 = {"lokr_w1": (4, 16)}
LOKR_W1_FACTORS = {"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 16)}
LOKR_W2 = {"lokr_w2": (64, 32)}
LOKR_W2_FACTORS = {"lokr_w2_a": (64, RANK), "lokr_w2_b": (RANK, 32)}
LOKR_TUCKER = {"lokr_w2_a": (3, 64), "lokr_w2_b": (RANK, 32), "lokr_t2": (3, RANK)}
LOHA = {
    f"hada_{w}_{f}": (ROWS, RANK) if f == "a" else (RANK, COLUMNS)
    for w in ("w1", "w2")
    for f in "ab"
}
LOHA_TUCKER = {
    **{f"hada_{w}_{f}": (RANK, ROWS if f == "a" else COLUMNS) for w in ("w1", "w2") for f in "ab"},
    "hada_t1": (RANK, RANK),
    "hada_t2": (RANK, RANK),
}
LORA = {"lora_up.weight": (ROWS, RANK), "lora_down.weight": (RANK, COLUMNS)}

# Layer tensors, and the product's factor by alpha.
KINDS: Mapping[str, tuple[Mapping[str, tuple[int, ...]], float]] = {
    "LoKr": ({**LOKR_W1, **LOKR_W2}, 1.0),
    "LoKr, large w1": ({"lokr_w1": (64, 32), "lokr_w2": (4, 16)}, 1.0),
    "LoKr, factors of w1": ({**LOKR_W1_FACTORS, **LOKR_W2}, ALPHA / 2),
    "LoKr, factors of w2": ({**LOKR_W1, **LOKR_W2_FACTORS}, ALPHA / RANK),
    "LoKr, factors of both": ({**LOKR_W1_FACTORS, **LOKR_W2_FACTORS}, ALPHA / RANK),
    "LoKr, core": ({**LOKR_W1, **LOKR_TUCKER}, ALPHA / RANK),
    "LoHa": (LOHA, ALPHA / RANK),
    "LoHa, cores": (LOHA_TUCKER, ALPHA / RANK),
    "LoRA": (LORA, ALPHA / RANK),
}
MAGNITUDES = {"none": None, "rows": (ROWS, 1), "rows of PEFT": (ROWS,), "columns": (1, COLUMNS)}


def matrix(tensors: Tensors, name: str, core: str) -> torch.Tensor:
    """Return a LoKr or LoHa matrix in fp64."""
    if name in tensors:
        return tensors[name].double()
    one, other = tensors[f"{name}_a"].double(), tensors[f"{name}_b"].double()
    return one.T @ tensors[core].double() @ other if core in tensors else one @ other


def change(tensors: Tensors) -> torch.Tensor:
    """Return the weight change, without alpha, in fp64."""
    if "lora_up.weight" in tensors:
        return tensors["lora_up.weight"].double() @ tensors["lora_down.weight"].double()
    if any(name.startswith("lokr") for name in tensors):
        return torch.kron(
            matrix(tensors, "lokr_w1", "lokr_t1"), matrix(tensors, "lokr_w2", "lokr_t2")
        )
    return matrix(tensors, "hada_w1", "hada_t1") * matrix(tensors, "hada_w2", "hada_t2")


def patched(base: torch.Tensor, tensors: Tensors, scale: float, strength: float) -> torch.Tensor:
    """Return base + strength * (change, or a DoRA's difference), in fp64."""
    base = base.double()
    summed = base + scale * change(tensors)
    magnitude = tensors.get("dora_scale")
    if magnitude is not None:
        by_column = magnitude.dim() > 1 and len(magnitude) == 1
        norm = summed.norm(dim=0 if by_column else 1, keepdim=True)
        summed = summed * (magnitude.double().reshape(norm.shape) / norm)
    return base + strength * (summed - base)


@pytest.fixture(scope="module")
def base():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_formula(lora_file, base, monkeypatch, kind, magnitude):
    monkeypatch.setattr(
        "wanstream.offload.transfers.weight_patch.CHUNK_VALUES", 100 * COLUMNS
    )  # unequal pieces
    shapes, scale = KINDS[kind]
    tensors = drawn(**shapes)
    if MAGNITUDES[magnitude] is not None:
        tensors["dora_scale"] = 20 + drawn(magnitude=MAGNITUDES[magnitude])["magnitude"]
    spelling = list(LAYERS)[list(KINDS).index(kind) % len(LAYERS)]
    stored = {**tensors, "alpha": torch.tensor(ALPHA)}
    lora = open_lora(
        lora_file({LAYERS[spelling] + name: tensor for name, tensor in stored.items()})
    )
    assert (lora.unmatched, lora.warnings) == ((), ())
    patch = combine_patches(WEIGHT, [(lora, 0.7)], LoraFactors())
    expected = patched(base, tensors, scale, 0.7)
    apart = torch.empty_like(base)
    write_sum(base, patch, apart)
    added = base.clone()
    add_patch(added, patch)
    torch.testing.assert_close(apart.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(added.double(), expected, rtol=1e-5, atol=1e-5)


def test_loras_of_all_kinds_add_up_in_any_order(lora_file, base):
    loras, expected = [], base.double()
    for kind, (shapes, scale) in KINDS.items():
        tensors = drawn(**shapes)
        tensors |= {"dora_scale": torch.full((ROWS, 1), 20.0)} if kind in {"LoRA", "LoHa"} else {}
        stored = {**tensors, "alpha": torch.tensor(ALPHA)}
        loras.append(
            (
                open_lora(
                    lora_file({LAYERS["musubi"] + name: each for name, each in stored.items()})
                ),
                0.5,
            )
        )
        expected = expected + patched(base, tensors, scale, 0.5) - base.double()
    for stack in (loras, loras[::-1]):
        found = base.clone()
        add_patch(found, combine_patches(WEIGHT, stack, LoraFactors()))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


PEFT_CONFIGS = {
    "LoRA": peft.LoraConfig(r=RANK, lora_alpha=3, use_rslora=True, target_modules=["to_q"]),
    "DoRA": peft.LoraConfig(r=RANK, lora_alpha=3, use_dora=True, target_modules=["to_q"]),
    "rank and alpha patterns": peft.LoraConfig(
        r=8,
        lora_alpha=3,
        rank_pattern={"attn1.to_q": RANK},
        alpha_pattern={"attn1.to_q": 5},
        target_modules=["to_q"],
    ),
    "LoHa": peft.LoHaConfig(r=RANK, alpha=3, target_modules=["to_q"]),
    "LoKr": peft.LoKrConfig(r=RANK, alpha=3, target_modules=["to_q"]),
    "LoKr, whole matrices": peft.LoKrConfig(r=64, alpha=3, target_modules=["to_q"]),
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_a_folder_of_peft_gives_the_weights_of_peft(tmp_path, kind):
    """The settings are in adapter_config.json alone."""
    torch.manual_seed(0)
    attention = nn.ModuleDict({"to_q": nn.Linear(256, 256)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"attn1": attention})])})
    base = model["blocks"][0]["attn1"]["to_q"].weight.detach().clone()
    wrapped = peft.PeftModel(model, PEFT_CONFIGS[kind])
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(tmp_path)
    lora = open_lora(tmp_path / "adapter_model.safetensors")
    assert (lora.unmatched, lora.notes) == ((), ())
    found = base.clone()
    add_patch(found, combine_patches("blocks.0.attn1.to_q.weight", [(lora, 1.0)], LoraFactors()))
    expected = wrapped.merge_and_unload()["blocks"][0]["attn1"]["to_q"].weight
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    assert (found - base).norm() > 0.005 * base.norm()
    assert lora.is_current()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not lora.is_current()
