"""Terminal text without the control characters in names and messages from servers and files."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_CONTROLS = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, text direction marks, and halves of characters."""


def printable(text: str) -> str:
    r"""Return the text with each control character as an escape sequence, such as `\x1b`.

    A terminal would execute it: change the title, clear the screen, or write to the clipboard.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PlainText:
    """A stream for printable text only.

    Progress bars may begin and end a write with a carriage return.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        body = text.strip("\r")
        start = len(text) - len(text.lstrip("\r"))
        self._stream.write(text[:start] + printable(body) + text[start + len(body) :])
        # Escapes make the written text longer, but callers compare the count with their own text.
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # `print` and tqdm use `flush`, `encoding` and `isatty`.
        return getattr(self._stream, name)


def print_note(text: object) -> None:
    """Print a line on stderr: notes, progress and errors, apart from a command's result."""
    print(text, file=sys.stderr, flush=True)


def print_bug(err: Exception) -> None:
    """Print the traceback of an error's cause, unless the cause is a refusal."""
    if not isinstance(err.__cause__, ValueError | OSError):
        traceback.print_exception(err.__cause__)


@contextmanager
def plain_output() -> Iterator[None]:
    """Print only printable text inside the `with`, from anywhere in this process."""
    with ExitStack() as opened:
        # None in a process without the stream. `print` does nothing there.
        if sys.stdout is not None:
            opened.enter_context(redirect_stdout(cast("TextIO", PlainText(sys.stdout))))
        if sys.stderr is not None:
            opened.enter_context(redirect_stderr(cast("TextIO", PlainText(sys.stderr))))
        yield
