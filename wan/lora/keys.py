"""LoRA keys: the parameter and the part of the change.

A key is `<prefix><module><ending>`.

| part    | spellings                                                                                              |
|---------|--------------------------------------------------------------------------------------------------------|
| prefix  | none; any wrapper names (`WRAPPERS`), with dots or underscores; `lora_unet_`, `lycoris_` and such      |
| module  | native or diffusers' name; with a flat prefix, dots may be underscores                                 |
| ending  | `ENDINGS`                                                                                              |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from ..checkpoint.key_names import BLOCK, OUTER

Role = Literal[
    "down",
    "up",
    "alpha",
    "diff",
    "up bias",
    "magnitude",
    "lokr_w1",
    "lokr_w1_a",
    "lokr_w1_b",
    "lokr_w2",
    "lokr_w2_a",
    "lokr_w2_b",
    "lokr_t2",
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "hada_w2_b",
    "hada_t1",
    "hada_t2",
]
"""Tensor role: `up @ down * alpha / rank` and `diff` are added to a weight, `up bias * alpha / rank` to a bias.

LoKr, LoHa and DoRA (`magnitude`): see `changes.py`.
"""

LYCORIS_ROLES: tuple[Role, ...] = (
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
)

Leaf = Literal["weight", "bias", "modulation"]

# Words in the names, often several, that frameworks and trainers put in front of a model.
WRAPPERS = frozenset(
    {
        *("base", "backbone", "core", "denoiser", "diffusion", "dit", "ema", "expert", "generator", "high", "inner"),
        *("lora", "low", "lycoris", "main", "model", "module", "net", "network", "noise", "pipe", "pipeline"),
        *("student", "transformer", "unet", "video", "wan", "wan2", "wan21", "wan22", "wrapped", "wrapper", "1", "2"),
    }
)
LONGEST = 500
"""Length limit for a name. Finding a name among thousands of wrappers would take minutes."""
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")

# Put around the model or a part of it, so they are inside names too.
_TRANSPARENT = re.compile(r"(?:^|[._])_?(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)(?=[._])")
_FLAT_PREFIX = re.compile(rf"(?:{'|'.join(FLAT_PREFIXES)})_*")
_DOT_AT_NUMBER = re.compile(r"\.(?=[0-9])|(?<=[0-9])\.")
_IN_BLOCK = re.compile(r"(?P<prefix>.*?)(?<![^._])blocks[._](?P<block>[0-9]{1,4})[._](?P<name>.+)")

# PEFT puts the adapter name, mostly "default", behind the factor name.
_ADAPTER = re.compile(r"(\.(?:lora_[AB]|lora_magnitude_vector|lokr_\w+|hada_\w+))\.(?!(?:weight|bias)$)[^.]+(?=\.|$)")

# Endings of the two factors, down and up.
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

# Endings of changes that nothing here computes, by algorithm.
OTHER_ALGORITHMS = {
    "a LoCon with a third factor": (".lora_mid.weight",),
    "an OFT": (".oft_blocks", ".oft_diag", ".oft_R", ".oft_R.weight", ".boft_R"),
    "an (IA)^3": (".on_input", ".ia3_l"),
    "a VeRA": (".vera_lambda_b", ".vera_lambda_d"),
    "a GLoRA": (".a1.weight", ".b1.weight"),
    "a LoRA that gives a weight another shape": (".reshape_weight",),
    "a file that replaces weights": (".set_weight",),
    "a LoRA in fp8 with scales": tuple(
        factor + scale for factor in (".lora_down", ".lora_A") for scale in (".scale_weight", ".weight_scale")
    ),
}

# Models by key parts of their LoRAs, with underscores for dots next to numbers. The first match counts.
OTHER_MODELS = {
    "Stand-In": ("q_loras", "k_loras", "v_loras"),
    "Wan VACE": ("vace_blocks", "vace_patch_embedding"),
    "Wan Animate": ("face_adapter", "pose_patch_embedding", "motion_encoder"),
    "Wan S2V": ("casual_audio_encoder", "audio_injector", "trainable_cond_mask"),
    "an audio model (InfiniteTalk, MultiTalk, HuMo)": ("audio_proj", "audio_cross_attn"),
    "Wan Fun Camera": ("control_adapter",),
    "HunyuanVideo": ("individual_token_refiner", "img_mlp.fc", "img_mlp_fc", "txt_mlp.fc", "txt_mlp_fc"),
    "Chroma": ("distilled_guidance_layer",),
    "Flux": ("single_transformer_blocks",),
    "Flux or HunyuanVideo": ("double_blocks", "single_blocks"),
    "HiDream": ("double_stream_blocks", "single_stream_blocks"),
    "Stable Diffusion or SDXL": ("input_blocks", "output_blocks", "down_blocks", "up_blocks", "mid_block"),
    "Stable Diffusion 3": ("joint_blocks",),
    "Lumina or Z-Image": ("context_refiner", "noise_refiner"),
    "Kandinsky 5": ("visual_transformer_blocks", "text_transformer_blocks"),
    "Cosmos or Anima": ("llm_adapter", "adaln_modulation"),
    "Qwen-Image": ("img_mlp.net", "img_mlp_net", "txt_mlp.net", "txt_mlp_net", "img_mod_1", "txt_mod_1"),
    "LTX-Video": ("video_to_audio_attn", "patchify_proj", "transformer_blocks_0_attn1"),
    "Qwen-Image, LTX-Video or Stable Diffusion 3": ("transformer_blocks",),
    "a text encoder": ("lora_te", "text_model", "text_encoder"),
}

_BARE = "scale_shift_table"
_WITHOUT_BIAS = ("norm_q", "norm_k", "norm_added_k")


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
    """Return the algorithm for `key` if nothing here computes it, else None."""
    return next((algorithm for algorithm, endings in OTHER_ALGORITHMS.items() if key.endswith(endings)), None)


def other_model(keys: Iterable[str]) -> str | None:
    """Return the known model, other than Wan, for which a LoRA with `keys` was probably made, or None."""
    # Not all dots: underscores behind a wrapper would make "transformer.blocks" the blocks of another model.
    flat = [_DOT_AT_NUMBER.sub("_", _FLAT_PREFIX.sub("", key, count=1)) for key in keys]
    return next((name for name, parts in OTHER_MODELS.items() if any(p in key for key in flat for p in parts)), None)


def unknown_prefix(key: str) -> str | None:
    """Return the prefix of a `key` that would name a block layer without it, or None."""
    layer = layer_of(key)
    found = _IN_BLOCK.fullmatch(_TRANSPARENT.sub("", layer))
    if layer == key or found is None or module_name(layer) is not None:
        return None
    without = f"{FLAT_PREFIXES[0]}blocks_{found['block']}_{found['name']}"
    return found["prefix"] if module_name(without) is not None else None


def module_name(text: str) -> str | None:
    """Return the diffusers name of the module or bare parameter `text`, such as "blocks.3.attn1.to_q", or None."""
    if len(text) > LONGEST:
        return None
    parts = _TRANSPARENT.sub("", text).lstrip(".").split(".")
    while len(parts) > 1 and _is_wrapper(parts[0]):
        del parts[0]
    name = ".".join(parts)
    flat = _FLAT_PREFIX.match(name)
    return _look_up(name, ".", _DOTTED) if flat is None else _flat_module(name[flat.end() :].replace(".", "_"))


def _is_wrapper(name: str) -> bool:
    return all(word in WRAPPERS for word in name.split("_"))


def _flat_module(name: str) -> str | None:
    """Return the module for a name with underscores for dots, and wrapper names in front."""
    while True:
        module = _look_up(name, "_", _FLAT)
        word, _, rest = name.partition("_")
        # "transformer_blocks" are blocks of other models.
        if module is not None or word not in WRAPPERS or (word == "transformer" and rest.startswith("blocks")):
            return module
        name = rest.lstrip("_")


def _look_up(text: str, dot: str, tables: tuple[Mapping[str, str], Mapping[str, str]]) -> str | None:
    outer, block = tables
    in_block = re.fullmatch(rf"blocks{re.escape(dot)}([0-9]{{1,4}}){re.escape(dot)}(.+)", text)
    if in_block is None:
        return outer.get(text)
    local = block.get(in_block[2])
    return None if local is None else f"blocks.{int(in_block[1])}.{local}"


def _parameter(text: str, leaf: Leaf) -> str | None:
    """Return the parameter `leaf` of the module `text`, or None if there is none.

    A bare parameter, or a full parameter name, counts as a weight. The block modulation in lightx2v files is a bare
    parameter.
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
    """Return the diffusers name for every spelling of a module or parameter, with `dot` between the parts."""
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
