"""LoRA keys: the parameter and the part of the change.

A key is `<prefix><module><ending>`.

| part   | spellings                                                                               |
|--------|-----------------------------------------------------------------------------------------|
| prefix | none; wrappers (`WRAPPERS`) with dots or underscores; `lora_unet_`, `lycoris_` and such |
| module | native or diffusers' name; with a flat prefix, dots may be underscores                  |
| ending | `ENDINGS`                                                                               |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from ..checkpoint.key_names import BLOCK, OUTER

Role: TypeAlias = str
"""Tensor role: `up @ down * alpha / rank` and `diff` are added to a weight, `up bias * alpha /
rank` to a bias.

LoKr and LoHa (roles of `FORMS`) and DoRA (`magnitude`): see `changes.py`.
"""

Matrix = Literal["lokr_w1", "lokr_w2", "hada_w1", "hada_w2"]

FORMS: Mapping[Matrix, tuple[tuple[Role, ...], ...]] = {
    "lokr_w1": (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")),
    # With `t2` first, because the two factors alone are complete too.
    "lokr_w2": (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b", "lokr_t2"), ("lokr_w2_a", "lokr_w2_b")),
    "hada_w1": (("hada_w1_a", "hada_w1_b", "hada_t1"), ("hada_w1_a", "hada_w1_b")),
    "hada_w2": (("hada_w2_a", "hada_w2_b", "hada_t2"), ("hada_w2_a", "hada_w2_b")),
}
"""Factor roles per matrix. The first complete form counts."""

LYCORIS_ROLES = tuple(dict.fromkeys(chain.from_iterable(chain.from_iterable(FORMS.values()))))

Leaf = Literal["weight", "bias", "modulation"]

# Words in the names, often several, that frameworks and trainers put in front of a model.
WRAPPERS = {
    *("base", "backbone", "core", "denoiser", "diffusion", "dit", "ema", "expert", "generator"),
    *("high", "inner", "lora", "low", "lycoris", "main", "model", "module", "net", "network"),
    *("noise", "pipe", "pipeline", "student", "transformer", "unet", "video"),
    *("wan", "wan2", "wan21", "wan22", "wrapped", "wrapper", "1", "2"),
}
LONGEST = 500
"""Length limit for a name. Finding a name among thousands of wrappers would take minutes."""
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")

# These wrap the model or a part of it, so they are inside names too.
_TRANSPARENT = re.compile(
    r"(?:^|[._])_?(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)(?=[._])"
)
_FLAT_PREFIX = re.compile(rf"(?:{'|'.join(FLAT_PREFIXES)})_*")
_DOT_AT_NUMBER = re.compile(r"\.(?=[0-9])|(?<=[0-9])\.")
_IN_BLOCK = re.compile(r"(?P<prefix>.*?)(?<![^._])blocks[._](?P<block>[0-9]{1,4})[._](?P<name>.+)")

# PEFT puts the adapter name, mostly "default", behind the factor name.
_ADAPTER = re.compile(
    r"(\.(?:lora_[AB]|lora_magnitude_vector|lokr_\w+|hada_\w+))\.(?!(?:weight|bias)$)[^.]+(?=\.|$)"
)

# Endings for the two factors, down and up.
FACTORS = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A", ".lora_B"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
)

# Role and module parameter by ending. No ending is the end of another one.
ENDINGS: Mapping[str, tuple[Role, Leaf]] = {
    **{down: ("down", "weight") for down, _ in FACTORS},
    **{up: ("up", "weight") for _, up in FACTORS},
    ".alpha": ("alpha", "weight"),
    ".diff": ("diff", "weight"),
    ".diff_b": ("diff", "bias"),
    ".diff_m": ("diff", "modulation"),
    ".w_norm": ("diff", "weight"),
    ".b_norm": ("diff", "bias"),
    ".lora_B.bias": ("up bias", "bias"),
    ".dora_scale": ("magnitude", "weight"),
    ".lora_magnitude_vector": ("magnitude", "weight"),
    ".lora_magnitude_vector.weight": ("magnitude", "weight"),
    **{f".{role}": (role, "weight") for role in LYCORIS_ROLES},
}

# Endings for changes that no code here computes, by algorithm.
OTHER_ALGORITHMS = {
    "a LoCon with a third factor": (".lora_mid.weight",),
    "an OFT": (".oft_blocks", ".oft_diag", ".oft_R", ".oft_R.weight", ".boft_R"),
    "an (IA)^3": (".on_input", ".ia3_l"),
    "a VeRA": (".vera_lambda_b", ".vera_lambda_d"),
    "a GLoRA": (".a1.weight", ".b1.weight"),
    "a LoRA that gives a weight another shape": (".reshape_weight",),
    "a file that replaces weights": (".set_weight",),
    "a LoRA in fp8 with scales": tuple(
        factor + scale
        for factor in (".lora_down", ".lora_A")
        for scale in (".scale_weight", ".weight_scale")
    ),
}

# Models by patterns of key parts in their LoRAs, with underscores for dots next to numbers. The
# first match counts.
OTHER_MODELS = {
    "Stand-In": r"[qkv]_loras",
    "Wan VACE": r"vace_blocks|vace_patch_embedding",
    "Wan Animate": r"face_adapter|pose_patch_embedding|motion_encoder",
    "Wan S2V": r"casual_audio_encoder|audio_injector|trainable_cond_mask",
    "an audio model (InfiniteTalk, MultiTalk, HuMo)": r"audio_proj|audio_cross_attn",
    "Wan Fun Camera": r"control_adapter",
    "HunyuanVideo": r"individual_token_refiner|(?:img|txt)_mlp[._]fc",
    "Chroma": r"distilled_guidance_layer",
    "Flux": r"single_transformer_blocks",
    "Flux or HunyuanVideo": r"double_blocks|single_blocks",
    "HiDream": r"double_stream_blocks|single_stream_blocks",
    "Stable Diffusion or SDXL": r"(?:input|output|down|up)_blocks|mid_block",
    "Stable Diffusion 3": r"joint_blocks",
    "Lumina or Z-Image": r"context_refiner|noise_refiner",
    "Kandinsky 5": r"visual_transformer_blocks|text_transformer_blocks",
    "Cosmos or Anima": r"llm_adapter|adaln_modulation",
    "Qwen-Image": r"(?:img|txt)_mlp[._]net|(?:img|txt)_mod_1",
    "LTX-Video": r"video_to_audio_attn|patchify_proj|transformer_blocks_0_attn1",
    "Qwen-Image, LTX-Video or Stable Diffusion 3": r"transformer_blocks",
    "a text encoder": r"lora_te|text_model|text_encoder",
}

_BARE = "scale_shift_table"
_LACKING = {"": (), ".weight": (_BARE,), ".bias": (_BARE, "norm_q", "norm_k", "norm_added_k")}
"""Modules without a parameter, by name ending."""


class KeyMeaning(NamedTuple):
    """Parameter and role of a LoRA key."""

    parameter: str
    """Name in diffusers' WanTransformer3DModel. The block index is not checked."""
    role: Role


def key_meaning(key: str) -> KeyMeaning | None:
    """Return the meaning of `key`. None if it matches no expert parameter."""
    key = _ADAPTER.sub(r"\1", key)
    for ending, (role, leaf) in ENDINGS.items():
        if key.endswith(ending):
            parameter = _parameter(key.removesuffix(ending), leaf)
            if parameter is not None:
                return KeyMeaning(parameter, role)
    return None


def layer_of(key: str) -> str:
    """Return `key` without a known ending: the layer name with the prefix."""
    key = _ADAPTER.sub(r"\1", key)
    known = [ending for ending in ENDINGS if key.endswith(ending)]
    return key.removesuffix(max(known, key=len, default=""))


def other_algorithm(key: str) -> str | None:
    """Return the algorithm for `key` if no code here computes it, else None."""
    for algorithm, endings in OTHER_ALGORITHMS.items():
        if key.endswith(endings):
            return algorithm
    return None


def other_model(keys: Iterable[str]) -> str | None:
    """Return the known model other than Wan that a LoRA with `keys` is probably for, or None."""
    # Not all dots: underscores behind a wrapper would make "transformer.blocks" the blocks of
    # another model.
    flat = [_DOT_AT_NUMBER.sub("_", _FLAT_PREFIX.sub("", key, count=1)) for key in keys]
    for model, parts in OTHER_MODELS.items():
        if any(re.search(parts, key) for key in flat):
            return model
    return None


def unknown_prefix(key: str) -> str | None:
    """Return the prefix of a `key` that would name a block layer without it, or None."""
    layer = layer_of(key)
    found = _IN_BLOCK.fullmatch(_TRANSPARENT.sub("", layer))
    if layer == key or found is None or module_name(layer) is not None:
        return None
    without = f"{FLAT_PREFIXES[0]}blocks_{found['block']}_{found['name']}"
    if module_name(without) is None:
        return None
    return found["prefix"]


def module_name(text: str) -> str | None:
    """Return the diffusers name ("blocks.3.attn1.to_q") of module or parameter `text`, or None."""
    if len(text) > LONGEST:
        return None
    parts = _TRANSPARENT.sub("", text).lstrip(".").split(".")
    while len(parts) > 1 and WRAPPERS.issuperset(parts[0].split("_")):
        del parts[0]
    name = ".".join(parts)
    flat = _FLAT_PREFIX.match(name)
    if flat is None:
        return _look_up(name, ".")
    return _flat_module(name[flat.end() :].replace(".", "_"))


def _flat_module(name: str) -> str | None:
    """Return the module for a name with underscores for dots, and wrapper names in front."""
    while True:
        module = _look_up(name, "_")
        word, _, rest = name.partition("_")
        # "transformer_blocks" are blocks of other models.
        if (
            module is not None
            or word not in WRAPPERS
            or (word == "transformer" and rest.startswith("blocks"))
        ):
            return module
        name = rest.lstrip("_")


def _look_up(text: str, dot: str) -> str | None:
    in_block = re.fullmatch(rf"blocks{re.escape(dot)}([0-9]{{1,4}}){re.escape(dot)}(.+)", text)
    if in_block is None:
        return _OUTER[dot].get(text)
    local = _BLOCK[dot].get(in_block[2])
    # "03" and "3" are one block.
    return local and f"blocks.{int(in_block[1])}.{local}"


def _parameter(text: str, leaf: Leaf) -> str | None:
    """Return the parameter `leaf` in the module `text`, or None if there is none.

    A bare parameter, or a full parameter name, counts as a weight. The block modulation in lightx2v
    files is a bare parameter.
    """
    if leaf == "modulation":
        return module_name(f"{text}.modulation")
    module = module_name(text)
    if module is None:
        return None
    if module.endswith((_BARE, ".weight", ".bias")):
        return module if leaf == "weight" else None
    if module.endswith(_LACKING[f".{leaf}"]):
        return None
    return f"{module}.{leaf}"


def _spellings(names: Mapping[str, str], dot: str) -> Mapping[str, str]:
    """Return the diffusers name by spelling of module or parameter, with `dot` between parts."""
    full = {
        f"{name}{leaf}": f"{native}{leaf}"
        for name, native in names.items()
        for leaf, lacking in _LACKING.items()
        if not name.endswith(lacking)
    }
    spelt: dict[str, str] = {}
    for name, native in full.items():
        for spelling in (name.replace(".", dot), native.replace(".", dot)):
            assert spelt.setdefault(spelling, name) == name, (
                f"{spelling} means both {spelt[spelling]} and {name}"
            )
    return spelt


_OUTER = {dot: _spellings(OUTER, dot) for dot in "._"}
_BLOCK = {dot: _spellings(BLOCK, dot) for dot in "._"}
