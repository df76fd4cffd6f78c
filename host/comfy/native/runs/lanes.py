"""Conditions in a model call that share every block visit, and reasons against sharing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import comfy.patcher_extension
import torch

from .....schema.text import format_size
from ....native_models import ShareVisits
from ... import versions
from ..network.foreign_code import foreign_layers, foreign_method, name_of
from ..streamed.joined_model import models_of
from .hooks import Learnt

KEY = "wanstream"
"""Key for our wrappers in ComfyUI's wrapper lists."""

Conditions: TypeAlias = Sequence[Sequence[Mapping[str, Any]] | None]
"""Conditions in a model call: positive, negative and more. None marks an uncomputed one."""

_kinds = comfy.patcher_extension.WrappersMP
COUNTING_WRAPPERS = (_kinds.CALC_COND_BATCH, _kinds.APPLY_MODEL, _kinds.DIFFUSION_MODEL)
"""Wrapper kinds inside a model call. One with state from pass to pass expects passes one after
the other."""

PREPARE = comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE
"""Callbacks on each model call. Lockstep would run them once per condition."""

UNSHARED_KEYS = {
    versions.HOOKS: "hooks",
    versions.DEFAULT: "a default condition",
    versions.CONTROL: "a ControlNet",
}
"""Condition keys computed for several conditions at once, with names for a reader."""

NEEDED_SHARE = 0.9
"""Share of the summed estimates that must be free. Between blocks, a condition keeps little more
than a hidden state."""


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One model call by a sampler."""

    model: Any
    conditions: Conditions
    """All conditions."""
    shape: tuple[int, ...]
    """Shape of the noisy latents."""
    options: Mapping[str, Any]
    """ComfyUI's model options."""

    @property
    def computed(self) -> list[int]:
        """Indices of the computed conditions."""
        return [place for place, condition in enumerate(self.conditions) if condition is not None]

    @property
    def entries(self) -> list[int]:
        """Number of entries in each computed condition.

        Each entry is a separate pass unless ComfyUI batches it.
        """
        return [len(condition) for condition in self.conditions if condition is not None]

    def only(self, place: int) -> Conditions:
        """Return the conditions, with None at all other places."""
        return [
            condition if index == place else None for index, condition in enumerate(self.conditions)
        ]

    def pass_bytes(self) -> list[int]:
        """Return ComfyUI's estimate of a pass's activations, in bytes, per condition."""
        return [
            max(
                (versions.estimated_bytes(self.model, self.shape, entry) for entry in condition),
                default=0,
            )
            for condition in self.conditions
            if condition is not None
        ]


def _hindrances(call: ModelCall) -> Iterator[str]:
    """Yield the reasons against shared visits, in words."""
    options = call.options
    wrappers = versions.in_layers(options, versions.WRAPPERS)
    for kind in COUNTING_WRAPPERS:
        for key, functions in wrappers.get(kind, {}).items():
            if key != KEY and functions:
                yield f"the {kind} wrapper {key or name_of(functions[0])}"
    if versions.FUNCTION_WRAPPER in options:
        yield f"the model function wrapper {name_of(options[versions.FUNCTION_WRAPPER])}"
    for name, replacements in versions.in_layers(options, versions.REPLACEMENTS).items():
        if replacements:
            yield f"a replacement of {name} blocks"
    for key, words in UNSHARED_KEYS.items():
        if any(key in entry for condition in call.conditions for entry in condition or ()):
            yield words
    for callback in call.model.current_patcher.get_all_callbacks(PREPARE):
        yield f"the {PREPARE} callback {name_of(callback)}"


def _untested(call: ModelCall) -> str | None:
    """Return the part not tested with shared visits, in words, or None.

    It is the model, or a patch inside its layers that may keep state from block to block.
    """
    name = type(call.model).__name__
    if name not in versions.LOCKSTEP_MODELS:
        return f"the untested model {name}"
    for kind, functions in versions.in_layers(call.options, versions.PATCHES).items():
        if functions:
            return f"the {kind} {name_of(functions[0])}"
    for name, value in versions.in_layers(call.options).items():
        # An object may keep values from one pass for the next, as caches do.
        # A tensor has a `__dict__` too, but keeps nothing.
        if callable(value) or (hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)):
            return f"the {name} {name_of(value)}"
    return None


class VisitSharing:
    """Decides for each model call whether the conditions share visits.

    The first call with several conditions computes them as ComfyUI does, and shows whether they
    run one after the other.

    Args:
        mode: MODEL setting.
        learnt: facts from earlier runs.
        automatic: True for an automatic policy. It also decides whether shared visits save time.
        free_bytes: returns the free device memory.
        note: receives the reasons.

    Attributes:
        active: True if conditions share visits in the current call.
        batched: conditions that ComfyUI computed in one pass.
        lanes: conditions in the last unshared call that could share visits, or 1.
        passes: passes in that call.
        shared_passes: passes the call would have with shared visits.
        pass_bytes: estimated activations for the largest pass, in bytes.
        lanes_bytes: the same for all conditions together.
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
        self.active = False
        self.batched = self.lanes = 1
        self.passes = self.shared_passes = 1
        self.pass_bytes = self.lanes_bytes = 0
        self._mode = mode
        self._learnt = learnt
        self._automatic = automatic
        self._free_bytes = free_bytes
        self._note = note
        self._apart = False
        self._reasons: dict[int, str | None] = {}  # why a number of conditions do not share visits
        # Methods and layers, searched once per run.
        self._foreign: tuple[str | None, str | None] | None = None

    @property
    def can_stop(self) -> bool:
        """True if the current call may be repeated without shared visits."""
        return self.active and self._mode is ShareVisits.AUTO

    @property
    def is_required(self) -> bool:
        """True if visits are shared no matter how much memory they need."""
        return self._mode is ShareVisits.ON

    @property
    def key(self) -> Hashable:
        """Key for the remembered choice, for calls like the last unshared one."""
        return self._mode, self.lanes

    def decide(self, call: ModelCall) -> bool:
        """Return True if the conditions in a call share visits."""
        self.active = False
        lanes = len(call.computed)
        if self._mode is ShareVisits.OFF or lanes < 2 or not self._apart:
            return False
        reason = self._prevented(call)
        if reason is None and not self.is_required:
            reason = self._not_worth_it(call, lanes)
        if reason is not None:
            self._note(f"no shared visits, because of {reason}")
            return False
        self._note("the conditions share each visit")
        self.active = True
        return True

    def learn(self, call: ModelCall, passes: int) -> None:
        """Learn from a call without shared visits."""
        sizes = call.pass_bytes()
        entries = sum(call.entries)
        lanes = len(call.computed)
        self.lanes = 1
        self.passes = passes
        self.pass_bytes = max(sizes, default=0)
        if lanes < 2:
            return
        if passes == entries:
            self._apart = True
        elif passes == 1:  # they share visits anyway
            self.batched = lanes
        elif passes > 1 and self._mode is not ShareVisits.OFF:
            self._note(
                f"no shared visits, because ComfyUI computes {entries} conditions in {passes} "
                "passes"
            )
        if self._apart and self._mode is not ShareVisits.OFF and self._prevented(call) is None:
            self.lanes = lanes
            self.shared_passes = max(call.entries)
            self.lanes_bytes = sum(sizes)

    def stop(self) -> None:
        """Stop sharing visits, because a call with shared visits ran out of memory."""
        self.active = False
        self._learnt.out_of_memory = True
        self._reasons.clear()

    def _prevented(self, call: ModelCall) -> str | None:
        if self._foreign is None:
            models = models_of(call.model)
            methods = filter(None, map(foreign_method, models))
            layers = (found for each in models for found in foreign_layers(each.diffusion_model))
            self._foreign = next(methods, None), next(layers, None)
        method, layer = self._foreign
        found = next(_hindrances(call), method)
        if found is None and self._mode is ShareVisits.AUTO:
            found = _untested(call) or layer
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
            return (
                "the time: more blocks in the memory that the conditions need are predicted to "
                "save as much"
            )
        free = self._free_bytes()
        needed = sum(call.pass_bytes())
        if NEEDED_SHARE * needed <= free:
            return None
        return (
            f"the memory: {lanes} conditions at once may need {format_size(needed)}, "
            f"{format_size(free)} are free"
        )
