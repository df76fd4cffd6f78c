"""Markers of quantised layers: JSON in a tensor next to the layer, or in the header for all."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Container
from pathlib import Path
from typing import Any

from .files import CheckpointError, json_object

LAYER_MARKER = ".comfy_quant"
METADATA_MARKER = "_quantization_metadata"

MAX_MARKER_BYTES = 4096  # a larger tensor with this name is not a marker and is not read

_NAME = re.compile(r"\w+")


def marker_settings(path: Path, key: str, text: bytes) -> dict[str, Any]:
    """Return the layer settings in a marker: a JSON object, or the bare format name.

    Raises:
        CheckpointError: the bytes are something else. The message has the marker name.
    """
    bare = text.rstrip(b"\0").decode(errors="replace").strip()
    # Digits and `null` are JSON values, not format names.
    if _NAME.fullmatch(bare) and not bare.isdigit() and bare != "null":
        return {"format": bare}
    try:
        named = json.loads(bare)
    except (ValueError, RecursionError):
        named = None
    if isinstance(named, str):
        return {"format": named}
    return json_object(path, bare, f"{key} ", remedy=REMEDY)


def header_settings(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """Return layer settings from `_quantization_metadata` in the header, by the names there.

    Raises:
        CheckpointError: the text has no layers, or some layer settings are neither an object nor a
            format name.
    """
    layers = json_object(path, text, f"{METADATA_MARKER} ", remedy=REMEDY).get("layers")
    if not isinstance(layers, dict):
        raise CheckpointError(path, f"{METADATA_MARKER} has no layers{REMEDY}")
    for name, settings in layers.items():
        if not isinstance(settings, dict | str):
            found = f"{METADATA_MARKER} has {settings!r} for the layer {name}"
            raise CheckpointError(path, f"{found}, not an object or the name of a format{REMEDY}")
    return {
        name: {"format": each} if isinstance(each, str) else each for name, each in layers.items()
    }


REMEDY = ": download the file again, or use another one"


def own_layers(names: Collection[str], keys: Container[str]) -> dict[str, str]:
    """Return the header name of each layer with a weight in `keys`.

    Other names belong to other models.

    The header names may have another prefix than the file keys.
    """
    prefixes: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        found = (at for at in range(len(parts)) if f"{'.'.join(parts[at:])}.weight" in keys)
        if (at := next(found, None)) is not None:
            prefixes["".join(f"{part}." for part in parts[:at])] += 1
    # The most frequent prefix, because other models may have layers with the same last parts.
    prefix = max(prefixes, key=lambda each: prefixes[each], default="")
    layers = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {layer: name for layer, name in layers.items() if f"{layer}.weight" in keys}
