"""Conditions of a model call that share every visit of a block, and what prevents it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import comfy.patcher_extension

KEY = "wanstream"
"""Key of our wrappers in ComfyUI's lists of wrappers."""

Conditions: TypeAlias = Sequence[Sequence[Mapping[str, Any]] | None]
"""Conditions of a model call: positive, negative and more; None for one that is not computed."""

_kinds = comfy.patcher_extension.WrappersMP
COUNTING_WRAPPERS = (_kinds.CALC_COND_BATCH, _kinds.APPLY_MODEL, _kinds.DIFFUSION_MODEL)
"""Kinds of wrappers inside a model call. One that keeps state from pass to pass expects them one after the other."""

UNSHARED_KEYS = {
    "hooks": "hooks",
    "default": "a default condition",
    "control": "a ControlNet",
}
"""Keys of a condition that are computed for several conditions at once, with the names for a reader."""


def hindrance(conditions: Conditions, options: Mapping[str, Any]) -> str | None:
    """Return what prevents that the conditions share visits, in words; None if they can.

    Args:
        conditions: conditions of the call.
        options: ComfyUI's model options of the call.
    """
    return next(_hindrances(conditions, options), None)


def _hindrances(conditions: Conditions, options: Mapping[str, Any]) -> Iterator[str]:
    transformer: Mapping[str, Any] = options.get("transformer_options", {})
    wrappers: Mapping[str, Mapping[str, Sequence[object]]] = transformer.get("wrappers", {})
    for kind in COUNTING_WRAPPERS:
        for key, functions in wrappers.get(kind, {}).items():
            if key != KEY and functions:
                yield f"the {kind} wrapper {key or _name(functions[0])}"
    if "model_function_wrapper" in options:
        yield f"the model function wrapper {_name(options['model_function_wrapper'])}"
    for name, replacements in transformer.get("patches_replace", {}).items():
        if replacements:
            yield f"a replacement of {name} blocks"
    for key, words in UNSHARED_KEYS.items():
        if any(key in entry for condition in conditions for entry in condition or ()):
            yield words


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
