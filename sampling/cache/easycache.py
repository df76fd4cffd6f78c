"""EasyCache (arXiv 2507.02860): steps reuse the last output while the predicted change is small.

In neighbouring steps, a model's output changes in proportion to the input. The factor is measured
between the last two computed steps. It predicts a step's change from the input alone, before any
block is visited. No calibration is needed. A sample's lanes are skipped together. A step without
lanes to compute moves no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch

from ...wan import Lane
from ..steps.parallel import ParallelForward
from .base import LaneName, Stage, StepCache, StepLanes, names_of

FEWEST_COMPUTED = 2
"""Number of computed steps needed to measure the factor."""


@dataclass(frozen=True, kw_only=True)
class _Output:
    """A lane in the last computed step: [1, C, T, h, w] with the model's output channels."""

    input: torch.Tensor
    velocity: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """State of a sample before a step."""

    computed: Mapping[LaneName, _Output]
    inputs: Mapping[LaneName, torch.Tensor]
    """Inputs in the previous step, which may have been skipped."""
    changes: torch.Tensor | None
    """L1 changes of outputs and inputs between the last two computed steps, and the last outputs'
    L1 norm."""
    change: float = 0.0
    """Predicted relative output change since the last computed step."""


def computed_steps(steps: StepLanes, retention: float) -> frozenset[int]:
    """Return the steps always computed: the first ones in each stage, and the last one in the run.

    Also the last step before a change of LoRA strengths.
    """
    found = {max(steps)} if steps else set[int]()
    stages = [
        (stage, list(stretch))
        for stage, stretch in groupby(sorted(steps), key=lambda step: steps[step][0])
    ]
    for _, taken in stages:
        # At least two, because the factor is a ratio of changes between two computed steps.
        found.update(taken[: max(FEWEST_COMPUTED, math.ceil(retention * len(taken)))])
    for (stage, taken), (after, _) in pairwise(stages):
        if stage.expert == after.expert:
            found.add(taken[-1])
    return frozenset(found)


class EasySteps(StepCache):
    """EasyCache for a run.

    It keeps only tensors with the size of latents, at most five per lane.
    """

    def __init__(self, threshold: float, always: frozenset[int], split: ParallelForward) -> None:
        self._threshold = threshold
        self._always = always
        self._split = split
        self._stage: Stage | None = None
        self._step: int | None = None
        self._samples: dict[int, _Sample] = {}
        self._before: dict[int, _Sample] = {}
        """Samples before this step, restored for a repeated attempt."""

    def predict(self, step: int, stage: Stage, lanes: Sequence[Lane]) -> Mapping[int, torch.Tensor]:
        """See `StepCache.predict`."""
        if stage != self._stage:
            self._samples = {}
        elif step == self._step:
            self._samples = self._before
        self._stage = stage
        self._step = step
        # A copy, because this step replaces entries.
        self._before = dict(self._samples)
        if step in self._always:
            return {}
        inputs = {sample: dict[LaneName, torch.Tensor]() for sample in _samples(lanes)}
        for name, lane in zip(names_of(lanes), lanes, strict=True):
            inputs[name.sample][name] = lane.latents
        for sample, change in self._changes(inputs).items():
            # NaN fails this comparison, so an unknown change computes the step.
            if change < self._threshold:
                kept = self._samples[sample]
                # Clones, because views would keep the conditions too.
                now = {
                    name: _like(given, kept.inputs[name]).clone()
                    for name, given in inputs[sample].items()
                }
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
            # Clones, because views would keep padding and condition channels in memory.
            output = _Output(input=_like(lane.latents, velocity).clone(), velocity=velocity.clone())
            found[name.sample][name] = output
        for sample, outputs in found.items():
            last = self._samples.get(sample)
            changes = None
            if last is not None and last.computed.keys() == outputs.keys():
                changes = _compare(last, outputs)
            inputs = {name: output.input for name, output in outputs.items()}
            self._samples[sample] = _Sample(computed=outputs, inputs=inputs, changes=changes)

    def _changes(self, inputs: Mapping[int, Mapping[LaneName, torch.Tensor]]) -> dict[int, float]:
        """Return each sample's relative output change since the last computed step.

        NaN if it is unknown.
        """
        sums = {}
        for sample, lanes in inputs.items():
            kept = self._samples.get(sample)
            if kept is not None and kept.changes is not None and kept.inputs.keys() == lanes.keys():
                before = [kept.inputs[name] for name in lanes]
                pairs = zip(lanes.values(), before, strict=True)
                moved = _sum([_distance(_like(now, then), then) for now, then in pairs])
                sums[sample] = torch.cat([kept.changes, moved.view(1)])
        if not sums:
            return dict.fromkeys(inputs, math.nan)
        # One host wait per step.
        rows = dict(zip(sums, torch.stack(list(sums.values())).cpu().tolist(), strict=True))
        # The second number counts the workers in the sum.
        own = [(_relative(*rows[sample]) if sample in rows else math.nan, 1.0) for sample in inputs]
        # The mean over all workers, because last digits differ between devices.
        every = self._split.all_reduce_sums(torch.tensor(own, dtype=torch.float64)).every
        added, workers = every.view(-1, len(own), 2).sum(0).unbind(1)
        earlier = [self._samples[sample].change if sample in rows else 0.0 for sample in inputs]
        # NaN on one worker makes the mean NaN, so all workers compute the step.
        changes = added / workers + torch.tensor(earlier, dtype=torch.float64)
        return dict(zip(inputs, changes.tolist(), strict=True))


def _samples(lanes: Sequence[Lane]) -> list[int]:
    return sorted({name.sample for name in names_of(lanes)})


def _relative(output: float, input: float, norm: float, moved: float) -> float:
    """Return the relative output change for an input that has moved.

    NaN if it is unknown.
    """
    # Relative change = (output change / input change) x new input change / output norm.
    if input > 0 and norm > 0:
        return output / input * moved / norm
    return math.nan


def _compare(last: _Sample, outputs: Mapping[LaneName, _Output]) -> torch.Tensor:
    """Return the L1 changes of outputs and inputs, and the outputs' L1 norm, [3]."""
    pairs = [(last.computed[name], output) for name, output in outputs.items()]
    return torch.stack(
        [
            _sum([_distance(new.velocity, old.velocity) for old, new in pairs]),
            _sum([_distance(new.input, old.input) for old, new in pairs]),
            _sum([_norm(new.velocity) for _, new in pairs]),
        ]
    )


def _moved(last: _Output, latents: torch.Tensor) -> torch.Tensor:
    """Return the last output, moved like its input."""
    now = _like(latents, last.velocity).float()
    # The difference between output and input is kept, in fp32.
    return (now + (last.velocity.float() - last.input.float())).to(last.velocity.dtype)


def _like(latents: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """Return the input channels that the output has too. The rest are conditions."""
    return latents[:, : velocity.shape[1]]


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the L1 norm in fp32, because not every device has float64."""
    return values.float().abs().sum()


def _distance(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return _norm(now.float() - before.float())


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(values)).sum()
