"""Text for figures: sizes, seconds, rates and shares in few digits."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("B", "KB", "MB", "GB", "TB")


def format_size(nbytes: float) -> str:
    """Format bytes in decimal units with three digits: 702800000 -> "703 MB"."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def format_count(count: int, noun: str) -> str:
    """Format a number of things whose plural ends in s: "1 row", "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_need(nbytes: float) -> str:
    """Format bytes in GB with two decimals, so that a need and a slightly smaller budget read differently."""
    return f"{nbytes / 1e9:.2f} GB"


def format_rate(bytes_per_s: float) -> str:
    """Format bytes per second: 24600000000 -> "24.6 GB/s"."""
    return f"{format_size(bytes_per_s)}/s"


def format_share(share: float) -> str:
    """Format a share in percent: 0.125 -> "12.5 %"."""
    return f"{100 * share:.1f} %"


def second_digits(values: Iterable[float]) -> int:
    """Return the number of decimals that suits a column of these seconds: one for minutes, four for milliseconds."""
    most = max((abs(value) for value in values), default=0.0)
    return next((digits for digits, least in enumerate((100.0, 1.0, 0.1), start=1) if most >= least), 4)


def format_seconds(value: float, digits: int | None = None) -> str:
    """Format seconds without their unit, with `digits` decimals or as many as suit the value."""
    places = second_digits([value]) if digits is None else digits
    # + 0.0 turns -0.0 into 0.0: a rounded zero must not have a sign.
    return f"{round(value, places) + 0.0:.{places}f}"
