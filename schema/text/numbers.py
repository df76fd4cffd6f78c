"""Text for figures: sizes, seconds, rates and shares in few digits."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("B", "KB", "MB", "GB", "TB")


def format_size(nbytes: float) -> str:
    """Format bytes in decimal units with three digits: 702800000 -> "703 MB"."""
    size = float(nbytes)
    unit = 0
    # 999.5 and more would be rounded to four digits.
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size = size / 1000
        unit = unit + 1
    # From these borders on, rounding adds a digit before the point: 9.996 becomes 10.0.
    digits = sum(unit > 0 and size < border for border in (9.995, 99.95))
    return f"{size:.{digits}f} {_UNITS[unit]}"


def format_count(count: int, noun: str) -> str:
    """Format a count with a noun whose plural ends in s: "1 row", "2 rows"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_need(nbytes: float) -> str:
    """Format bytes in GB with two decimals, so a need and a slightly smaller budget differ."""
    return f"{nbytes / 1e9:.2f} GB"


def format_rate(bytes_per_s: float) -> str:
    """Format bytes per second: 24600000000 -> "24.6 GB/s"."""
    return f"{format_size(bytes_per_s)}/s"


def format_share(share: float) -> str:
    """Format a share in percent: 0.125 -> "12.5 %"."""
    return f"{100 * share:.1f} %"


def second_digits(values: Iterable[float]) -> int:
    """Return the decimals for a column of these seconds: one for minutes, four for milliseconds."""
    most = max((abs(value) for value in values), default=0.0)
    return next(
        (digits for digits, least in enumerate((100.0, 1.0, 0.1), start=1) if most >= least), 4
    )


def format_seconds(value: float, digits: int | None = None) -> str:
    """Format seconds without their unit, with `digits` decimals or as many as suit the value."""
    places = second_digits([value]) if digits is None else digits
    # + 0.0 turns -0.0 into 0.0: a rounded zero must not have a sign.
    return f"{round(value, places) + 0.0:.{places}f}"


def error_text(err: Exception) -> str:
    """Return an error's message.

    For an operating system error, the words and the file without the number.
    """
    # An OSError with one argument has no `strerror`. With two, `str` would show the errno.
    if not isinstance(err, OSError) or not err.strerror:
        return str(err)
    if err.filename:
        return f"{err.filename}: {err.strerror}"
    return err.strerror
