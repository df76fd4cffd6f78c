"""Workflow constants as input values: one rule for both hosts.

ComfyUI converts with Python's `bool`, `int` and `float`, so that "false" is true, 64.7 is 64 and NaN is within every
range. Such constants are refused here, because the run would differ from the workflow without a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_MAX_SHOWN = 60
"""Limit for value characters in a message."""


class InputValueError(ValueError):
    """A constant is not a value of the input type. The message contains what to write."""


class RefusedValue(str):
    """A constant, as JSON. Conversion to a number, a boolean or a text fails with a reason."""

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
    convert = _CONVERTERS.get(io_type)
    return value if convert is None else convert(value)


def same_choice(value: object, choices: Sequence[object]) -> object:
    """Return the choice equal to `value` except for the direction of slashes. `value` itself without one."""
    if not isinstance(value, str) or value in choices:
        return value
    written = value.replace("\\", "/")
    return next((each for each in choices if isinstance(each, str) and each.replace("\\", "/") == written), value)


def shown(value: object) -> str:
    """Return a constant as JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _boolean(value: object) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise InputValueError(f"{shown(value)} is not true or false: write true or false, without quotes")


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, str):
            return int(value)
    except ValueError as err:
        raise _no_whole(value) from err
    raise _no_whole(value)


def _no_whole(value: object) -> InputValueError:
    return InputValueError(f"{shown(value)} is not a whole number: write one, such as 4")


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
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
