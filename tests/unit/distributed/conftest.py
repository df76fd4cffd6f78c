"""One thread for these tests."""

from wanstream.tests.support.one_thread import one_thread

__all__ = ["one_thread"]
