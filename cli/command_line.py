"""Argument parser that suggests the nearest option for an unknown one, and its results as dataclasses."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

Arguments = TypeVar("Arguments")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest option or command for a mistyped one, also in subcommands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ArgumentParser, but refuse unknown options here: only the subcommand's parser has its options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown, self._option_string_actions)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit with 2."""
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = [name.strip("' ") for name in choice[2].split(",")]
            message += _nearest([choice[1]], known)
        super().error(message)


def values_of(kind: type[Arguments], parsed: argparse.Namespace) -> Arguments:
    """Return a subcommand's dataclass, with each field from the option with that `dest`."""
    values = {field.name: getattr(parsed, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _nearest(unknown: Sequence[str], known: Any) -> str:
    near = [found for name in unknown for found in difflib.get_close_matches(name.split("=")[0], list(known), n=1)]
    return f"; did you mean {', '.join(near)}?" if near else ""
