from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from wanstream.cli.stop_request import StopRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """A shell that starts a program in the background lets it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_two_requests_are_counted_and_the_third_ends_the_process_as_usual() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop, heard = StopRequest(), []
    with stop.listening(lambda: heard.append(stop.at_once)):
        assert not stop.soon
        ctrl_c()
        assert (stop.soon, stop.at_once) == (True, False)
        ctrl_c()
        assert stop.at_once
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert heard == [False, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest().listening(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
