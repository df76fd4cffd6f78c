"""One thread for the tests in this folder."""

from wanstream.tests.support.one_thread import one_thread

__all__ = ["one_thread"]
