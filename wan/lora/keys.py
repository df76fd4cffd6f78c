"""Keys and metadata of LoRA files: the parameter, the part of the change, and its strength.

A key is `<prefix><module><ending>`. The tables here have every spelling of the three that trainers and other programs
use; a key with another spelling matches nothing.

| prefixes                                                                        | names of modules      |
|---------------------------------------------------------------------------------|-----------------------|
| none, `diffusion_model.`, `transformer.`, `base_model.model.` ..., also several  | native or diffusers'  |
| `lora_unet_`, `lora_transformer_`, `lycoris_`: dots are underscores              | native or diffusers'  |

diffusers writes the settings of PEFT as one JSON text. The scale of a layer is alpha / rank, or alpha / sqrt(rank) with
rank-stabilised LoRA.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from ..checkpoint.files import CheckpointError, json_object
from ..checkpoint.key_names import BLOCK, OUTER

Role = Literal["down", "up", "alpha", "diff", "up bias"]
"""Role of a tensor: `up @ down * alpha / rank` and `diff` are added to a weight, `up bias * alpha / rank` to a bias."""

Leaf = Literal["weight", "bias", "modulation"]

DOTTED_PREFIXES = (
    "diffusion_model.",
    "model.diffusion_model.",
    "transformer.",
    "transformer_2.",
    "base_model.model.",
    "pipe.dit.",
)
# All of them: trainers that wrap a wrapped model write several.
_PREFIXES = re.compile(rf"^({'|'.join(map(re.escape, DOTTED_PREFIXES))})+")
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")

# Endings of the two factors, down and up.
FACTORS = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A", ".lora_B"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
)

# Role and parameter of the module by ending; no ending is the end of another one.
ENDINGS: Mapping[str, tuple[Role, Leaf]] = {
    **{down: ("down", "weight") for down, _ in FACTORS},
    **{up: ("up", "weight") for _, up in FACTORS},
    ".alpha": ("alpha", "weight"),
    ".diff": ("diff", "weight"),
    ".diff_b": ("diff", "bias"),
    ".diff_m": ("diff", "modulation"),
    ".w_norm": ("diff", "weight"),
    ".b_norm": ("diff", "bias"),
    ".lora_B.default.bias": ("up bias", "bias"),
    ".lora_B.bias": ("up bias", "bias"),
}

# Endings of changes other than `weight + up @ down` and `weight + diff`, by their algorithm.
OTHER_ALGORITHMS = {
    "a DoRA, which also rescales the weights": (
        ".dora_scale",
        ".lora_magnitude_vector",
        ".lora_magnitude_vector.weight",
        ".lora_magnitude_vector.default.weight",
    ),
    "a LoCon with a third factor": (".lora_mid.weight",),
    "a LoHa": (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b"),
    "a LoKr": (".lokr_w1", ".lokr_w2", ".lokr_w1_a", ".lokr_w2_a"),
    "an OFT": (".oft_blocks", ".oft_diag", ".oft_R.weight"),
    "a GLoRA": (".a1.weight", ".b1.weight"),
    "a LoRA that gives a weight another shape": (".reshape_weight",),
    "a file that replaces weights": (".set_weight",),
    "a LoRA in fp8 with scales": tuple(
        factor + scale for factor in (".lora_down", ".lora_A") for scale in (".scale_weight", ".weight_scale")
    ),
}

# Models by parts of the keys of their LoRAs; the first match wins.
OTHER_MODELS = {
    "Flux or HunyuanVideo": ("double_blocks", "single_blocks"),
    "Flux": ("single_transformer_blocks",),
    "Stable Diffusion or SDXL": ("input_blocks", "down_blocks"),
    "Stable Diffusion 3": ("joint_blocks",),
    "Lumina or Z-Image": ("context_refiner",),
    "Qwen-Image, LTX-Video or Stable Diffusion 3": ("transformer_blocks",),
    "a text encoder": ("lora_te", "text_model"),
    "Wan VACE": ("vace_blocks",),
}

_BARE = "scale_shift_table"
_WITHOUT_BIAS = ("norm_q", "norm_k", "norm_added_k")


class KeyMeaning(NamedTuple):
    """Parameter and role of a LoRA key."""

    parameter: str
    """Name in diffusers' WanTransformer3DModel; the index of a block is not checked."""
    role: Role


def key_meaning(key: str) -> KeyMeaning | None:
    """Return the meaning of `key`, or None if it matches no parameter of an expert."""
    for ending, (role, leaf) in ENDINGS.items():
        if key.endswith(ending):
            parameter = _parameter(key.removesuffix(ending), leaf)
            if parameter is not None:
                return KeyMeaning(parameter, role)
    return None


def other_algorithm(key: str) -> str | None:
    """Return the algorithm of a file with `key` if it is more than a LoRA, else None."""
    return next((algorithm for algorithm, endings in OTHER_ALGORITHMS.items() if key.endswith(endings)), None)


def other_model(key: str) -> str | None:
    """Return the known model, other than Wan, for which a LoRA with `key` was probably made, or None."""
    prefix = next((prefix for prefix in FLAT_PREFIXES if key.startswith(prefix)), "")
    module = key.removeprefix(prefix)
    return next((model for model, parts in OTHER_MODELS.items() if any(part in module for part in parts)), None)


def module_name(text: str) -> str | None:
    """Return the diffusers name of the module or bare parameter `text`, such as "blocks.3.attn1.to_q", or None."""
    for prefix in FLAT_PREFIXES:
        if text.startswith(prefix):
            # The trainer of Wan Fun writes a second underscore.
            return _look_up(text.removeprefix(prefix).removeprefix("_"), "_", _FLAT)
    return _look_up(_PREFIXES.sub("", text), ".", _DOTTED)


def _look_up(text: str, dot: str, tables: tuple[Mapping[str, str], Mapping[str, str]]) -> str | None:
    outer, block = tables
    in_block = re.fullmatch(rf"blocks{re.escape(dot)}([0-9]{{1,4}}){re.escape(dot)}(.+)", text)
    if in_block is None:
        return outer.get(text)
    local = block.get(in_block[2])
    return None if local is None else f"blocks.{int(in_block[1])}.{local}"


def _parameter(text: str, leaf: Leaf) -> str | None:
    """Return the parameter `leaf` of the module `text`, or None if there is none.

    A bare parameter, or one with its full name, counts as a weight. The modulation of a block in files of lightx2v is a
    bare parameter.
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
    """Return the diffusers name of every spelling of a module or parameter, with `dot` between the parts."""
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


KEY = "lora_adapter_metadata"
LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Settings of PEFT that determine the scale of a layer."""

    alpha: float | None = None
    """Default alpha of all layers."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas of single layers, by module name."""
    rank_stabilised: bool = False

    def scale(self, module: str, rank: int, alpha: float | None) -> float:
        """Return the factor of `up @ down` of `module`; `alpha` is the value of its tensor, which takes precedence."""
        if alpha is None:
            alpha = self.alphas.get(module, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def adapter_settings(path: Path, metadata: Mapping[str, str]) -> AdapterSettings:
    """Read the settings from the metadata of a file; without them, the tensors of the file determine every scale.

    Raises:
        CheckpointError: the settings are not a JSON object, an alpha is not a number, or the file is a DoRA.
    """
    if KEY not in metadata:
        return AdapterSettings()
    # Each name has the prefix "transformer." if the whole pipeline was saved.
    named = {name.rpartition(".")[2]: value for name, value in json_object(path, metadata[KEY], f"{KEY} ").items()}
    if named.get("use_dora"):
        raise CheckpointError(path, f"is a DoRA, which also rescales the weights ({KEY}): use a plain LoRA")
    patterns = named.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(path, f"{KEY}: alpha_pattern is {patterns!r}; numbers by layer are expected")
    alpha = named.get("lora_alpha")
    return AdapterSettings(
        alpha=None if alpha is None else _number(path, "lora_alpha", alpha),
        alphas={_module(path, name): _number(path, name, value) for name, value in patterns.items()},
        rank_stabilised=bool(named.get("use_rslora")),
    )


def _module(path: Path, name: str) -> str:
    module = module_name(name)
    if module is None:
        raise CheckpointError(path, f"{KEY} has an alpha for {name}, which is not a layer of a Wan expert")
    return module


def _number(path: Path, name: str, value: object) -> float:
    # Compare instead of converting: `float` raises an error for integers beyond the range of a float.
    if isinstance(value, (int, float)) and abs(value) <= LARGEST:
        return float(value)
    raise CheckpointError(path, f"{KEY} says that {name} is {value!r}; a number is expected")
