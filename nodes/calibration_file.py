"""Owns the files of calibrations in the output folder."""

from __future__ import annotations

import json

from ..host import host
from ..host.folders import inside
from ..sampling import RequestError
from ..sampling.mag_table import MagTable


class CalibrationFileError(OSError):
    """The file of a calibration could not be written or read; `errno` is that of the failed call."""


def write_table(table: MagTable, prefix: str) -> str:
    """Write `table` under the next free name of `prefix`; returns that name below the output folder.

    Raises CalibrationFileError, and leaves nothing half written; OutsideFolderError for a prefix that leaves it.
    """
    place = host.output_file(prefix, "json")
    unfinished = place.path.with_name(f"{place.filename}.part")
    try:
        unfinished.write_text(json.dumps(table.to_dict(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(place.path)
    except OSError as err:
        raise CalibrationFileError(
            err.errno, f"{place.path} could not be written: {err.strerror}. Make room on the disk and queue again"
        ) from err
    finally:
        unfinished.unlink(missing_ok=True)
    return f"{place.subfolder}/{place.filename}" if place.subfolder else place.filename


def read_table(name: str) -> MagTable:
    """The table in the file `name` below the output folder.

    Raises RequestError where that is no table, CalibrationFileError where it cannot be read, and OutsideFolderError for
    a name that leaves the folder.
    """
    if not name.strip():
        raise RequestError(
            "a cache by magnitudes needs a calibration: run Wan Cache Calibration once and give the name of its file, "
            "or choose first_block_cache"
        )
    path = inside(host.output_folder(), name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"{name} is no calibration: {err}") from err
    except OSError as err:
        raise CalibrationFileError(
            err.errno, f"the calibration {path} could not be read: {err.strerror}. Give a file of Wan Cache Calibration"
        ) from err
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RequestError(f"{name} is no calibration: it is not JSON ({err})") from err
    return MagTable.from_dict(data)
