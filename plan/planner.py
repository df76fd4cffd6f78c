"""Planner: chooses the offload policy of a run by compiling and simulating the candidates that fit into memory.

The alternatives to a run, for comparison, change the result or the number of videos: weights stored in fp8, or stored
and multiplied in int8, and several videos in one pass. `plan_offload` never chooses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from ..schema import OffloadPolicy, plan_residency
from .candidates import Fit, fitting_policies, is_usual, lower_bound_s, with_ram_blocks
from .machine import Machine
from .memory import DoesNotFitError, memory_budget, memory_needs
from .offload_job import Budgets, OffloadJob
from .predict import Prediction, compile_programs, predict, visit_seconds
from .transfer_program import TransferProgram


def plan_reason(job: OffloadJob, machine: Machine, chosen: Prediction) -> str:
    """Explain the choice: `32 of 40 blocks stream: 13.1 GB/s needed, the bus delivers 24.6; ...; multiplied in bf16`.

    The last part is that of `describe_precision`.
    """
    parts = [_streaming(job, machine, chosen.policy), _reading(machine, chosen)]
    if chosen.policy.chunk_tokens is not None:
        parts.append(f"{chosen.policy.chunk_tokens} of {job.tokens} tokens at once, to fit into memory")
    wall_s = chosen.timeline.wall_s
    parts.append(f"{100 * chosen.timeline.stall_s / wall_s:.1f} % stall predicted")
    if len(set(job.experts_of_steps)) > 1:
        parts.append(f"switch +{chosen.switch_s:.1f} s")
    parts.append(describe_precision(job, machine))
    return "; ".join(parts)


def describe_precision(job: OffloadJob, machine: Machine) -> str:
    """Describe the assumed arithmetic: `multiplied in int8 at 3.0 x the rate of bf16, linear layers only`."""
    usual = _short(job.compute_dtype)
    if not job.linear_format:
        return f"multiplied in {usual}"
    if job.linear_format not in machine.linear_speedups:
        return f"multiplied in {job.linear_format} at the rate of {usual}, because its own is not known"
    speedup = machine.linear_speedup(job.linear_format)
    return f"multiplied in {job.linear_format} at {speedup:.1f} x the rate of {usual}, linear layers only"


def _short(dtype: str) -> str:
    """Shorten torch's name of a dtype: bfloat16 becomes bf16, and float32 fp32."""
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def describe_policy(policy: OffloadPolicy, blocks: int) -> str:
    """Describe a policy on the device: `30 of 40 stream, 2 ahead`."""
    if policy.kind == "resident":
        return "both experts resident"
    streamed = blocks if policy.kind == "layerwise" else policy.blocks_to_swap
    return f"{streamed} of {blocks} stream, {policy.prefetch_blocks} ahead" if streamed else "one expert resident"


def describe_ram(policy: OffloadPolicy) -> str:
    """Describe the source of streamed blocks: `file`, `12 in RAM` or `all in RAM`."""
    if policy.source == "file":
        return "file"
    if policy.ram_blocks is None:
        return "all in RAM"
    return f"{policy.ram_blocks} in RAM"


def _streaming(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> str:
    if policy.kind == "resident":
        return "both experts are resident on the device"
    residency, _ = plan_residency(policy, job.block_counts)
    blocks = job.expert.blocks
    needed, rate = 0.0, machine.h2d_bytes_per_s
    for expert in set(job.experts_of_steps):
        streamed = blocks - len(residency.residents[expert])
        needed = max(
            needed, streamed * job.stored_bytes / (blocks * visit_seconds(job, machine, expert, policy.chunk_tokens))
        )
    if not needed:
        return f"all {blocks} blocks of the running expert are resident on the device"
    text = f"{streamed} of {blocks} blocks stream"
    return text if rate is None else f"{text}: {needed / 1e9:.1f} GB/s needed, the bus delivers {rate / 1e9:.1f}"


def _reading(machine: Machine, chosen: Prediction) -> str:
    """Compare the disk rate that steady steps need with that of the machine."""
    steady = [step for before, step in pairwise(chosen.timeline.steps) if before.expert == step.expert]
    # A GPU decodes in parallel with compute; on a CPU decoding adds time in which the disk can read.
    decodes_between = machine.computes_on == "cpu"
    needed = max((s.read_bytes / (s.compute_s + (s.decode_s if decodes_between else 0)) for s in steady), default=0.0)
    if not needed:
        return "each block is read from its file once"
    return f"{needed / 1e9:.1f} GB/s needed from files, the disk delivers {machine.disk_bytes_per_s / 1e9:.1f}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Policy that fits into memory, with its predicted time and memory."""

    policy: OffloadPolicy
    total_s: float
    """Seconds of the run, rounded to the millisecond."""
    stall_s: float
    switch_s: float
    """Extra stall of the steps after a change of expert, compared with steady steps, in seconds."""
    device_bytes: int
    host_bytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key, the best first: time, then device memory, then RAM."""
        return (self.total_s, self.device_bytes, self.host_bytes)


@dataclass(frozen=True, kw_only=True)
class OffloadPlan(Prediction):
    """Prediction of the chosen policy, and the candidates that it was chosen from."""

    device_bytes: int
    host_bytes: int
    candidates: tuple[Candidate, ...]
    """Every simulated policy, the best first. Policies whose lower bound is worse than the best are not simulated."""
    misfits: tuple[Fit, ...]
    """Usual policies that do not fit into memory."""
    reason: str
    """Explanation of the choice, with numbers."""


def plan_offload(job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPlan:
    """Return the policy with the shortest predicted time of `job` on `machine` within `budgets`.

    Candidates are those of `fitting_policies`, and the best of them with fewer RAM-resident blocks. Others with fewer
    would multiply the simulations; they may be faster by some thousandths. Of policies that are equal to the
    millisecond it is the one with the least device memory, then with the least RAM.
    Raises DoesNotFitError if no policy fits into memory.
    """
    fitting, misfits = fitting_policies(job, machine, memory_budget(machine, budgets))
    if not fitting:
        raise DoesNotFitError(_nothing_fits(misfits, machine, budgets))
    search = _Search(job, machine)
    for fit in fitting:
        if is_usual(fit.policy, job):
            search.simulate(fit.policy)
    # Best-first search: once a lower bound is not better than the best candidate, no later policy can be.
    for bound, fit in sorted(((search.lower_bound(fit), fit) for fit in fitting), key=lambda pair: pair[0]):
        if bound >= search.best.rank:
            break
        search.simulate(fit.policy)
    search.reduce_ram_blocks()
    candidates = tuple(sorted(search.candidates.values(), key=lambda candidate: candidate.rank))
    chosen = search.predictions[candidates[0].policy]
    return OffloadPlan(
        policy=chosen.policy,
        timeline=chosen.timeline,
        device_bytes=candidates[0].device_bytes,
        host_bytes=candidates[0].host_bytes,
        candidates=candidates,
        misfits=tuple(misfits),
        reason=plan_reason(job, machine, chosen),
    )


class _Search:
    """Candidates that were simulated so far."""

    def __init__(self, job: OffloadJob, machine: Machine) -> None:
        self._job = job
        self._machine = machine
        self.candidates: dict[OffloadPolicy, Candidate] = {}
        self.predictions: dict[OffloadPolicy, Prediction] = {}
        self._programs: dict[OffloadPolicy, TransferProgram] = {}

    @property
    def best(self) -> Candidate:
        """Best candidate so far; there must be at least one."""
        return min(self.candidates.values(), key=lambda candidate: candidate.rank)

    def lower_bound(self, fit: Fit) -> tuple[float, int, int]:
        """Return a lower bound of the policy's rank."""
        # Rounded like totals, after subtracting a tolerance: summing in another order must not exclude a policy.
        bound_s = round(lower_bound_s(self._job, self._machine, fit.policy) - 1e-6, 3)
        return (bound_s, fit.needs.device_bytes, fit.needs.host_bytes)

    def reduce_ram_blocks(self) -> None:
        """Search for the fewest RAM-resident blocks with which the best policy is equally fast."""
        best = self.best
        if best.policy.source == "file":
            return
        # The most blocks that fit need not be the fastest: one fewer may spread the reads better over a pass.
        while (ram_blocks := best.policy.ram_blocks or 0) > 1:
            fewer = self.simulate(with_ram_blocks(best.policy, ram_blocks - 1))
            if fewer.total_s >= best.total_s:
                break
            best = fewer
        distinct = sum(self._job.block_counts.values())
        enough = distinct if best.policy.ram_blocks is None else best.policy.ram_blocks
        too_few = 0
        while enough - too_few > 1:
            ram_blocks = (enough + too_few) // 2
            if self.simulate(with_ram_blocks(best.policy, ram_blocks)).total_s <= best.total_s:
                enough = ram_blocks
            else:
                too_few = ram_blocks

    def simulate(self, policy: OffloadPolicy) -> Candidate:
        """Return the candidate of this policy, and add it if it is new."""
        if policy not in self.candidates:
            # The device program does not depend on RAM or chunks: compile it once for all policies that share it.
            on_device = replace(policy, source="file", ram_blocks=None, chunk_tokens=None)
            programs = compile_programs(self._job, self._machine, policy, device=self._programs.get(on_device))
            self._programs[on_device] = programs.device
            prediction = predict(self._job, self._machine, policy, programs=programs)
            needs = memory_needs(self._job, self._machine, policy)
            self.predictions[policy] = prediction
            self.candidates[policy] = Candidate(
                policy=policy,
                total_s=prediction.total_s,
                stall_s=prediction.timeline.stall_s,
                switch_s=prediction.switch_s,
                device_bytes=needs.device_bytes,
                host_bytes=needs.host_bytes,
            )
        return self.candidates[policy]


def _nothing_fits(misfits: list[Fit], machine: Machine, budgets: Budgets) -> str:
    """Format the error for a run that does not fit: the shortage of the smallest policy, and a remedy."""
    least = min(misfits, key=lambda misfit: (misfit.needs.device_bytes, misfit.needs.host_bytes))
    has_budget = budgets.vram_bytes is not None or budgets.ram_bytes is not None
    remedy = "give more, or make" if has_budget else "make"
    return f"{machine.name}: {least.shortage}; {remedy} the video smaller or shorter"


VIDEOS_AT_ONCE = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Plan of one alternative, or the reason for which it does not fit."""

    words: str
    """Description of the alternative."""
    videos: int
    """Number of videos of the run."""
    plan: OffloadPlan | None
    """None if the alternative does not fit into memory."""
    why_not: str = ""
    """Error message if the alternative does not fit."""

    @property
    def video_s(self) -> float:
        """Seconds per video; infinite if the alternative does not fit."""
        return float("inf") if self.plan is None else self.plan.total_s / self.videos


def plan_alternatives(job: OffloadJob, machine: Machine, budgets: Budgets) -> tuple[Alternative, ...]:
    """Plan `job` and its alternatives with `plan_offload`; return them sorted by seconds per video.

    The order of equal ones is kept, and `job` itself is the first.
    """
    choices = []
    for words, videos, other in _variants(job):
        try:
            choices.append(Alternative(words=words, videos=videos, plan=plan_offload(other, machine, budgets)))
        except DoesNotFitError as err:
            choices.append(Alternative(words=words, videos=videos, plan=None, why_not=str(err)))
    return tuple(sorted(choices, key=lambda choice: round(choice.video_s, 3)))


def in_fp8(job: OffloadJob) -> OffloadJob:
    """Return `job` with weights that are quantised to fp8 after reading: 1 byte per weight in RAM and on the bus.

    The row scales, less than a thousandth of it, are not counted.
    """
    return replace(job, stored_bytes=job.stored_bytes // job.value_bytes, quantised_to="fp8")


def in_int8(job: OffloadJob) -> OffloadJob:
    """Return `job` with weights that are quantised to int8 ConvRot after reading, and multiplied as they are.

    RAM, bus and buffers have 1 byte per weight, and a scale for each row.
    """
    nbytes = job.expert.int8_bytes()
    int8 = replace(job, stored_bytes=nbytes, computed_bytes=nbytes, linear_format="int8")
    return replace(int8, quantised_to="int8 ConvRot")


def in_compute_dtype(job: OffloadJob) -> OffloadJob:
    """Return `job` with weights that are decoded on arrival, and multiplied in its compute dtype."""
    computed = job.expert.streamed_bytes(bytes_per_weight=job.value_bytes)
    return replace(job, computed_bytes=computed, linear_format="", patch_bytes=0)


def videos_at_once(job: OffloadJob, videos: int) -> OffloadJob:
    """Return `job` with the lanes of that many videos in one pass over the weights."""
    return replace(job, lanes={expert: videos * lanes for expert, lanes in job.lanes.items()})


def _variants(job: OffloadJob) -> Iterator[tuple[str, int, OffloadJob]]:
    """Yield (description, videos, job) of each alternative."""
    kinds = [("as requested", job)]
    if job.linear_format:
        kinds.append((f"decoded, multiplied in {_short(job.compute_dtype)}", in_compute_dtype(job)))
    elif not job.decodes:
        kinds.append(('storage "fp8"', in_fp8(job)))
        kinds.append(('storage "int8 ConvRot", multiplied in int8', in_int8(job)))
    for words, kind in kinds:
        yield words, 1, kind
        for videos in VIDEOS_AT_ONCE:
            yield f"{words}, {videos} videos in one pass", videos, videos_at_once(kind, videos)
