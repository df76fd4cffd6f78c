"""Workers are kept by value: one set at a time, from queue item to queue item."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from wanstream.host.kept_workers import KeptWorkers
from wanstream.plan import WorkersRef
from wanstream.plan.workers_ref import IN_PROCESS

ONE = WorkersRef(count=1, address=IN_PROCESS)

SETUP = """
from wanstream.host.kept_workers import KeptWorkers
from wanstream.plan import WorkersRef
ONE = WorkersRef(count=1, address="in-process")
"""


class FakeDriver:
    """Notes what happens to it."""

    def __init__(self, ref: WorkersRef) -> None:
        self.ref = ref
        self.usable = True
        self.said: list[str] = []

    def rest(self) -> None:
        self.said.append("rest")

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def started() -> list[FakeDriver]:
    return []


@pytest.fixture
def kept(started: list[FakeDriver]) -> KeptWorkers:
    def start(ref: WorkersRef) -> FakeDriver:
        assert all("close" in driver.said for driver in started), "two sets share a device"
        started.append(FakeDriver(ref))
        return started[-1]

    return KeptWorkers(start)


def test_equal_references_find_the_same_workers(kept: KeptWorkers, started: list[FakeDriver]) -> None:
    assert kept.get(ONE) is kept.get(replace(ONE))
    assert len(started) == 1


def test_another_reference_ends_the_former_workers_first(kept: KeptWorkers, started: list[FakeDriver]) -> None:
    first, second = kept.get(ONE), kept.get(replace(ONE, restarts=0))
    assert first is not second
    assert [driver.said for driver in started] == [["close"], []]


def test_workers_that_cannot_be_used_any_more_are_started_anew(kept: KeptWorkers, started: list[FakeDriver]) -> None:
    kept.get(ONE)
    started[0].usable = False
    assert kept.get(ONE) is started[1]


def test_resting_keeps_them_and_closing_does_not(kept: KeptWorkers, started: list[FakeDriver]) -> None:
    kept.rest()
    kept.close()
    kept.get(ONE)
    kept.rest()
    assert kept.get(ONE) is started[0]
    kept.close()
    kept.close()
    assert started[0].said == ["rest", "close"]
    assert kept.get(ONE) is started[1]


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    def start(ref: WorkersRef) -> FakeDriver:
        raise OSError("the port is taken")

    kept = KeptWorkers(start)
    for _ in range(2):
        with pytest.raises(OSError, match="the port is taken"):
            kept.get(ONE)
    kept.close()


def test_they_end_with_the_process() -> None:
    code = f"""{SETUP}
class Driver:
    usable = True
    def close(self): print("closed")
kept = KeptWorkers(lambda ref: Driver())
kept.get(ONE)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "closed\n"


def test_without_ray_the_remedy_is_told_and_one_worker_here_needs_none() -> None:
    """In a Python that finds nothing but this package, as far as Ray goes."""
    code = f"""
import sys
{SETUP}
from dataclasses import replace
from wanstream.host.kept_workers import check_ray
check_ray(ONE)
sys.path[:] = [place for place in sys.path if not place.endswith("-packages")]
try:
    check_ray(replace(ONE, address="local"))
except ValueError as err:
    print(type(err).__name__, err)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("NoRayError Ray is not installed")
    assert 'pip install "ray>=2.48"' in done.stdout


def test_looking_for_ray_does_not_import_it() -> None:
    code = f"{SETUP}\nimport sys, dataclasses\nfrom wanstream.host.kept_workers import check_ray\n" + (
        "check_ray(dataclasses.replace(ONE, address='local'))\nprint('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "False\n" or "NoRayError" in done.stderr
