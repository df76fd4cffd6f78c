"""Conditions of a model call that share every visit of a block, and what prevents it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import comfy.patcher_extension
from torch import nn

from ....schema import format_size
from ...api import ShareVisits
from .hooks import Learnt

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

TESTED_MODELS = frozenset(
    {
        *("WAN21", "WAN21_Camera", "WAN21_HuMo", "WAN21_SCAIL", "WAN21_Vace", "WAN22", "WAN22_Animate", "WAN22_S2V"),
        *("Flux", "HunyuanVideo", "HunyuanVideo15", "LTXAV", "QwenImage"),
    }
)
"""Classes of `comfy.model_base` whose conditions give the same bits in lockstep (tests/integration/comfy)."""


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


def untested_model(model: Any, object_patches: Collection[str]) -> str | None:
    """Return why a model was not tested with shared visits, in words; None if it was.

    Args:
        model: ComfyUI's model.
        object_patches: paths of parts of the model that are replaced.
    """
    network = model.diffusion_model
    if type(model).__name__ not in TESTED_MODELS:
        return f"the untested model {type(model).__name__}"
    replaced = [path for path in object_patches if path.startswith("diffusion_model.")]
    replaced += [
        name
        for name, value in vars(network).items()
        if callable(value) and not isinstance(value, nn.Module) and hasattr(type(network), name)
    ]
    return f"the replaced {replaced[0]}" if replaced else None


def untested_patch(options: Mapping[str, Any]) -> str | None:
    """Return the code of another node inside the blocks, which may keep state from block to block; None without any.

    Args:
        options: ComfyUI's model options of a call.
    """
    transformer: Mapping[str, Any] = options.get("transformer_options", {})
    for kind, functions in transformer.get("patches", {}).items():
        if functions:
            return f"the {kind} {_name(functions[0])}"
    return next((f"the {name} {_name(value)}" for name, value in transformer.items() if callable(value)), None)


class VisitSharing:
    """Decision of each model call whether its conditions share visits, and what the calls have shown.

    Args:
        mode: when they may.
        learnt: facts from earlier runs.
        untested: why the model was not tested with shared visits; None if it was.
        decided: True if the memory of the lanes is that of `learnt`, once its policy was chosen.
        activation_bytes: estimated for one pass.
        free_bytes: returns the free memory of the device.
        note: receives the reasons.

    Attributes:
        active: True if the conditions of the current call share visits.
        batched: conditions that ComfyUI has computed in one pass.
        lanes: conditions of the last call that could share visits; 1 if none could.
    """

    def __init__(
        self,
        mode: ShareVisits,
        learnt: Learnt,
        *,
        untested: str | None,
        decided: bool,
        activation_bytes: int,
        free_bytes: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        self.active, self.batched, self.lanes = False, 1, 1
        self._mode, self._learnt, self._untested, self._decided = mode, learnt, untested, decided
        self._activation_bytes, self._free_bytes, self._note = activation_bytes, free_bytes, note
        self._room: bool | None = None

    @property
    def can_stop(self) -> bool:
        """True if the current call may be repeated without shared visits."""
        return self.active and self._mode is ShareVisits.AUTO

    @property
    def is_required(self) -> bool:
        """True if visits are shared whatever memory that takes."""
        return self._mode is ShareVisits.ON

    def decide(self, conditions: Conditions, options: Mapping[str, Any]) -> bool:
        """Return whether the conditions of a call, which are all computed, share visits."""
        self.active = False
        if self._mode is ShareVisits.OFF or len(conditions) < 2 or not self._learnt.apart:
            return False
        reason = self._prevented(conditions, options)
        if reason is not None:
            self._note(f"no shared visits, because of {reason}")
        elif self.is_required or self._has_room(len(conditions)):
            self._note("the conditions share each visit")
            self.active = True
        return self.active

    def learn(self, conditions: Conditions, options: Mapping[str, Any], passes: int) -> None:
        """Learn from a call without shared visits whether its conditions were computed one after the other."""
        self.lanes = 1
        if self._mode is ShareVisits.OFF or len(conditions) < 2:
            return
        entries = sum(len(condition or ()) for condition in conditions)
        if passes == entries:
            self._learnt.apart = True
            self.lanes = 1 if self._prevented(conditions, options) else len(conditions)
        elif passes == 1:  # they share its visits anyway
            self.batched = len(conditions)
        elif passes > 1:
            self._note(f"no shared visits, because ComfyUI computes {entries} conditions in {passes} passes")

    def stop(self) -> None:
        """Share no visits from now on."""
        self.active = self._room = self._learnt.shares = False

    def _prevented(self, conditions: Conditions, options: Mapping[str, Any]) -> str | None:
        found = hindrance(conditions, options)
        if found is None and self._mode is ShareVisits.AUTO:
            found = self._untested or untested_patch(options)
            found = found and f'{found} ("on" in share_visits shares them all the same)'
        return found

    def _has_room(self, lanes: int) -> bool:
        if self._room is None and self._decided and self._learnt.chosen:
            self._room = self._learnt.shares
        if self._room is None:
            free, needed = self._free_bytes(), lanes * self._activation_bytes
            self._room = needed <= free
            if not self._room:
                self._note(
                    f"no shared visits, because {lanes} conditions at once may need {format_size(needed)} and "
                    f"{format_size(free)} are free"
                )
        return self._room


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
