"""Alternatives for comparison with a planned run: smaller weights, several videos per pass.

They change the result or the number of videos, so the planner never chooses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..plan import Budgets, DoesNotFitError, Machine, OffloadPlan, plan_offload
from ..shapes import BF16_BYTES, RunShape

VIDEOS_AT_ONCE = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Plan for one alternative, or the reason why it does not fit."""

    words: str
    """Description of the alternative."""
    videos: int
    """Number of videos in the run."""
    plan: OffloadPlan | None
    """None if the alternative does not fit into memory."""
    why_not: str = ""
    """Error message if the alternative does not fit."""

    @property
    def video_s(self) -> float:
        """Seconds per video; infinite if the alternative does not fit."""
        return float("inf") if self.plan is None else self.plan.total_s / self.videos


def plan_alternatives(run: RunShape, machine: Machine, budgets: Budgets) -> tuple[Alternative, ...]:
    """Plan `run` and alternatives with `plan_offload`, sorted by seconds per video.

    Equal ones keep their order, and `run` itself is the first.
    """
    choices = []
    for words, videos, other in _variants(run):
        try:
            choices.append(
                Alternative(words=words, videos=videos, plan=plan_offload(other, machine, budgets))
            )
        except DoesNotFitError as err:
            choices.append(Alternative(words=words, videos=videos, plan=None, why_not=str(err)))
    # Rounded, so that differences below a millisecond do not change the order.
    return tuple(sorted(choices, key=lambda choice: round(choice.video_s, 3)))


def in_fp8(run: RunShape) -> RunShape:
    """Return `run` from a bf16 file with weights quantised to fp8 after reading.

    They have 1 byte each in RAM and on the bus. The row scales, less than a thousandth, are not
    counted.
    """
    nbytes = run.blocks.stored_bytes // BF16_BYTES
    # `sizes` has bytes in the former format, and they would be wrong now.
    blocks = replace(
        run.blocks, stored_bytes=nbytes, decoded_bytes=nbytes, quantised_to="fp8", sizes=()
    )
    return replace(run, blocks=blocks)


def in_int8(run: RunShape) -> RunShape:
    """Return `run` with weights quantised to int8 ConvRot after reading and multiplied as they are.

    RAM, bus and buffers have 1 byte per weight, and a scale for each row.
    """
    nbytes = run.expert.int8_bytes()
    blocks = replace(
        run.blocks,
        stored_bytes=nbytes,
        computed_bytes=nbytes,
        decoded_bytes=0,
        quantised_to="int8 ConvRot",
        sizes=(),
    )
    return replace(run, blocks=blocks, kernels=replace(run.kernels, linear_format="int8"))


def in_compute_dtype(run: RunShape) -> RunShape:
    """Return `run` with weights decoded on arrival, and multiplied in the compute dtype."""
    computed = run.expert.streamed_bytes(bytes_per_weight=run.value_bytes)
    decoded = run.blocks.stored_bytes
    blocks = replace(
        run.blocks, computed_bytes=computed, decoded_bytes=decoded, patch_bytes=0, sizes=()
    )
    return replace(run, blocks=blocks, kernels=replace(run.kernels, linear_format=""))


def videos_at_once(run: RunShape, videos: int) -> RunShape:
    """Return `run` with the lanes for this many videos in one pass over the weights."""
    return replace(run, samples=videos * run.samples)


def _variants(run: RunShape) -> Iterator[tuple[str, int, RunShape]]:
    """Yield each alternative as (description, videos, run)."""
    kinds = [("as requested", run)]
    if run.kernels.linear_format:
        kinds.append((f"decoded, multiplied in {run.short_dtype}", in_compute_dtype(run)))
    elif not run.blocks.decodes:
        kinds.append(('storage "fp8"', in_fp8(run)))
        kinds.append(('storage "int8 ConvRot", multiplied in int8', in_int8(run)))
    for words, kind in kinds:
        yield words, 1, kind
        for videos in VIDEOS_AT_ONCE:
            yield f"{words}, {videos} videos in one pass", videos, videos_at_once(kind, videos)
