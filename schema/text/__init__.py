"""Texts: numbers in messages, JSON and file names."""

from .file_names import windows_fault, windows_name
from .json_text import JsonTextError, parse_json
from .numbers import (
    error_text,
    format_count,
    format_need,
    format_rate,
    format_seconds,
    format_share,
    format_size,
    second_digits,
)

__all__ = [
    "JsonTextError",
    "error_text",
    "format_count",
    "format_need",
    "format_rate",
    "format_seconds",
    "format_share",
    "format_size",
    "parse_json",
    "second_digits",
    "windows_fault",
    "windows_name",
]
