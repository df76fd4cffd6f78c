"""Calibration runs for MagCache, and their files in the output folder."""

from __future__ import annotations

import json

from ...host import Files, Host
from ...sampling import calibrate
from ...sampling.cache import MagTable
from ...sampling.inputs import DenoiseRequest
from ...sampling.steps import RequestError
from ...schema import VERSION
from .run_experts import SamplerInputs, SamplerRun, run_experts
from .whole_file import whole_file


class CalibrationFileError(OSError):
    """A calibration file could not be written or read. `errno` comes from the failed call."""


def write_table(files: Files, table: MagTable, prefix: str) -> str:
    """Write `table` under the next free name for `prefix`. Return the name below the output folder.

    Raises:
        CalibrationFileError: the file could not be written. No partial file remains.
        OutsideFolderError: `prefix` leaves the output folder.
    """
    place = files.output_file(prefix, "json")
    remedy = ". Make room on the disk and queue again"
    with whole_file(place.path, CalibrationFileError, remedy=remedy) as unfinished:
        unfinished.write_text(json.dumps(table.to_dict(), indent=1) + "\n", encoding="utf-8")
    return "/".join(filter(None, (place.subfolder, place.filename)))


def read_table(files: Files, name: str) -> MagTable:
    """Return the table in the file `name` below the output folder.

    Raises:
        RequestError: the file is not a calibration.
        CalibrationFileError: the file could not be read.
        OutsideFolderError: `name` leaves the output folder.
    """
    if not name.strip():
        raise RequestError(
            "magcache needs a calibration: run Wan Cache Calibration once and give the name of its "
            "file, or choose first_block_cache"
        )
    path = files.saved_path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"{name} is not a calibration: {err}") from err
    except OSError as err:
        raise CalibrationFileError(
            err.errno,
            f"the calibration {path} could not be read: {err.strerror}. Give a file of Wan Cache "
            "Calibration",
        ) from err
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RequestError(f"{name} is not a calibration: it is not JSON ({err})") from err
    return MagTable.from_dict(data)


def calibrate_run(host: Host, run: SamplerRun, *, node_id: str | None) -> MagTable:
    """Compute `run` again without a cache and measure the residuals.

    The host's Cancel ends it before the next block.

    Raises:
        RequestError: the run cannot be measured.
    """

    def run_again(request: DenoiseRequest) -> None:
        # Without workers: the residuals are measured in this process.
        inputs = SamplerInputs(experts=run.experts, request=request, requested=run.requested)
        run_experts(host, inputs, node_id=node_id)

    return calibrate(run.request, run_again, source=_source(run))


def _source(run: SamplerRun) -> str:
    """Return a sentence on the measured run, for readers of the file."""
    ref = run.experts
    files = " and ".join(path.name for path in (ref.high_noise, ref.low_noise) if path is not None)
    loras = {path.name for path, _ in ref.lora_files}
    if loras:
        files += f" with {', '.join(sorted(loras))}"
    steps = run.request.step_plan.schedule.steps
    shape = [*run.request.noise.shape]
    return f"measured with WanStream {VERSION} on {files}, {steps} steps, latents {shape}"
