"""Terminal text from servers and files."""

import io
import sys

import pytest

from wanstream import cli
from wanstream.cli.terminal import PlainText, plain_output, printable

RAW = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b1m\x00\x08\x7f\u202e\u2066\ud800 ä 漢\t\n"
PLAIN = "\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b1m\\x00\\x08\\x7f\\u202e\\u2066\\ud800 ä 漢\t\n"


def test_control_characters_are_shown():
    assert printable(RAW) == PLAIN
    stream = io.StringIO()
    plain = PlainText(stream)
    plain.write("\rbar 1\r")
    plain.write("a\rb")
    plain.writelines([RAW])
    assert stream.getvalue() == "\rbar 1\ra\\rb" + PLAIN
    assert not plain.isatty()


def test_everything_that_a_command_prints_is_plain(capsys, monkeypatch):
    with plain_output():
        sys.stdout.write(RAW)
        sys.stderr.write(RAW)
    printed = capsys.readouterr()
    assert printed.out == printed.err == PLAIN
    with pytest.raises(SystemExit):
        cli.main(["batch", "\x1b[2J", "--no-such"])
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    with plain_output():
        print(RAW)  # noqa: T201 (`print` does nothing without a stream)


def test_help_has_no_colors(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["--help"], ["batch", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    assert "x1b" not in capsys.readouterr().out
