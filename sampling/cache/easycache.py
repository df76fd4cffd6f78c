"""EasyCache (arXiv 2507.02860): steps that reuse the last output while its predicted change stays small.

Near each other, steps change the output of a model in proportion to its input. The factor is measured between the last
two computed steps; with it, the change of a step is predicted from its input alone, before any block is visited. No
calibration is needed. The lanes of a sample are skipped together; a step without lanes to compute moves no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ...wan import Lane
from ..loop.parallel import ParallelForward
from .base import LaneName, StepCache, StepLanes, names_of

FEWEST_COMPUTED = 2
"""Computed steps from which the factor is measured."""


@dataclass(frozen=True, kw_only=True)
class _Output:
    """A lane in the last step that was computed: [1, C, T, h, w] of the model's output channels."""

    input: torch.Tensor
    velocity: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """State of a sample before a step."""

    computed: Mapping[LaneName, _Output]
    inputs: Mapping[LaneName, torch.Tensor]
    """Inputs of the step before, which may have been skipped."""
    changes: torch.Tensor | None
    """L1 changes of outputs and inputs between the last two computed steps, and the L1 norm of the last outputs."""
    change: float = 0.0
    """Predicted relative change of the output since the last computed step."""


def computed_steps(steps: StepLanes, retention: float) -> frozenset[int]:
    """Return the steps that are computed anyway: the first ones of each expert, and the last one of the run."""
    found = {max(steps)} if steps else set[int]()
    for _, stretch in groupby(sorted(steps), key=lambda step: steps[step][0]):
        taken = list(stretch)
        found.update(taken[: max(FEWEST_COMPUTED, math.ceil(retention * len(taken)))])
    return frozenset(found)


class EasySteps(StepCache):
    """EasyCache of a run. It keeps tensors of the size of latents only, five for each lane at most."""

    def __init__(self, threshold: float, always: frozenset[int], split: ParallelForward) -> None:
        self._threshold, self._always, self._split = threshold, always, split
        self._expert: str | None = None
        self._step: int | None = None
        self._samples: dict[int, _Sample] = {}
        self._before: dict[int, _Sample] = {}
        """The samples before this step, to which a repeated attempt returns."""

    def predict(self, step: int, expert: str, lanes: Sequence[Lane]) -> Mapping[int, torch.Tensor]:
        """See `StepCache.predict`."""
        if expert != self._expert:
            self._samples = {}
        elif step == self._step:
            self._samples = self._before
        self._expert, self._step, self._before = expert, step, dict(self._samples)
        if step in self._always:
            return {}
        inputs = {sample: dict[LaneName, torch.Tensor]() for sample in _samples(lanes)}
        for name, lane in zip(names_of(lanes), lanes, strict=True):
            inputs[name.sample][name] = lane.latents
        for sample, change in self._changes(inputs).items():
            if change < self._threshold:  # not if it is NaN
                kept = self._samples[sample]
                now = {name: _like(given, kept.inputs[name]).clone() for name, given in inputs[sample].items()}
                self._samples[sample] = replace(kept, inputs=now, change=change)
            else:
                del inputs[sample]
        return {
            at: _moved(self._samples[name.sample].computed[name], lanes[at].latents)
            for at, name in enumerate(names_of(lanes))
            if name.sample in inputs
        }

    def record(self, lanes: Sequence[Lane], velocities: Sequence[torch.Tensor]) -> None:
        """See `StepCache.record`."""
        found: dict[int, dict[LaneName, _Output]] = {sample: {} for sample in _samples(lanes)}
        for name, lane, velocity in zip(names_of(lanes), lanes, velocities, strict=True):
            output = _Output(input=_like(lane.latents, velocity).clone(), velocity=velocity.clone())
            found[name.sample][name] = output
        for sample, outputs in found.items():
            last = self._samples.get(sample)
            self._samples[sample] = _Sample(
                computed=outputs,
                inputs={name: output.input for name, output in outputs.items()},
                changes=None if last is None or last.computed.keys() != outputs.keys() else _compare(last, outputs),
            )

    def _changes(self, inputs: Mapping[int, Mapping[LaneName, torch.Tensor]]) -> dict[int, float]:
        """Return each sample's relative change of the output since its last computed step; NaN if it is unknown."""
        sums = {}
        for sample, lanes in inputs.items():
            kept = self._samples.get(sample)
            if kept is not None and kept.changes is not None and kept.inputs.keys() == lanes.keys():
                before = kept.inputs
                moved = _sum([_distance(_like(now, before[name]), before[name]) for name, now in lanes.items()])
                sums[sample] = torch.cat([kept.changes, moved.view(1)])
        if not sums:
            return dict.fromkeys(inputs, math.nan)
        # One host wait for a step.
        rows = dict(zip(sums, torch.stack(list(sums.values())).cpu().tolist(), strict=True))
        own = [(_relative(*rows[sample]) if sample in rows else math.nan, 1.0) for sample in inputs]
        # The mean of all workers, because last digits differ on different devices.
        every = self._split.all_reduce_sums(torch.tensor(own, dtype=torch.float64)).every
        added, workers = every.view(-1, len(own), 2).sum(0).unbind(1)
        earlier = [self._samples[sample].change if sample in rows else 0.0 for sample in inputs]
        return dict(zip(inputs, (added / workers + torch.tensor(earlier, dtype=torch.float64)).tolist(), strict=True))


def _samples(lanes: Sequence[Lane]) -> list[int]:
    return sorted({name.sample for name in names_of(lanes)})


def _relative(output: float, input: float, norm: float, moved: float) -> float:
    """Return the relative change of the output for an input that has moved; NaN if it is unknown."""
    return output / input * moved / norm if input > 0 and norm > 0 else math.nan


def _compare(last: _Sample, outputs: Mapping[LaneName, _Output]) -> torch.Tensor:
    """Return the L1 changes of outputs and inputs, and the L1 norm of the outputs, [3]."""
    pairs = [(last.computed[name], output) for name, output in outputs.items()]
    return torch.stack(
        [
            _sum([_distance(new.velocity, old.velocity) for old, new in pairs]),
            _sum([_distance(new.input, old.input) for old, new in pairs]),
            _sum([_distance(new.velocity) for _, new in pairs]),
        ]
    )


def _moved(last: _Output, latents: torch.Tensor) -> torch.Tensor:
    """Return the last output, moved as its input was."""
    now = _like(latents, last.velocity).float()
    return (now + (last.velocity.float() - last.input.float())).to(last.velocity.dtype)


def _like(latents: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """Return the channels of the model's input that its output has too; the rest are conditions."""
    return latents[:, : velocity.shape[1]]


def _distance(now: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Return the L1 norm of `now`, or of its difference from `before`, in fp32: not every device has float64."""
    difference = now.float() if before is None else now.float() - before.float()
    return difference.abs().sum()


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(values)).sum()
