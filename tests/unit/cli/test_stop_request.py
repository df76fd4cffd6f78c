from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from wanstream.batch.running.stop_request import StopRequest
from wanstream.cli.arguments import handle_sigint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """Restore Ctrl-C, which a shell makes background programs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_two_requests_are_counted_and_the_third_ends_the_process_as_usual() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop, heard = StopRequest(), []

    def on_request() -> None:
        stop.count += 1
        heard.append(stop.immediate)

    with handle_sigint(on_request, requests=2):
        assert not stop.requested
        ctrl_c()
        assert (stop.requested, stop.immediate) == (True, False)
        ctrl_c()
        assert stop.immediate
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert heard == [False, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with handle_sigint(lambda: None, requests=1):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
