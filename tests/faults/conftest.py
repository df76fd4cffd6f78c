"""In-memory folder for these tests."""

from wanstream.tests.support.memory_folder import tmp_path

__all__ = ["tmp_path"]
