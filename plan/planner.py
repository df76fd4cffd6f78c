"""Chooses the offload policy of a run: compile and simulate what fits, take the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .candidates import Misfit, device_choices, largest_chunk, least_seconds, ram_choices
from .machine import Machine
from .memory_needs import DoesNotFitError, MemoryNeeds, Room, room_for
from .offload_job import Budgets, OffloadJob
from .plan_reason import plan_reason
from .predict import Prediction, predict
from .residency import OffloadPolicy
from .timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that fits, and what it is predicted to take. `total_s` is told to the millisecond."""

    policy: OffloadPolicy
    total_s: float
    stall_s: float
    switch_s: float
    """Seconds by which the steps after a change of expert wait longer than usual ones."""
    device_bytes: int
    host_bytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smaller, the better: time, then device memory, then RAM."""
        return (self.total_s, self.device_bytes, self.host_bytes)


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The chosen policy with the simulated timeline of the run, and what it was chosen from."""

    policy: OffloadPolicy
    timeline: Timeline
    device_bytes: int
    host_bytes: int
    candidates: tuple[Candidate, ...]
    """Every policy that was simulated, the best first. Policies that cannot be faster than the chosen one, by the bytes
    that they move, are not simulated."""
    misfits: tuple[Misfit, ...]
    """Usual policies for which there is too little memory."""
    reason: str
    """Why this one, in words with numbers."""

    @property
    def total_s(self) -> float:
        return self.candidates[0].total_s


def plan_offload(job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPlan:
    """The policy under which `job` is predicted to end first on `machine`.

    Of equal ones (to the millisecond) the one with the smallest device memory is chosen, then with the least RAM.
    Raises DoesNotFitError when there is too little memory for any.
    """
    room = room_for(machine, budgets)
    fitting, misfits = _fitting(job, machine, room)
    if not fitting:
        raise DoesNotFitError(_nothing_fits(misfits, machine, budgets))
    search = _Search(job, machine)
    for place in _landmarks(fitting, job):
        search.simulate(place)
    for place in sorted(fitting, key=search.hope):
        if search.best is not None and search.hope(place) >= search.best.rank:
            break
        search.simulate(place)
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


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A policy that fits, with its memory."""

    policy: OffloadPolicy
    needs: MemoryNeeds


class _Search:
    """The candidates that were simulated so far, and the best of them."""

    def __init__(self, job: OffloadJob, machine: Machine) -> None:
        self._job = job
        self._machine = machine
        self._hopes: dict[OffloadPolicy, float] = {}
        self.candidates: dict[OffloadPolicy, Candidate] = {}
        self.predictions: dict[OffloadPolicy, Prediction] = {}
        self.best: Candidate | None = None

    def hope(self, place: _Place) -> tuple[float, int, int]:
        """The rank that this policy could have at best."""
        if place.policy not in self._hopes:
            self._hopes[place.policy] = least_seconds(self._job, self._machine, place.policy)
        # Rounded as totals are, a hair below: a sum in another order must not hide a policy.
        least_s = round(self._hopes[place.policy] - 1e-6, 3)
        return (least_s, place.needs.device_bytes, place.needs.host_bytes)

    def simulate(self, place: _Place) -> None:
        """Add this policy to the candidates, if it is not there yet."""
        if place.policy in self.candidates:
            return
        prediction = predict(self._job, self._machine, place.policy)
        candidate = Candidate(
            policy=place.policy,
            total_s=prediction.total_s,
            stall_s=prediction.timeline.stall_s,
            switch_s=prediction.switch_s,
            device_bytes=place.needs.device_bytes,
            host_bytes=place.needs.host_bytes,
        )
        self.candidates[place.policy] = candidate
        self.predictions[place.policy] = prediction
        if self.best is None or candidate.rank < self.best.rank:
            self.best = candidate


def _fitting(job: OffloadJob, machine: Machine, room: Room) -> tuple[list[_Place], list[Misfit]]:
    """Every policy that there is memory for, and of the usual ones those for which there is too little."""
    fitting: list[_Place] = []
    misfits: list[Misfit] = []
    for on_device in device_choices(job.expert.blocks):
        found = largest_chunk(job, machine, on_device, room)
        if isinstance(found, Misfit) and not room.shared:
            # Homes in RAM change nothing on the device.
            misfits.append(found)
            continue
        for policy in ram_choices(on_device, job):
            found = largest_chunk(job, machine, policy, room)
            if isinstance(found, Misfit):
                misfits.append(found)
            else:
                fitting.append(_Place(policy=found[0], needs=found[1]))
    return fitting, [misfit for misfit in misfits if _is_usual(misfit.policy, job)]


def _is_usual(policy: OffloadPolicy, job: OffloadJob) -> bool:
    """Whether people would ask after this policy: a quarter, half, or all of the blocks resident, one ahead."""
    quarter = max(1, job.expert.blocks // 4)
    return policy.prefetch_blocks <= 1 and (policy.kind != "block_swap" or policy.blocks_to_swap % quarter == 0)


def _landmarks(fitting: list[_Place], job: OffloadJob) -> Iterator[_Place]:
    """Usual policies: without RAM, with all of it, and with as many homes as fit, kept or rolling."""
    most: dict[tuple[object, ...], _Place] = {}
    for place in fitting:
        policy = place.policy
        if _is_usual(policy, job):
            partly = policy.ram_blocks is not None
            most[policy.kind, policy.blocks_to_swap, policy.source, partly, policy.ram_rolls] = place
    return iter(most.values())


def _nothing_fits(misfits: list[Misfit], machine: Machine, budgets: Budgets) -> str:
    """What the smallest policy lacks, and what helps."""
    least = min(misfits, key=lambda misfit: (misfit.needs.device_bytes, misfit.needs.host_bytes))
    asked = budgets.vram_bytes is not None or budgets.ram_bytes is not None
    remedy = "give more, or make" if asked else "make"
    return f"{machine.name}: {least.why}; {remedy} the video smaller or shorter"
