"""JSON without guessing: in UTF-8, with unique names and finite numbers only."""

from __future__ import annotations

import codecs
import json
import math
from collections import Counter
from typing import Any

_WIDE = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class JsonTextError(ValueError):
    """Bytes that are not a JSON document. The message contains the place and a remedy."""


class _Object(dict[str, Any]):
    """A parsed object. `twice` is a repeated name."""

    twice: str | None = None


def parse_json(content: bytes) -> object:
    """Return the value of a JSON document in UTF-8, with or without a byte order mark.

    Raises JsonTextError, also for a repeated name in an object, where Python would keep the last
    one, and for NaN and infinity, which do not exist in JSON.
    """
    text = _decoded(content)
    if not text.strip():
        raise JsonTextError("this is not JSON: it is empty")
    try:
        # Without a hook, a dict would keep only the last value of a repeated name.
        value = json.loads(text, object_pairs_hook=_parsed)
    except RecursionError as err:
        raise JsonTextError("this is not JSON that can be read: it is nested too deep") from err
    # Wider than JSONDecodeError: an integer with more than 4,300 digits raises a plain ValueError.
    except ValueError as err:
        raise JsonTextError(f"this is not JSON: {err}") from err
    _check(value)
    return value


def _decoded(content: bytes) -> str:
    # A document's first character is ASCII, so a NUL next to it is half of a wide character.
    if content.startswith(_WIDE) or b"\0" in content[:2]:
        raise JsonTextError("this is not JSON in UTF-8, but UTF-16 or UTF-32: save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = content[: err.start].count(b"\n") + 1
        raise JsonTextError(
            f"this is not JSON in UTF-8 (byte 0x{content[err.start]:02X} in line {line}): save it "
            "as UTF-8"
        ) from err


def _parsed(pairs: list[tuple[str, Any]]) -> _Object:
    parsed = _Object(pairs)
    if len(parsed) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        parsed.twice = next(name for name, count in counts.items() if count > 1)
    return parsed


def _check(value: object) -> None:
    """Raise JsonTextError for the first repeated name or non-finite number."""
    # Not recursive: the parser may accept a deeper value than Python functions can recurse into.
    pending: list[tuple[str, object]] = [("", value)]  # a place is a path like .nodes.3.size
    while pending:
        place, each = pending.pop()
        if isinstance(each, _Object):
            if each.twice is not None:
                twice = f"{place}.{each.twice}"[1:]
                raise JsonTextError(f"'{twice}' is given twice: rename or remove one of them")
            pending += [(f"{place}.{name}", part) for name, part in each.items()]
        elif isinstance(each, list):
            pending += [(f"{place}.{index}", part) for index, part in enumerate(each)]
        # json.loads also returns infinity for 1e999, without a call of `parse_constant`.
        elif isinstance(each, float) and not math.isfinite(each):
            constant = "NaN" if math.isnan(each) else "Infinity"
            raise JsonTextError(
                f"'{place[1:]}': {constant} is not a JSON value: give a finite number"
            )
