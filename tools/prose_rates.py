"""Rates of words that make prose heavy, in docstrings, comments and pages.

    python -m wanstream.tools.prose_rates [--since COMMIT]

Rates are per 1,000 words, the last one is comments per 1,000 lines of Python files. With `--since`,
only lines added after a commit are counted. The exit status is 1 if a rate is above the limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMITS: Mapping[str, float] = {
    "that": 10,
    "of": 25,
    "its": 3,
    ";": 4,
    "those": 0.5,
    "which": 2.5,
}
"""Most per 1,000 words: about twice the rates in httpx, torchtitan and diffusers/hooks."""
SHORT = 2000
"""Number of words below which a rate is chance."""

ROOT = Path(__file__).parents[1]
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
FENCED = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
TESTS = "tests"


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Lines of prose in one file, by line number."""

    lines: Mapping[int, str]
    comments: int = 0
    code_lines: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates for one kind of text."""

    words: int
    per_thousand: Mapping[str, float]
    comments_per_thousand_lines: float

    @property
    def over(self) -> Mapping[str, float]:
        """Rates above their limits, in a long enough text."""
        return {
            word: rate
            for word, rate in self.per_thousand.items()
            if self.words >= SHORT and rate > LIMITS[word]
        }


def python_prose(source: str) -> Prose:
    """Return docstrings, attribute docstrings and comments."""
    lines: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                lines |= dict(enumerate(_without_code(text).split("\n"), node.lineno))
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Marks for linters and type checkers are not prose.
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
            lines[token.start[0]] = _without_code(token.string.partition("# noqa")[0].lstrip("# "))
            comments += 1
    return Prose(lines=lines, comments=comments, code_lines=source.count("\n"))


def page_prose(page: str) -> Prose:
    """Return a page without code."""
    return Prose(lines=dict(enumerate(_without_code(page).split("\n"), 1)))


def _without_code(text: str) -> str:
    """Return a text with empty lines in place of code, so that lines keep their numbers."""
    return FENCED.sub(lambda code: "\n" * code.group().count("\n"), text)


def rates(texts: Iterator[Prose]) -> Rates:
    """Return the rates for all texts together."""
    counts: Counter[str] = Counter()
    words = comments = code_lines = 0
    for prose in texts:
        text = "\n".join(prose.lines.values())
        found = WORD.findall(text.lower())
        words += len(found)
        counts.update(word for word in found if word in LIMITS)
        counts[";"] += text.count(";")
        comments += prose.comments
        code_lines += prose.code_lines
    return Rates(
        words=words,
        per_thousand={word: 1000 * counts[word] / max(words, 1) for word in LIMITS},
        comments_per_thousand_lines=1000 * comments / max(code_lines, 1),
    )


def added_lines(commit: str) -> Mapping[str, frozenset[int]]:
    """Return line numbers added since a commit, by file."""
    # Without context, a hunk's new lines are exactly the added ones.
    command = ["git", "-C", str(ROOT), "diff", "--unified=0", "--no-color", commit, "--"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    added: dict[str, set[int]] = {}
    name = ""
    for line in shown.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(hunk[1])
            # A hunk of one line has no count. 0 means that lines were only removed.
            count = int(hunk[2] or 1)
            added.setdefault(name, set()).update(range(first, first + count))
    return {name: frozenset(numbers) for name, numbers in added.items()}


def texts(kind: str, added: Mapping[str, frozenset[int]] | None = None) -> Iterator[Prose]:
    """Yield the prose of `code`, `tests` or `pages`."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.md" if kind == "pages" else "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if kind != "pages" and (kind == TESTS) != name.startswith(f"{TESTS}/"):
            continue
        if not path.exists() or (added is not None and name not in added):
            continue
        text = path.read_text(encoding="utf-8")
        prose = page_prose(text) if kind == "pages" else python_prose(text)
        if added is not None:
            lines = {number: line for number, line in prose.lines.items() if number in added[name]}
            prose = Prose(lines=lines)
        yield prose


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--since", metavar="COMMIT", help="count what was added after it")
    since = parser.parse_args().since
    added = added_lines(since) if since else None
    heads = "".join(f"{word:>7}" for word in LIMITS)
    print(f"{'':7}{'words':>8}{heads}  comments")
    print(f"{'limit':7}{'':8}{''.join(f'{limit:>7}' for limit in LIMITS.values())}")
    failed = False
    for kind in ("code", TESTS, "pages"):
        found = rates(texts(kind, added))
        cells = "".join(f"{rate:>7.1f}" for rate in found.per_thousand.values())
        print(f"{kind:7}{found.words:>8}{cells}{found.comments_per_thousand_lines:>10.1f}")
        failed |= bool(found.over)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
