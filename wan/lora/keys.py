"""What the key of a LoRA file means: which parameter of the model it changes, and what part of the change it holds.

Pure text. A key is `<prefix><module><ending>`; every spelling of the three that trainers and other programs use is in a
table here, and a key that is in none of them means nothing.

| prefixes                                                                        | names of modules      |
|---------------------------------------------------------------------------------|-----------------------|
| none, `diffusion_model.`, `transformer.`, `base_model.model.` ..., also several  | native or diffusers'  |
| `lora_unet_`, `lora_transformer_`, `lycoris_`: dots are underscores              | native or diffusers'  |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..checkpoint.key_names import BLOCK, OUTER

Role = Literal["down", "up", "alpha", "diff", "up bias"]
"""`up @ down * alpha / rank` is added to a weight; `diff` is added as it is; `up bias` is added times alpha / rank."""

Leaf = Literal["weight", "bias", "modulation"]

DOTTED_PREFIXES = (
    "diffusion_model.",
    "model.diffusion_model.",
    "transformer.",
    "transformer_2.",
    "base_model.model.",
    "pipe.dit.",
)
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")

# Ending -> (what it holds, of which parameter of the module). The first that fits counts.
ENDINGS: Mapping[str, tuple[Role, Leaf]] = {
    ".lora_down.weight": ("down", "weight"),
    ".lora_up.weight": ("up", "weight"),
    ".lora_A.default.weight": ("down", "weight"),
    ".lora_B.default.weight": ("up", "weight"),
    ".lora_A.weight": ("down", "weight"),
    ".lora_B.weight": ("up", "weight"),
    ".lora_A": ("down", "weight"),
    ".lora_B": ("up", "weight"),
    ".lora.down.weight": ("down", "weight"),
    ".lora.up.weight": ("up", "weight"),
    "_lora.down.weight": ("down", "weight"),
    "_lora.up.weight": ("up", "weight"),
    ".lora_linear_layer.down.weight": ("down", "weight"),
    ".lora_linear_layer.up.weight": ("up", "weight"),
    ".alpha": ("alpha", "weight"),
    ".diff": ("diff", "weight"),
    ".diff_b": ("diff", "bias"),
    ".diff_m": ("diff", "modulation"),
    ".w_norm": ("diff", "weight"),
    ".b_norm": ("diff", "bias"),
    ".lora_B.default.bias": ("up bias", "bias"),
    ".lora_B.bias": ("up bias", "bias"),
}

# Endings of changes that are more than `weight + up @ down` or `weight + diff`.
OTHER_ALGORITHMS = {
    ".dora_scale": "a DoRA, which also rescales the weights",
    ".lora_magnitude_vector": "a DoRA, which also rescales the weights",
    ".lora_magnitude_vector.weight": "a DoRA, which also rescales the weights",
    ".lora_magnitude_vector.default.weight": "a DoRA, which also rescales the weights",
    ".lora_mid.weight": "a LoCon with a third factor",
    ".hada_w1_a": "a LoHa",
    ".hada_w1_b": "a LoHa",
    ".hada_w2_a": "a LoHa",
    ".hada_w2_b": "a LoHa",
    ".lokr_w1": "a LoKr",
    ".lokr_w2": "a LoKr",
    ".lokr_w1_a": "a LoKr",
    ".lokr_w2_a": "a LoKr",
    ".oft_blocks": "an OFT",
    ".oft_diag": "an OFT",
    ".oft_R.weight": "an OFT",
    ".a1.weight": "a GLoRA",
    ".b1.weight": "a GLoRA",
    ".reshape_weight": "a LoRA that gives a weight another shape",
    ".set_weight": "a file that replaces weights",
    ".lora_down.scale_weight": "a LoRA in fp8 with scales",
    ".lora_down.weight_scale": "a LoRA in fp8 with scales",
    ".lora_A.scale_weight": "a LoRA in fp8 with scales",
    ".lora_A.weight_scale": "a LoRA in fp8 with scales",
}

# Parts of keys by which LoRAs of other models are known; the first that is found counts.
OTHER_MODELS = {
    "double_blocks": "Flux or HunyuanVideo",
    "single_blocks": "Flux or HunyuanVideo",
    "single_transformer_blocks": "Flux",
    "input_blocks": "Stable Diffusion or SDXL",
    "down_blocks": "Stable Diffusion or SDXL",
    "joint_blocks": "Stable Diffusion 3",
    "context_refiner": "Lumina or Z-Image",
    "transformer_blocks": "Qwen-Image, LTX-Video or Stable Diffusion 3",
    "lora_te": "a text encoder",
    "text_model": "a text encoder",
    "vace_blocks": "Wan VACE",
}

_BARE = "scale_shift_table"
_WITHOUT_BIAS = ("norm_q", "norm_k", "norm_added_k")


@dataclass(frozen=True, kw_only=True)
class KeyMeaning:
    """`parameter` is a name of diffusers' WanTransformer3DModel, whatever its number of blocks."""

    parameter: str
    role: Role


def key_meaning(key: str) -> KeyMeaning | None:
    """What `key` holds; None if it belongs to no parameter of an expert."""
    for ending, (role, leaf) in ENDINGS.items():
        if key.endswith(ending):
            parameter = _parameter(key.removesuffix(ending), leaf)
            if parameter is not None:
                return KeyMeaning(parameter=parameter, role=role)
    return None


def other_algorithm(key: str) -> str | None:
    """What a file that holds `key` is, if it is more than a LoRA."""
    return next((what for ending, what in OTHER_ALGORITHMS.items() if key.endswith(ending)), None)


def other_model(key: str) -> str | None:
    """The model that a LoRA with `key` was probably made for, if it is a known one other than Wan."""
    prefix = next((prefix for prefix in FLAT_PREFIXES if key.startswith(prefix)), "")
    return next((model for part, model in OTHER_MODELS.items() if part in key.removeprefix(prefix)), None)


def module_name(text: str) -> str | None:
    """The module, or bare parameter, that `text` means, by the name of diffusers: "blocks.3.attn1.to_q"."""
    for prefix in FLAT_PREFIXES:
        if text.startswith(prefix):
            # Wan Fun's trainer writes one underscore more.
            return _look_up(text.removeprefix(prefix).removeprefix("_"), "_", _FLAT)
    return _look_up(_without_prefixes(text), ".", _DOTTED)


def _without_prefixes(text: str) -> str:
    """Trainers that wrap a wrapped model write one prefix behind the other; no module of the model has such a name."""
    while prefix := next((prefix for prefix in DOTTED_PREFIXES if text.startswith(prefix)), ""):
        text = text.removeprefix(prefix)
    return text


def _look_up(text: str, dot: str, tables: tuple[Mapping[str, str], Mapping[str, str]]) -> str | None:
    outer, block = tables
    in_block = re.fullmatch(rf"blocks{re.escape(dot)}([0-9]{{1,4}}){re.escape(dot)}(.+)", text)
    if in_block is None:
        return outer.get(text)
    local = block.get(in_block[2])
    return None if local is None else f"blocks.{int(in_block[1])}.{local}"


def _parameter(text: str, leaf: Leaf) -> str | None:
    """The parameter `leaf` of the module that `text` means, if that has one.

    A bare parameter, or one that is named in full, is its own weight. What lightx2v calls the modulation of a block is
    a bare parameter in it.
    """
    if leaf == "modulation":
        return module_name(f"{text}.modulation")
    module = module_name(text)
    if module is None:
        return None
    if module.endswith((_BARE, ".weight", ".bias")):
        return module if leaf == "weight" else None
    if leaf == "bias" and module.endswith(_WITHOUT_BIAS):
        return None
    return f"{module}.{leaf}"


def _spellings(names: Mapping[str, str], dot: str) -> Mapping[str, str]:
    """Everything that a module or parameter is called -> its name in diffusers; `dot` stands between the parts."""
    full = {
        f"{name}{leaf}": f"{native}{leaf}"
        for name, native in names.items()
        for leaf in ("", ".weight", ".bias")
        if not leaf or not name.endswith((_BARE, *(_WITHOUT_BIAS if leaf == ".bias" else ())))
    }
    spelt: dict[str, str] = {}
    for name, native in full.items():
        for spelling in (name.replace(".", dot), native.replace(".", dot)):
            assert spelt.setdefault(spelling, name) == name, f"{spelling} means both {spelt[spelling]} and {name}"
    return spelt


_DOTTED = (_spellings(OUTER, "."), _spellings(BLOCK, "."))
_FLAT = (_spellings(OUTER, "_"), _spellings(BLOCK, "_"))
