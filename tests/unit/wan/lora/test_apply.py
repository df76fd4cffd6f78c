"""Patched weights: LoRA, LoKr, LoHa and DoRA against fp64 formulas and PEFT."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from wanstream.offload.transfers.weight_patch import WeightPatch, add_patch, write_sum
from wanstream.wan.lora.apply import LoraFactors, combine_patches
from wanstream.wan.lora.file import open_lora

from .test_file import WEIGHT as Q_WEIGHT
from .test_file import Q, layer

ROWS = 256
COLUMNS = 512
RANK = 4
ALPHA = 2.0
FP32 = torch.float32
AT_ONCE = "wanstream.offload.transfers.weight_patch._values_at_once"
WEIGHT = "blocks.1.ffn.net.2.weight"
LAYERS = (
    *("lora_unet_blocks_1_ffn_2.", "lycoris_blocks_1_ffn_net_2."),
    *("diffusion_model.blocks.1.ffn.2.", "base_model.model.blocks.1.ffn.net.2."),
)
"""The layer in the spellings of musubi-tuner, SimpleTuner, ai-toolkit and PEFT."""
Tensors = dict[str, torch.Tensor]


def drawn(**shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


LOKR_W1 = {"lokr_w1": (4, 16)}
LOKR_W1_FACTORS = {"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 16)}
LOKR_W2 = {"lokr_w2": (64, 32)}
LOKR_W2_FACTORS = {"lokr_w2_a": (64, RANK), "lokr_w2_b": (RANK, 32)}
LOKR_TUCKER = {"lokr_w2_a": (3, 64), "lokr_w2_b": (RANK, 32), "lokr_t2": (3, RANK)}
HADA = ("w1_a", "w2_a", "w1_b", "w2_b")
LOHA = {f"hada_{n}": (ROWS, RANK) if n[-1] == "a" else (RANK, COLUMNS) for n in HADA}
LOHA_TUCKER = {f"hada_{n}": (RANK, ROWS if n[-1] == "a" else COLUMNS) for n in HADA}
LOHA_TUCKER |= {"hada_t1": (RANK, RANK), "hada_t2": (RANK, RANK)}
LORA = {"lora_up.weight": (ROWS, RANK), "lora_down.weight": (RANK, COLUMNS)}
# Layer tensors, and the product's factor by alpha.
KINDS = {
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
    one = tensors[f"{name}_a"].double()
    other = tensors[f"{name}_b"].double()
    return one.T @ tensors[core].double() @ other if core in tensors else one @ other


def change(tensors: Tensors) -> torch.Tensor:
    """Return the weight change, without alpha, in fp64."""
    if "lora_up.weight" in tensors:
        return tensors["lora_up.weight"].double() @ tensors["lora_down.weight"].double()
    if any(name.startswith("lokr") for name in tensors):
        w1, w2 = (matrix(tensors, f"lokr_w{n}", f"lokr_t{n}") for n in (1, 2))
        return torch.kron(w1, w2)
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


@pytest.fixture
def opened(lora_file):
    """`opened(tensors, spelling=0)`: a LoRA with these tensors and an alpha in one layer."""

    def write(tensors, spelling=0):
        stored = {**tensors, "alpha": torch.tensor(ALPHA)}
        return open_lora(lora_file({LAYERS[spelling] + name: stored[name] for name in stored}))

    return write


@pytest.mark.parametrize(
    ("kind", "magnitude"),
    [
        *((kind, "none") for kind in KINDS),
        ("LoKr", "rows"),
        ("LoHa", "columns"),
        ("LoRA", "rows of PEFT"),
        ("LoKr, core", "columns"),
    ],
)
def test_weights_are_those_of_the_formula(opened, base, monkeypatch, kind, magnitude):
    monkeypatch.setattr(AT_ONCE, lambda device: 100 * COLUMNS)  # unequal pieces
    shapes, scale = KINDS[kind]
    tensors = drawn(**shapes)
    if MAGNITUDES[magnitude] is not None:
        tensors["dora_scale"] = 20 + drawn(magnitude=MAGNITUDES[magnitude])["magnitude"]
    lora = opened(tensors, list(KINDS).index(kind) % len(LAYERS))
    assert (lora.unmatched, lora.warnings) == ((), ())
    patch = combine_patches(WEIGHT, [(lora, 0.7)], LoraFactors())
    expected = patched(base, tensors, scale, 0.7)
    apart = torch.empty_like(base)
    added = base.clone()
    write_sum(base, patch, apart)
    add_patch(added, patch)
    torch.testing.assert_close(apart.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(added.double(), expected, rtol=1e-5, atol=1e-5)


def test_all_kinds_add_up_in_any_order(opened, base):
    loras = []
    expected = base.double()
    for kind, (shapes, scale) in KINDS.items():
        tensors = drawn(**shapes)
        tensors |= {"dora_scale": torch.full((ROWS, 1), 20.0)} if kind in {"LoRA", "LoHa"} else {}
        loras.append((opened(tensors), 0.5))
        expected = expected + patched(base, tensors, scale, 0.5) - base.double()
    for stack in (loras, loras[::-1]):
        found = base.clone()
        add_patch(found, combine_patches(WEIGHT, stack, LoraFactors()))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


SETTINGS = {"lora_alpha": 3, "target_modules": ["to_q"]}
PATTERNS = {"rank_pattern": {"attn1.to_q": RANK}, "alpha_pattern": {"attn1.to_q": 5}}
PEFT_CONFIGS = {
    "LoRA": peft.LoraConfig(r=RANK, use_rslora=True, **SETTINGS),
    "DoRA": peft.LoraConfig(r=RANK, use_dora=True, **SETTINGS),
    "rank and alpha patterns": peft.LoraConfig(r=8, **PATTERNS, **SETTINGS),
    "LoHa": peft.LoHaConfig(r=RANK, alpha=3, target_modules=["to_q"]),
    "LoKr": peft.LoKrConfig(r=RANK, alpha=3, target_modules=["to_q"]),
    "LoKr, whole matrices": peft.LoKrConfig(r=64, alpha=3, target_modules=["to_q"]),
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_folder_of_peft_gives_the_weights_of_peft(tmp_path, kind):
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


def test_products_lie_side_by_side_and_differences_are_summed(lora_file):
    full = {f"{Q}.diff": torch.ones(256, 256)}
    one = open_lora(lora_file(layer(rank=2) | {f"{Q}.alpha": torch.tensor(1.0)} | full))
    two = open_lora(lora_file(layer(rank=3) | full))
    patch = combine_patches(Q_WEIGHT, [(one, 4.0), (two, -1.0)], LoraFactors())
    assert torch.equal(patch.up, torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0]).expand(256, 5))
    assert torch.equal(patch.down, torch.ones(5, 256))
    assert torch.equal(patch.full, torch.full((256, 256), 3.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_scaled_factors_are_fp32(lora_file, dtype):
    lora = open_lora(lora_file({key: tensor.to(dtype) for key, tensor in layer().items()}))
    patch = combine_patches(Q_WEIGHT, [(lora, 0.5)], LoraFactors())
    assert (patch.up.dtype, patch.down.dtype, patch.full) == (torch.float32, dtype, None)
    assert torch.equal(patch.up, torch.full((256, 4), 0.5))


def test_lora_of_another_parameter_is_not_read(lora_file):
    factors = LoraFactors()
    path = lora_file(layer(name="blocks.0.self_attn.k"))
    other = open_lora(path)
    path.unlink()
    lora = open_lora(lora_file(layer()))
    assert combine_patches(Q_WEIGHT, [(other, 1.0), (lora, 1.0)], factors).up.shape == (256, 4)
    assert list(factors._tensors) == [lora.identity]
    factors.keep_only([other])
    assert not factors._tensors


@pytest.mark.parametrize(("shape", "dtype"), [((6,), FP32), ((6, 2, 1, 2, 1), torch.bfloat16)])
def test_difference_is_added_in_the_shape_of_the_parameter(shape, dtype):
    """The sum is rounded once."""
    base = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    change = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = torch.empty_like(base)
    write_sum(base, WeightPatch(full=change), found)
    assert torch.equal(found, (base.float() + change).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [40, 300, 701])
def test_product_is_added_in_pieces_of_any_size(monkeypatch, columns, dtype):
    """In bf16, the sum is as close to the exact one as bf16 allows: it is rounded once."""
    monkeypatch.setattr(AT_ONCE, lambda device: 700)
    generator = torch.Generator().manual_seed(2)
    shapes = ((4, columns), (4, 3), (3, columns))
    base, up, down = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    found = torch.empty_like(base)
    write_sum(base, WeightPatch(up=up, down=down), found)
    exact = base.float() + up.float() @ down.float()
    limit = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), exact, rtol=limit, atol=1e-5)
