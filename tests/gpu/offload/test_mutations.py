"""Every wait, event record and unlock in the device code is needed.

Without it, a scenario fails on the checked device. The others are in `REDUNDANT` with the reason.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import groupby

import pytest

from wanstream.offload.core.threads import ThreadSync
from wanstream.tests.support.accelerator import checked_accelerator
from wanstream.tests.support.offload.device_scenarios import ENGINES, SCENARIOS
from wanstream.tests.support.offload.mutations import Mutation, Mutations

pytestmark = pytest.mark.slow

SEEDS = range(3)
LONGEST_S = 20.0
"""Seconds after which a scenario counts as hung. It takes a tenth of a second."""

TRIED_FIRST = {
    "EngineRun._end_threads: self._thread.join()": "gathered_cut_short raw",
    "EngineRun._end_threads: self._thread.join() #2": "patched_cut_short",
}
"""Scenarios to try first, for calls without which other scenarios take long."""

THREADS = "wanstream-"
"""Name prefix for threads in scenarios and runs."""

# Rounds 0, 1 and 2 are the streams for copies, decodings and gathers.
REDUNDANT = {
    "CudaStreams.begin_run: current.wait_stream(stream) [CudaBackend, round 0]": (
        "at the end of a run the stream of decodings waits for the visits, and so for the copies "
        "that they waited for; a copy that no visit has waited for is on the same stream as the "
        "next copy into that memory, or before it"
    ),
    "CudaStreams.begin_run: current.wait_stream(stream) [GatherCudaBackend, round 0]": "as above",
    "CudaStreams.begin_run: current.wait_stream(stream) [GatherCudaBackend, round 2]": "as above",
    "CudaStreams.begin_run: stream.wait_stream(current) [CudaBackend, round 1]": (
        "each decoding waits for the copy before it, and the stream of copies has waited"
    ),
    **dict.fromkeys(
        (
            f"CudaStreams.end_run: stream.wait_stream(self._runtime.current_stream()) [{each}]"
            for backend, rounds in (("CudaBackend", 2), ("GatherCudaBackend", 3))
            for each in (f"{backend}, round {number}" for number in range(rounds))
        ),
        "one stream that waits is enough, because the next run and `settle` wait for all of them",
    ),
    "CudaStreams.settle: stream.synchronize() [GatherCudaBackend, round 0]": (
        "the stream of gathers waits for every copy of a shard"
    ),
    "EngineRun._fetch: self._sync.await_released(self.program.fetches[number - "
    "GATHERS_AHEAD].needed_by)": (
        "not an order of accesses: it bounds the gathers that the ranks still issue when they stop "
        "together"
    ),
    "GatherCudaBackend.copy_in: gathered.synchronize": (
        "a shard on the device is read once, so no later read waits for its slot"
    ),
    "RamRun.take: self._sync.await_released(self._last_taken.get(slot.index, IMMEDIATE))": (
        "only a CPU needs it, because it decodes from the slot when the visit computes"
    ),
}
"""Calls that no scenario needs, and the reason."""


class Subject:
    """The product with a switch in front of each wait.

    Attributes:
        mutations: the switches, in file order.
        scenarios: for each call, the names of the scenarios that make it.
    """

    def __init__(self, mutations: Mutations) -> None:
        self.mutations = mutations
        self.scenarios: dict[Mutation, list[str]] = {}
        for name in SCENARIOS:
            mutations.reached.clear()
            problem = self._problem(name, SEEDS[0])
            assert problem is None, problem
            if not self.scenarios:  # the modules imported by the first one
                gc.collect()
                gc.freeze()
            for mutation in mutations.reached:
                self.scenarios.setdefault(mutation, []).append(name)
        self._last: list[str] = []
        """Scenarios that found a problem, the latest one last."""

    def problem_without(self, mutation: Mutation) -> str | None:
        """Return the first problem any scenario finds without a call.

        None if none does.
        """
        self.mutations.removed = {mutation}
        # Neighbouring calls are often found missing by the same scenario. Calls made by only a few
        # scenarios have one of their own.
        first = [TRIED_FIRST.get(mutation.site, ""), *reversed(self._last)]
        names = sorted(self.scenarios[mutation], key=lambda name: [*first, name].index(name))
        for seed in SEEDS:
            for name in names:
                problem = self._problem(name, seed)
                if problem is not None:
                    self._last = [*(other for other in self._last if other != name), name]
                    return problem
        return None

    def problem_without_all(self, removed: set[Mutation]) -> str | None:
        """Return the first problem in any scenario that makes one of these calls, or None."""
        self.mutations.removed = removed
        made = {name for mutation in removed for name in self.scenarios[mutation]}
        problems = (self._problem(name, SEEDS[0]) for name in SCENARIOS if name in made)
        return next((problem for problem in problems if problem is not None), None)

    def _problem(self, name: str, seed: int) -> str | None:
        """Run a scenario and return the first problem."""
        found: list[str] = []

        def work() -> None:
            gpu.runtime.enter_thread()
            try:
                SCENARIOS[name](gpu)
            except BaseException as err:  # noqa: BLE001 - any error is a find
                found.append(f"{type(err).__name__}: {err}")

        try:
            with checked_accelerator(seed) as gpu:
                thread = threading.Thread(target=work, name=f"{THREADS}scenario", daemon=True)
                thread.start()
                thread.join(LONGEST_S)
                # Here, while the device exists: work and finalisers in a surviving thread would
                # meet the next one.
                if left := ", ".join(thread.name for thread in _threads()):
                    found.insert(
                        0, "hangs" if thread.is_alive() else f"{left} outlive the scenario"
                    )
                    self._end_threads()
        except AssertionError as err:
            found.append(str(err))
        # The next scenario has another device.
        if ENGINES:
            gc.collect()
        assert not ENGINES, f"an engine outlives {name}"
        return f"{name}: {found[0]}" if found else None

    def _end_threads(self) -> None:
        """End a failed scenario's threads."""
        self.mutations.cancelled = True
        for sync in gc.get_objects():
            if isinstance(sync, ThreadSync):
                sync.stop()
        for thread in _threads():
            thread.join(LONGEST_S)
            assert not thread.is_alive(), f"{thread.name} cannot be ended"
        self.mutations.cancelled = False


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    mutations = Mutations()
    with mutations.installed():
        yield Subject(mutations)


@pytest.mark.parametrize("site", Mutations().sites)
def test_no_call_can_be_removed(subject, site):
    calls = sorted(call for call in subject.scenarios if call.site == site)
    assert calls, "no scenario makes this call"
    tried = [call for call in calls if str(call) not in REDUNDANT]
    missed = [str(call) for call in tried if subject.problem_without(call) is None]
    assert not missed, "no scenario fails without them"


@pytest.mark.parametrize("part", range(3))
def test_calls_that_are_listed_are_redundant(subject, part):
    """Many at once: code that works without all listed calls works without each.

    One round of a loop may be needed without the others, so the rounds are in different parts.
    """
    listed = sorted(call for call in subject.scenarios if str(call) in REDUNDANT)
    rounds = groupby(listed, key=lambda call: (call.site, call.owner))
    removed = {call for _, calls in rounds for call in [*calls][part : part + 1]}
    assert removed
    problem = subject.problem_without_all(removed)
    assert problem is None, f"REDUNDANT has calls without which a scenario fails: {problem}"


def test_the_list_names_calls_that_exist(subject):
    assert set(REDUNDANT) <= {str(call) for call in subject.scenarios}
