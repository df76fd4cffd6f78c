"""Conditions of a model call that share every visit of a block, and what prevents it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import comfy.patcher_extension

from ....schema import format_size
from ...api import ShareVisits
from .foreign_code import foreign_layer, foreign_method
from .hooks import Learnt

KEY = "wanstream"
"""Key of our wrappers in ComfyUI's lists of wrappers."""

Conditions: TypeAlias = Sequence[Sequence[Mapping[str, Any]] | None]
"""Conditions of a model call: positive, negative and more; None for one that is not computed."""

_kinds = comfy.patcher_extension.WrappersMP
COUNTING_WRAPPERS = (_kinds.CALC_COND_BATCH, _kinds.APPLY_MODEL, _kinds.DIFFUSION_MODEL)
"""Kinds of wrappers inside a model call. One that keeps state from pass to pass expects them one after the other."""

PREPARE = comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE
"""Callbacks of each model call, which lockstep would run once per condition."""

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

NEEDED_SHARE = 0.9
"""Share of the estimates of all conditions that must be free: between blocks, one keeps little but its hidden state."""


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One call of ComfyUI's model by a sampler."""

    model: Any
    conditions: Conditions
    """All conditions."""
    shape: tuple[int, ...]
    """Shape of the noisy latents."""
    options: Mapping[str, Any]
    """ComfyUI's model options."""

    @property
    def computed(self) -> list[int]:
        """Places of the conditions that are computed."""
        return [place for place, condition in enumerate(self.conditions) if condition is not None]

    @property
    def entries(self) -> list[int]:
        """Number of entries of each computed condition; each one is a pass of its own unless ComfyUI batches it."""
        return [len(condition) for condition in self.conditions if condition is not None]

    def only(self, place: int) -> Conditions:
        """Return the conditions without those at other places."""
        return [condition if index == place else None for index, condition in enumerate(self.conditions)]

    def pass_bytes(self) -> list[int]:
        """Return ComfyUI's estimate of the activations of a pass, in bytes, for each computed condition."""
        return [
            max((self._entry_bytes(entry) for entry in condition), default=0)
            for condition in self.conditions
            if condition is not None
        ]

    def _entry_bytes(self, entry: Mapping[str, Any]) -> int:
        shapes = {name: [value.size()] for name, value in entry.get("model_conds", {}).items()}
        return int(self.model.memory_required(list(self.shape), cond_shapes=shapes))


def hindrance(call: ModelCall) -> str | None:
    """Return what prevents that the conditions share visits, in words; None if they can."""
    return next(_hindrances(call), None)


def _hindrances(call: ModelCall) -> Iterator[str]:
    options = call.options
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
        if any(key in entry for condition in call.conditions for entry in condition or ()):
            yield words
    for callback in call.model.current_patcher.get_all_callbacks(PREPARE):
        yield f"the {PREPARE} callback {_name(callback)}"


def untested(call: ModelCall) -> str | None:
    """Return what was not tested with shared visits, in words; None if everything was.

    It is the model, or a patch inside its layers, which may keep state from block to block.
    """
    name = type(call.model).__name__
    if name not in TESTED_MODELS:
        return f"the untested model {name}"
    transformer: Mapping[str, Any] = call.options.get("transformer_options", {})
    for kind, functions in transformer.get("patches", {}).items():
        if functions:
            return f"the {kind} {_name(functions[0])}"
    for name, value in transformer.items():
        if callable(value):
            return f"the {name} {_name(value)}"
    return None


class VisitSharing:
    """Decisions of the model calls of a run whether their conditions share visits.

    The first call with several conditions computes them as ComfyUI does, and shows whether that is one after the
    other.

    Args:
        mode: the setting of the MODEL.
        learnt: facts from earlier runs.
        automatic: True for an automatic policy, which also decides whether sharing visits saves time.
        free_bytes: returns the free memory of the device.
        note: receives the reasons.

    Attributes:
        active: True if the conditions of the current call share visits.
        batched: conditions that ComfyUI has computed in one pass.
        lanes: conditions of the last call without shared visits that could share them; 1 if they could not.
        passes: passes of that call.
        shared_passes: its passes if the conditions shared visits.
        pass_bytes: estimated activations of its largest pass, in bytes.
        lanes_bytes: those of all its conditions.
    """

    def __init__(
        self,
        mode: ShareVisits,
        learnt: Learnt,
        *,
        automatic: bool,
        free_bytes: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        self.active, self.batched, self.lanes = False, 1, 1
        self.passes, self.shared_passes = 1, 1
        self.pass_bytes = self.lanes_bytes = 0
        self._mode, self._learnt, self._automatic = mode, learnt, automatic
        self._free_bytes, self._note = free_bytes, note
        self._apart = False
        self._reasons: dict[int, str | None] = {}  # why a number of conditions do not share visits
        self._foreign: tuple[str | None, str | None] | None = None  # methods and layers, looked for once per run

    @property
    def can_stop(self) -> bool:
        """True if the current call may be repeated without shared visits."""
        return self.active and self._mode is ShareVisits.AUTO

    @property
    def is_required(self) -> bool:
        """True if visits are shared whatever memory that takes."""
        return self._mode is ShareVisits.ON

    @property
    def key(self) -> Hashable:
        """Key under which the choice for calls like the last one without shared visits is remembered."""
        return self._mode, self.lanes

    def decide(self, call: ModelCall) -> bool:
        """Return whether the conditions of a call share visits."""
        lanes, self.active = len(call.computed), False
        if self._mode is ShareVisits.OFF or lanes < 2 or not self._apart:
            return False
        reason = self._prevented(call) or (None if self.is_required else self._not_worth_it(call, lanes))
        self._note("the conditions share each visit" if reason is None else f"no shared visits, because of {reason}")
        self.active = reason is None
        return self.active

    def learn(self, call: ModelCall, passes: int) -> None:
        """Learn from a call without shared visits."""
        sizes, entries = call.pass_bytes(), sum(call.entries)
        self.lanes, self.passes, self.pass_bytes = 1, passes, max(sizes, default=0)
        lanes = len(call.computed)
        if lanes < 2:
            return
        if passes == entries:
            self._apart = True
        elif passes == 1:  # they share its visits anyway
            self.batched = lanes
        elif passes > 1 and self._mode is not ShareVisits.OFF:
            self._note(f"no shared visits, because ComfyUI computes {entries} conditions in {passes} passes")
        if self._apart and self._mode is not ShareVisits.OFF and self._prevented(call) is None:
            self.lanes, self.shared_passes, self.lanes_bytes = lanes, max(call.entries), sum(sizes)

    def stop(self) -> None:
        """Share no visits from now on, because a call with them was out of memory."""
        self.active, self._learnt.out_of_memory = False, True
        self._reasons.clear()

    def _prevented(self, call: ModelCall) -> str | None:
        if self._foreign is None:
            self._foreign = foreign_method(call.model), foreign_layer(call.model.diffusion_model)
        method, layer = self._foreign
        found = hindrance(call) or method
        if found is None and self._mode is ShareVisits.AUTO:
            found = untested(call) or layer
            found = found and f'{found} ("on" in share_visits shares them all the same)'
        return found

    def _not_worth_it(self, call: ModelCall, lanes: int) -> str | None:
        if lanes not in self._reasons:
            self._reasons[lanes] = self._lacking(call, lanes)
        return self._reasons[lanes]

    def _lacking(self, call: ModelCall, lanes: int) -> str | None:
        if self._learnt.out_of_memory:
            return "a call that was out of memory with them"
        if self._automatic and not self._learnt.shares.get((self._mode, lanes), False):
            return "the time: more blocks in the memory that the conditions need are predicted to save as much"
        free, needed = self._free_bytes(), sum(call.pass_bytes())
        if NEEDED_SHARE * needed <= free:
            return None
        return f"the memory: {lanes} conditions at once may need {format_size(needed)}, {format_size(free)} are free"


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
