"""One thread for these tests."""

from __future__ import annotations

from wanstream.tests.support.one_thread import one_thread

__all__ = ["one_thread"]
