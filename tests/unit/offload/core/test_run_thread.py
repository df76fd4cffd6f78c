"""Waits between a run's threads: each ends with an event or with the run."""

from __future__ import annotations

import threading

import pytest
import torch

from wanstream.offload.core.threads import RunStopped, RunThread, ThreadSync

WAITS = {
    "issued": lambda progress: progress.await_issued(3),
    "released": lambda progress: progress.await_released(3),
}
NOTES = {
    "issued": lambda progress: progress.note_issued(3),
    "released": lambda progress: progress.note_released(3),
}

CPU = torch.device("cpu")


def waiting(progress: ThreadSync, what: str) -> tuple[threading.Thread, list[str]]:
    ended: list[str] = []

    def wait() -> None:
        try:
            WAITS[what](progress)
        except RunStopped:
            ended.append("stopped")
        else:
            ended.append("there")

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, ended


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("end", ["note", "stop"])
def test_a_wait_ends_by_its_own_number_or_by_the_end_of_the_run(what, end):
    progress = ThreadSync()
    thread, ended = waiting(progress, what)
    for other in (0, 4):
        progress.note_issued(other)
        progress.note_released(other)
    (NOTES[what] if end == "note" else ThreadSync.stop)(progress)
    thread.join(60)
    assert ended == ["there" if end == "note" else "stopped"]


def test_what_was_issued_is_there_when_nothing_more_comes():
    progress = ThreadSync()
    progress.note_issued(2)
    thread, ended = waiting(progress, "issued")
    released, still = waiting(progress, "released")
    progress.end_issuing()
    thread.join(60)
    assert ended == ["stopped"]
    progress.await_issued(2)
    assert still == [], "visits go on"
    progress.note_released(3)
    released.join(60)
    assert still == ["there"]


def test_before_the_run_every_visit_is_over():
    ThreadSync().await_released(-1)


def test_visits_may_be_released_in_any_order():
    progress = ThreadSync()
    progress.note_released(1)
    progress.await_released(1)
    progress.stop()
    with pytest.raises(RunStopped):
        progress.await_released(1)


def test_an_error_is_known_before_others_are_woken_and_raised_again():
    seen: list[BaseException | None] = []

    def work() -> None:
        raise OSError("the disk went away")

    thread = RunThread("wanstream-test", device=CPU, failed=lambda: seen.append(thread.error))
    thread.start(work)
    thread.join()
    assert isinstance(seen[0], OSError)
    with pytest.raises(OSError, match="went away"):
        thread.result()


def test_to_be_stopped_is_no_error():
    def work() -> None:
        raise RunStopped

    def failed() -> None:
        raise AssertionError("this is no failure")

    thread = RunThread("wanstream-test", device=CPU, failed=failed)
    thread.join()  # never started
    thread.start(work)
    thread.join()
    thread.result()
    assert thread.error is None
