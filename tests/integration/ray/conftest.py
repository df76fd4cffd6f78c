"""One thread for the tests in this folder, and a file with a token."""

import pytest

from wanstream.tests.support.one_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture
def token_file(tmp_path):
    """A file with a token, readable only by the user."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("ab" * 32)
    return file
