"""Alphas in the header of a LoRA file, for files without `alpha` tensors.

diffusers writes the settings of PEFT as one JSON text. The scale of a layer is alpha / rank, or alpha / sqrt(rank) with
rank-stabilised LoRA.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import CheckpointError
from .keys import module_name

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
    named = {name.rpartition(".")[2]: value for name, value in _parse(path, metadata[KEY]).items()}
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


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(path, f"{KEY} is not JSON: {err}") from err
    if not isinstance(settings, dict):
        raise CheckpointError(path, f"{KEY} is not a JSON object")
    return settings


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
