"""Folder in memory for batch tests, which sync a journal and files to disk at every row.

These tests end clients and servers, but never the machine, so a sync changes nothing they can see.
On a slow disk they waited for syncs for five sixths of their time.
"""

import tempfile
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "wanstream-test-"


@pytest.fixture
def tmp_path(tmp_path):
    """Replace pytest's folder on Linux. It is removed after the test."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def names_in_shared_memory() -> set[str]:
    """Return names in shared memory, without folders from concurrent tests."""
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if not name.startswith((PREFIX, "sem."))}
