"""Workflow constants as input values: one rule for both hosts.

ComfyUI converts with Python's `bool`, `int` and `float`. "false" is then true, 64.7 is 64, and NaN
is within every range. Such constants are refused here, because the run would silently differ from
the workflow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

_MAX_SHOWN = 60
"""Limit for value characters in a message."""


class InputValueError(ValueError):
    """A constant is not a valid value for the input type. The message says what to write."""


class RefusedValue(str):
    """A constant, as JSON. Conversion to a number, a boolean or a text fails with a reason."""

    # The class is a text, because ComfyUI writes the value into the JSON answer.
    reason: str

    def _refuse(self) -> NoReturn:
        raise InputValueError(self.reason)

    __bool__ = __int__ = __float__ = __str__ = _refuse

    def __format__(self, form: str) -> str:
        # ComfyUI's message contains the value: without this, formatting would call `__str__`.
        return str.__str__(self)


def plain_value(io_type: str, value: object) -> object:
    """Return a constant converted to the input type. Other types are returned unchanged.

    Raises InputValueError.
    """
    if io_type not in _CONVERTERS:
        return value
    return _CONVERTERS[io_type](value)


def same_choice(value: object, choices: Sequence[object]) -> object:
    """Return the choice equal to `value` except for the direction of slashes.

    Return `value` itself if there is none.
    """
    if not isinstance(value, str) or value in choices:
        return value
    written = value.replace("\\", "/")
    return next(
        (each for each in choices if isinstance(each, str) and each.replace("\\", "/") == written),
        value,
    )


def shown(value: object) -> str:
    """Return a constant as JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return shortened(text, _MAX_SHOWN)


def shortened(text: str, most: int) -> str:
    """Return a text with at most `most` of its own characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def _boolean(value: object) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise InputValueError(
        f"{shown(value)} is not true or false: write true or false, without quotes"
    )


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    with suppress(ValueError):
        if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    raise InputValueError(f"{shown(value)} is not a whole number: write one, such as 4")


def _number(value: object) -> float:
    with suppress(ValueError, OverflowError):
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    raise InputValueError(f"{shown(value)} is not a finite number: write one, such as 3.5")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise InputValueError(f'{shown(value)} is not a text: write one in quotes, "" for none')


_CONVERTERS: Mapping[str, Callable[[object], object]] = {
    "INT": _whole,
    "FLOAT": _number,
    "STRING": _text,
    "BOOLEAN": _boolean,
}
