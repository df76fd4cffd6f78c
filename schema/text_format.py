"""Figures as a reader wants them: sizes, seconds, rates and shares in few digits."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("B", "KB", "MB", "GB", "TB")


def size_text(nbytes: float) -> str:
    """Bytes in decimal units with three digits: 702800000 -> "703 MB"."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def need_text(nbytes: float) -> str:
    """Bytes in GB with two digits behind the point, so that a need and the slightly smaller room for it differ."""
    return f"{nbytes / 1e9:.2f} GB"


def rate_text(bytes_per_s: float) -> str:
    """Bytes per second, likewise."""
    return f"{size_text(bytes_per_s)}/s"


def share_text(share: float) -> str:
    """0.125 -> "12.5 %"."""
    return f"{100 * share:.1f} %"


def second_digits(values: Iterable[float]) -> int:
    """Digits behind the point that suit a column of such seconds: one for minutes, four for milliseconds."""
    most = max((abs(value) for value in values), default=0.0)
    return next((digits for digits, least in enumerate((100.0, 1.0, 0.1), start=1) if most >= least), 4)


def seconds_text(value: float, digits: int | None = None) -> str:
    """Seconds without their unit, with as many digits as suit this value where none are given. 0 has no sign."""
    places = second_digits([value]) if digits is None else digits
    return f"{round(value, places) + 0.0:.{places}f}"
