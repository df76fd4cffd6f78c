"""Model with two experts. The noise level of a model call selects one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.conds
import torch

from .....plan.programs import TRAIN_TIMESTEPS, expert_at
from ... import versions

HIGH = "high"
LOW = "low"
OF_LOW = "low expert: "
"""Prefix for conditioning that the low-noise expert computes differently."""


class ExpertsJoinError(ValueError):
    """Two MODELs cannot be joined, or a joined one cannot do what a node needs."""


class JoinedModel:
    """Mixin for a high-noise expert's class. It calls the low-noise expert at low noise.

    Attributes:
        boundary: see `split_at_boundary`.
        chosen: expert for the current model call, or None outside a call.
    """

    boundary = 0.0
    chosen: str | None = None

    @staticmethod
    def join(high: Any, low: Any) -> None:
        """Make the model `high` call `low`."""
        # With the same class name, because `LOCKSTEP_MODELS` and messages use it.
        high.__class__ = type(type(high).__name__, (JoinedModel, type(high)), {})
        # Not a submodule: nodes that patch both experts must see the keys and layers of one.
        vars(high)["low_expert"] = (low,)

    @property
    def low(self) -> Any:
        """The low-noise expert."""
        return vars(self)["low_expert"][0]

    def expert(self, sigmas: torch.Tensor) -> str:
        """Return the expert for the noise levels in a call.

        Raises ExpertsJoinError if the levels need both.
        """
        levels: list[float] = sigmas.flatten().tolist()
        # In fp32, like ComfyUI's timesteps: in Python, 1000 x the fp32 number 0.9 is below 900.
        timesteps = (sigmas.flatten().float() * TRAIN_TIMESTEPS).tolist()
        experts = {expert_at(timestep, self.boundary) for timestep in timesteps}
        if len(experts) > 1:
            raise ExpertsJoinError(
                f"a model call has noise levels from {min(levels):.4f} to {max(levels):.4f}, on "
                f"both sides of the boundary {self.boundary:g}: use a sampler with one noise level "
                "per call"
            )
        return experts.pop()

    @contextmanager
    def calling(self, expert: str) -> Iterator[None]:
        """Compute model calls with this expert during the `with` body."""
        before = self.chosen
        self.chosen = expert
        try:
            yield
        finally:
            self.chosen = before

    def apply_model(self, x: torch.Tensor, t: torch.Tensor, *args: Any, **values: Any) -> Any:
        of_low = {key: values.pop(key) for key in list(values) if key.startswith(OF_LOW)}
        # `chosen` is None outside ComfyUI's own calls, when other packs call the model.
        if (self.chosen or self.expert(t)) == HIGH:
            return super().apply_model(x, t, *args, **values)  # type: ignore[misc]
        values |= {key.removeprefix(OF_LOW): value for key, value in of_low.items()}
        versions.copy_run_state(self, self.low)
        return self.low.apply_model(x, t, *args, **values)

    def extra_conds(self, **values: Any) -> dict[str, Any]:
        """Return conditioning for both experts, with one value where they agree."""
        found: dict[str, Any] = super().extra_conds(**values)  # type: ignore[misc]
        low = self.low.extra_conds(**values)
        others = {key: value for key, value in low.items() if not _is_same(value, found.get(key))}
        return found | {f"{OF_LOW}{key}": value for key, value in others.items()}


def models_of(model: Any) -> tuple[Any, ...]:
    """Return both experts of a joined model, or a single model alone."""
    return (model, model.low) if isinstance(model, JoinedModel) else (model,)


def _is_same(value: Any, other: Any) -> bool:
    """Return True for two conditioning values with the same numbers."""
    if type(value) is not type(other):
        return False
    if isinstance(value, comfy.conds.CONDRegular):
        return _is_same(value.cond, other.cond)
    if isinstance(value, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)
