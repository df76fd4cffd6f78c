"""Run shape for Wan experts, and costs for the planner, from widths, tokens and lanes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan import BlockCosts, Machine, RunCosts, StepCosts
from ..schema import Mesh
from .expert import ExpertShape, KernelNeeds

CHUNKS = (32768, 16384, 8192, 4096, 2048)
"""Values for `OffloadPolicy.chunk_tokens`, in descending order. Each takes less memory and more
time."""
CHUNK_S = 500e-6
"""Seconds added to a block by each further chunk: kernel launches, and reading 0.28 GB of weights
at about 1 TB/s."""


def chunks_below(tokens: int) -> tuple[int, ...]:
    """Return the values for `chunk_tokens` that split a lane of `tokens`."""
    return tuple(chunk for chunk in CHUNKS if chunk < tokens)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step: the expert, and the lanes if they are fewer than in the expert's other steps."""

    expert: str
    samples: int | None = None
    """Lanes per CFG side. None: as many as the run has."""
    sides: int | None = None
    """CFG sides. None: as many as the expert has."""
    patch: int = 0
    """See `BlockKey.patch`."""
    is_skipped: bool = False
    """True if a cache is known to skip the step."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """Run shape for an expert pair with equal widths.

    Raises ValueError for a run without steps, tokens or lanes, and for a step with an unknown
    expert.
    """

    expert: ExpertShape
    blocks: BlockCosts
    steps: tuple[StepShape, ...]
    video_tokens: int
    """Tokens in a lane's video alone."""
    extra_tokens: tuple[int, ...] = ()
    """Reference tokens in a lane, per CFG side, in lane order. (): none."""
    samples: int = 1
    """Lanes per CFG side: samples, times the context windows in a step."""
    sides: Mapping[str, int]
    """CFG sides per expert in the pair, including an expert without steps.

    An expert with fewer sides than others has the first ones. The planner counts these sides in
    each step, and predictions for a chosen policy count the sides in `steps`.
    """
    workers: Mesh = field(default_factory=Mesh)
    """The ring and Ulysses workers share the tokens in every lane. All token counts here are one
    worker's share."""
    value_bytes: int = 2
    """Bytes per activation value."""
    compute_dtype: str = "bfloat16"
    """Compute dtype name, for a reader."""
    kernels: KernelNeeds = field(default_factory=KernelNeeds)
    cached_states: int = 0
    """Tensors as large as a hidden state that a cache keeps per lane."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("the run has no steps; there is nothing to plan")
        if unknown := sorted({step.expert for step in self.steps} - set(self.sides)):
            raise ValueError(
                f"no lanes for the {unknown[0]!r} expert: lanes names {sorted(self.sides)}"
            )
        for name in ("video_tokens", "value_bytes", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        if min(self.extra_tokens, default=0) < 0:
            raise ValueError(f"extra_tokens are {self.extra_tokens}: give 0 or more")
        if min(self.sides.values()) < 1:
            raise ValueError(f"lanes are {self.lanes}, each must be 1 or more")

    @property
    def tokens(self) -> int:
        """Tokens in the longest lane."""
        return self.video_tokens + max(self.extra_tokens, default=0)

    @property
    def tokens_of_sides(self) -> tuple[int, ...]:
        """Tokens in a lane, per CFG side. One number if they are equal."""
        return tuple(
            dict.fromkeys(self.video_tokens + extra for extra in self.extra_tokens or (0,))
        )

    @property
    def lanes(self) -> dict[str, int]:
        """Lane count per expert."""
        return {expert: self.samples * sides for expert, sides in self.sides.items()}

    @property
    def experts_of_steps(self) -> tuple[str, ...]:
        """Expert in each step."""
        return tuple(step.expert for step in self.steps)

    @property
    def chunks(self) -> tuple[int, ...]:
        """See `plan.RunModel`."""
        return chunks_below(self.tokens)

    def lane_tokens(self, expert: str) -> tuple[int, ...]:
        """Return the tokens in an expert's lanes, in lane order."""
        return self._lane_tokens(StepShape(expert=expert))

    def lane_tokens_of_step(self, number: int) -> tuple[int, ...]:
        """Return the tokens per lane in a step, given as an index into `steps`."""
        return self._lane_tokens(self.steps[number])

    def _lane_tokens(self, step: StepShape) -> tuple[int, ...]:
        sides = step.sides or self.sides[step.expert]
        samples = step.samples or self.samples
        extras = self.extra_tokens[:sides] or (0,) * sides
        # Lane order: all samples with the first CFG side, then all samples with the next.
        return tuple(self.video_tokens + extra for extra in extras for _ in range(samples))

    def of_steps(self, steps: Sequence[int]) -> RunShape:
        """Return the run with these steps alone, given as indices into `steps`."""
        return replace(self, steps=tuple(self.steps[number] for number in steps))

    def skipping(self, steps: Collection[int]) -> RunShape:
        """Return the run with these steps skipped by a cache, and no others."""
        shapes = [
            replace(step, is_skipped=number in steps) for number, step in enumerate(self.steps)
        ]
        return replace(self, steps=tuple(shapes))

    def costs(self, machine: Machine, chunk_tokens: int | None = None) -> RunCosts:
        """See `plan.RunModel`."""
        visit_s = {
            expert: self._visit_s(machine, self.lane_tokens(expert), chunk_tokens)
            for expert in self.sides
        }
        steps = [
            StepCosts(
                expert=step.expert,
                visit_s=self._visit_s(machine, self._lane_tokens(step), chunk_tokens),
                patch=step.patch,
                is_skipped=step.is_skipped,
            )
            for step in self.steps
        ]
        return RunCosts(
            blocks=self.blocks,
            steps=tuple(steps),
            hardware=self.blocks.hardware(machine, visit_s),
            has_bus=machine.has_bus,
            working_bytes=self.working_bytes(chunk_tokens),
            at_once=f"{chunk_tokens} of {self.tokens} tokens at once",
            arithmetic=self.describe_arithmetic(machine),
        )

    def working_bytes(self, chunk_tokens: int | None) -> int:
        """Return the activation bytes in a step, for the expert with the most tokens."""
        workers = self.workers.ring * self.workers.ulysses
        lane_tokens = max(map(self.lane_tokens, self.sides), key=sum)
        return self.expert.working_bytes(
            # Tokens here are one worker's share, and `ExpertShape.working_bytes` takes whole lanes.
            [tokens * workers for tokens in lane_tokens],
            value_bytes=self.value_bytes,
            chunk_tokens=chunk_tokens,
            workers=self.workers,
            cached_states=self.cached_states,
            kernels=self.kernels,
        )

    def _visit_s(
        self, machine: Machine, lane_tokens: Sequence[int], chunk_tokens: int | None
    ) -> float:
        """Return the seconds per block for lanes with these token counts."""
        seconds = self._equivalent_flops(machine, lane_tokens) / machine.flops_per_s
        if chunk_tokens is not None:
            # Every chunk but the first reads the feed-forward weights from device memory again.
            seconds += sum(math.ceil(tokens / chunk_tokens) - 1 for tokens in lane_tokens) * CHUNK_S
        return seconds

    def _equivalent_flops(self, machine: Machine, lane_tokens: Sequence[int]) -> float:
        """Return the compute dtype operations that take as long as a block for these lanes.

        Linear layers in another format count as fewer. Attention counts in full.
        """
        speedup = machine.block.linear_speedup(self.kernels.linear_format)
        linear = sum(map(self.expert.linear_flops, lane_tokens))
        return linear / speedup + sum(map(self.expert.attention_flops, lane_tokens))

    def limit_s(self, machine: Machine, number: int) -> float | None:
        """Return the seconds for products and attention alone in step `number` (from 0).

        None if this was not measured, or not in the linear layers' format.
        """
        rates = machine.block
        products = rates.product_flops_per_s.get(self.kernels.linear_format)
        if products is None or rates.attention_flops_per_s is None:
            return None
        lane_tokens = self.lane_tokens_of_step(number)
        linear = sum(map(self.expert.linear_flops, lane_tokens))
        attention = sum(map(self.expert.attention_flops, lane_tokens))
        return self.blocks.blocks * (linear / products + attention / rates.attention_flops_per_s)

    def calibrated(self, machine: Machine, visit_s: float, chunk_tokens: int | None) -> Machine:
        """Return `machine` with the compute rate at which a first-step visit takes `visit_s`.

        If the linear layers' format has no known speed-up, one is set. Otherwise `flops_per_s` is
        corrected.
        """
        lane_tokens = self.lane_tokens_of_step(0)
        added_s = self._visit_s(machine, lane_tokens, chunk_tokens) - self._visit_s(
            machine, lane_tokens, None
        )
        # The chunk cost is an estimate. It must not explain more than half of the measured time.
        computed_s = max(visit_s - added_s, visit_s / 2)
        whole = self._equivalent_flops(machine, lane_tokens)
        linear_format = self.kernels.linear_format
        if linear_format and linear_format not in machine.block.linear_speedups:
            # Without a speed-up, equivalent flops are all flops. The known rate gives the flops in
            # the measured time.
            linear = sum(map(self.expert.linear_flops, lane_tokens))
            left = computed_s * machine.flops_per_s - (whole - linear)
            # Otherwise attention alone would take longer than measured, so the compute rate is
            # wrong.
            if left > 0:
                speedups = {**machine.block.linear_speedups, linear_format: linear / left}
                return machine.with_figures(linear_speedups=speedups)
        return replace(machine, flops_per_s=whole / computed_s)

    @property
    def short_dtype(self) -> str:
        """Short compute dtype name: bf16 for bfloat16, fp32 for float32."""
        return self.compute_dtype.replace("bfloat", "bf").replace("float", "fp")

    def describe_arithmetic(self, machine: Machine) -> str:
        """Describe the assumed arithmetic.

        For example, `multiplied in int8 at 3.0 x the rate of bf16, linear layers only`.
        """
        usual = self.short_dtype
        linear_format = self.kernels.linear_format
        if not linear_format:
            return f"multiplied in {usual}"
        if linear_format not in machine.block.linear_speedups:
            return (
                f"multiplied in {linear_format} at the rate of {usual}, because its own is not "
                "known"
            )
        speedup = machine.block.linear_speedup(linear_format)
        return (
            f"multiplied in {linear_format} at {speedup:.1f} x the rate of {usual}, linear layers "
            "only"
        )
