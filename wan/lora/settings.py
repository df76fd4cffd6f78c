"""PEFT and kohya settings for the scale of LoRA layers without alpha tensors.

They are in the file header or, as PEFT saves them, in `adapter_config.json` next to the file. The
layer scale is alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...offload.formats import FileVersion
from ..checkpoint.files import CheckpointError, json_object
from ..checkpoint.key_names import native_transformer_name
from .keys import module_name

HEADER_FIELDS = ("lora_adapter_metadata", "lora_config")
"""Header fields with PEFT's settings as one JSON text."""
ALPHA_FIELD = "lora_alpha"
KOHYA_ALPHA = "ss_network_alpha"
CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES = 1024**2
"""Size limit for `CONFIG_FILE`. PEFT writes a few kilobytes."""
PEFT_FILE = re.compile(r"adapter_model\b.*")
LARGEST = sys.float_info.max
CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initial values that PEFT takes out of the model weights. PEFT's conversion removes
the name."""

# Expressions with a known time limit: groups do not repeat, and a name has some 50 characters.
EXPRESSION = re.compile(r"(?:[\w.|^$]|\\[.d]|\[[\w-]+\]|\((?!\?)|\)(?![*+?{])|[*+?](?![*+?]))+")
LONG_REPETITION = re.compile(r"(?<!\\d)[*+]")
CHOICE = re.compile(r"[?|]|(?<=\\d)[*+]")
LONGEST_EXPRESSION = 200
MOST_TRIES = 50_000
"""Upper limit for the ways to match a name, over all expressions in a setting. A whole model takes
some seconds at this limit."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Settings for the scale of a layer without an alpha tensor."""

    alpha: float | None = None
    """Default alpha."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas by layer: the end of a name, or an expression."""
    rank: float | None = None
    """Default rank, for layers without a rank in the tensors."""
    ranks: Mapping[str, float] = field(default_factory=dict)
    """Ranks by layer: the end of a name, or an expression."""
    rank_stabilised: bool = False
    needs_magnitudes: bool = False
    """True for a DoRA."""
    source: tuple[Path, FileVersion] | None = None
    """The settings file next to the LoRA, if one was read."""
    notes: tuple[str, ...] = ()
    """Sentences about settings without effect."""

    def scale(self, module: str, rank: int | None, alpha: float | None) -> float:
        """Return the factor for the change of `module`.

        Args:
            module: layer name.
            rank: rank of the layer tensors. None if they have none.
            alpha: value of the alpha tensor, which counts first. None without one.
        """
        if alpha is None:
            alpha = _by_name(self.alphas, module, self.alpha)
        if rank is None:
            rank = int(_by_name(self.ranks, module, self.rank) or 0)
        if alpha is None or not rank:
            return 1.0
        if self.rank_stabilised:
            return alpha / math.sqrt(rank)
        return alpha / rank


def adapter_settings(
    path: Path, metadata: Mapping[str, str], keys: Iterable[str]
) -> AdapterSettings:
    """Read the settings for a LoRA file. Without settings, the tensors determine every scale.

    The header counts before the file next to it.

    Raises:
        CheckpointError: the settings are not a JSON object, or an alpha or rank is not a number.
    """
    for name in HEADER_FIELDS:
        if name in metadata:
            return _of_peft(path, name, json_object(path, metadata[name], f"{name} "))
    if ALPHA_FIELD in metadata:
        return AdapterSettings(alpha=_number(path, ALPHA_FIELD, _parsed(metadata[ALPHA_FIELD])))
    keys = list(keys)
    if KOHYA_ALPHA in metadata:
        return _of_kohya(path, metadata[KOHYA_ALPHA], keys)
    return _next_to(path, keys)


def _of_kohya(path: Path, text: str, keys: Iterable[str]) -> AdapterSettings:
    """Return the settings in kohya's header, with words for a number where alphas differ."""
    alpha = _parsed(text)
    if not isinstance(alpha, float):
        return AdapterSettings()
    # musubi-tuner's converter folds the alphas into `lora_A` and `lora_B`, and keeps the old
    # header.
    if any(".lora_A" in key for key in keys):
        note = (
            f"{path.name}: {KOHYA_ALPHA} {alpha:g} in its header is not used, since converters "
            "fold it into lora_A"
        )
        return AdapterSettings(notes=(note,))
    return AdapterSettings(alpha=_number(path, KOHYA_ALPHA, alpha))


def _next_to(path: Path, keys: Iterable[str]) -> AdapterSettings:
    """Return the settings in `CONFIG_FILE` next to the LoRA, if they belong to this file."""
    config = path.parent / CONFIG_FILE
    if not config.is_file() or any(key.endswith(".alpha") for key in keys):
        return AdapterSettings()
    if PEFT_FILE.fullmatch(path.stem) is None and len(list(path.parent.glob("*.safetensors"))) > 1:
        note = (
            f"{path.name}: {CONFIG_FILE} next to it is not used: the folder has other LoRAs, and "
            "it may be theirs"
        )
        return AdapterSettings(notes=(note,))
    status = config.stat()
    if status.st_size > CONFIG_BYTES:
        raise CheckpointError(
            config, f"has {status.st_size} bytes; PEFT writes at most {CONFIG_BYTES}"
        )
    settings = _of_peft(config, CONFIG_FILE, json_object(config, config.read_bytes()))
    return replace(settings, source=(config, FileVersion.of(status)))


def _of_peft(path: Path, where: str, found: Mapping[str, Any]) -> AdapterSettings:
    # Each name has the prefix "transformer." or "text_encoder." if the whole pipeline was saved.
    named = {
        name.rpartition(".")[2]: value
        for name, value in found.items()
        if not name.startswith("text_encoder")
    }
    initial = named.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGE_THE_MODEL):
        raise CheckpointError(
            path,
            f"{where}: init_lora_weights is {initial!r}, which changes the model that the LoRA is "
            "added to: convert it with PEFT (path_initial_model_for_weight_conversion)",
        )
    alpha_name = ALPHA_FIELD if ALPHA_FIELD in named else "alpha"  # LoRA, else LoKr or LoHa
    defaults = {
        name: _number(path, f"{where}: {name}", named[name], least=least)
        for name, least in ((alpha_name, -LARGEST), ("r", 1))
        if named.get(name) is not None
    }
    return AdapterSettings(
        alpha=defaults.get(alpha_name),
        alphas=_pattern(path, where, "alpha_pattern", named),
        rank=defaults.get("r"),
        ranks=_pattern(path, where, "rank_pattern", named, least=1),
        rank_stabilised=_flag(path, f"{where}: use_rslora", named.get("use_rslora")),
        needs_magnitudes=_flag(path, f"{where}: use_dora", named.get("use_dora")),
    )


def _pattern(
    path: Path, where: str, name: str, named: Mapping[str, Any], *, least: float = -LARGEST
) -> dict[str, float]:
    """Return the numbers in a PEFT pattern table by module name ending."""
    given = named.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(path, f"{where}: {name} is {given!r}; numbers by layer are expected")
    numbers = {
        _name_end(path, where, name, pattern): _number(
            path, f"{where}: {name}: {pattern}", value, least=least
        )
        for pattern, value in given.items()
    }
    tries = sum(_tries(end) for end in numbers if _NAME.fullmatch(end) is None)
    if tries > MOST_TRIES:
        raise CheckpointError(
            path, f"{where}: {name} has expressions with {tries} ways to match; {ONLY_SIMPLE}"
        )
    return numbers


_NAME = re.compile(r"[\w.]+")
ONLY_SIMPLE = "only names of layers and simple expressions are read, without groups that repeat"


def _name_end(path: Path, where: str, name: str, pattern: str) -> str:
    """Return the name ending for a PEFT pattern, or the pattern itself if it is an expression.

    PEFT takes any regular expression. Some would keep this process busy for ever, so only simple
    ones are read.
    """
    end = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    if _NAME.fullmatch(end) is not None:
        return module_name(end) or end
    is_simple = len(pattern) <= LONGEST_EXPRESSION and EXPRESSION.fullmatch(pattern) is not None
    try:
        re.compile(pattern if is_simple else "")
    except re.error:
        is_simple = False
    if not is_simple:
        raise CheckpointError(path, f"{where}: {name} has {pattern!r}; {ONLY_SIMPLE}")
    return pattern


def _tries(expression: str) -> int:
    # Ways to match: 50 ends for each long repetition, 2 for each choice.
    tries: int = 50 ** len(LONG_REPETITION.findall(expression)) * 2 ** len(
        CHOICE.findall(expression)
    )
    return tries


def _by_name(values: Mapping[str, float], module: str, default: float | None) -> float | None:
    """Return the first value with a pattern for the end of the module name, in either spelling."""
    if not values:
        return default
    spellings = (module, native_transformer_name(module))
    for pattern, value in values.items():
        if any(_matches(pattern, name) for name in spellings):
            return value
    return default


def _matches(pattern: str, name: str) -> bool:
    if _NAME.fullmatch(pattern) is not None:
        return f".{name}".endswith(f".{pattern}")
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None  # as in PEFT


def _parsed(text: str) -> object:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _flag(path: Path, name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise CheckpointError(path, f"{name} is {value!r}; true or false is expected")


def _number(path: Path, name: str, value: object, *, least: float = -LARGEST) -> float:
    # Compare instead of converting: `float` raises an error for integers beyond the float range.
    if (
        # True is an int in Python, hence the second check.
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and least <= value <= LARGEST
    ):
        return float(value)
    wanted = "a number" if least == -LARGEST else f"a number from {least} on"
    raise CheckpointError(path, f"{name} is {value!r}; {wanted} is expected")
