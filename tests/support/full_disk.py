"""Limit on the size of files, in place of a full disk: writes fail in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limit every file of this process inside the `with`. Skip the test on Windows."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
