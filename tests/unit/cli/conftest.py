"""Fixture: commands that are refused."""

from __future__ import annotations

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import INVALID


@pytest.fixture
def refusal(capsys):
    """`refusal(*command, code=INVALID)` runs a command that prints no result, and returns why."""

    def refusal(*command: str, code: int = INVALID) -> str:
        capsys.readouterr()
        assert main(command) == code
        told = capsys.readouterr()
        assert told.out == ""
        assert "Traceback" not in told.err
        return told.err

    return refusal
