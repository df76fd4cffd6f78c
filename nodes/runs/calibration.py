"""Calibration runs for MagCache, and their files in the output folder."""

from __future__ import annotations

import json

from ...host import current_host
from ...sampling import DenoiseRequest, MagTable, RequestError, calibrate
from ...schema import VERSION
from .run_experts import SamplerRun, run_experts


class CalibrationFileError(OSError):
    """A calibration file could not be written or read; `errno` is that of the failed call."""


def write_table(table: MagTable, prefix: str) -> str:
    """Write `table` under the next free name of `prefix` and return that name below the output folder.

    Raises:
        CalibrationFileError: the file could not be written; no partial file is left.
        OutsideFolderError: `prefix` leaves the output folder.
    """
    place = current_host().output_file(prefix, "json")
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
    """Return the table in the file `name` below the output folder.

    Raises:
        RequestError: the file is not a calibration.
        CalibrationFileError: the file could not be read.
        OutsideFolderError: `name` leaves the output folder.
    """
    if not name.strip():
        raise RequestError(
            "magcache needs a calibration: run Wan Cache Calibration once and give the name of its file, "
            "or choose first_block_cache"
        )
    path = current_host().saved_path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"{name} is not a calibration: {err}") from err
    except OSError as err:
        raise CalibrationFileError(
            err.errno, f"the calibration {path} could not be read: {err.strerror}. Give a file of Wan Cache Calibration"
        ) from err
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RequestError(f"{name} is not a calibration: it is not JSON ({err})") from err
    return MagTable.from_dict(data)


def calibrate_run(run: SamplerRun, *, node_id: str | None) -> MagTable:
    """Compute `run` again without a cache and measure its residuals; the host's Cancel ends it before the next block.

    Raises:
        RequestError: the run cannot be measured.
    """

    def run_again(request: DenoiseRequest) -> None:
        run_experts(run.experts, request, run.requested, node_id=node_id)

    return calibrate(run.request, run_again, source=_source(run))


def _source(run: SamplerRun) -> str:
    """Return a sentence on the measured run for readers of the file."""
    ref, shape = run.experts, run.request.noise.shape
    files = " and ".join(path.name for path in (ref.high_noise, ref.low_noise) if path is not None)
    loras = ", ".join(sorted({path.name for lora in ref.loras for path in (lora.high_noise, lora.low_noise) if path}))
    with_loras = f" with {loras}" if loras else ""
    steps = run.request.step_plan.schedule.steps
    return f"measured with WanStream {VERSION} on {files}{with_loras}, {steps} steps, latents {list(shape)}"
