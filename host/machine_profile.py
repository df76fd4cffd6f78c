"""Machine profile: measured speeds, stored in the user's cache folder."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import torch

from ..bench import processor_name
from ..devices import auto_dtype, dtype_name, runtime_for
from ..devices.machine import cache_folder, limited_groups, write_json
from ..offload.probes import probe_bus, probe_copy, probe_decode, probe_disk, probe_quantise
from ..plan import BlockRates, Bus, Machine
from ..shapes import T2V_A14B, ExpertShape, VideoShape, block_rates
from ..wan.measurement import block_pass, measure_block, probe_block, quick_case, random_block
from .folders import GGUF_FILES, WEIGHT_FILES

logger = logging.getLogger(__name__)

FORMAT = 1
USUAL_TOKENS = VideoShape(width=832, height=480, frames=81).tokens
BUSY_TOKENS = 4096
"""Tokens for the block that computes during the bus probe's copies: some tens of milliseconds on
any GPU."""
PROBE_BYTES = 6_000_000_000
"""GPU memory for the probes: an A14B block and 4.7 GB, including 3.7 GB for the forward pass over
`USUAL_TOKENS`.

With less memory, the compute probe uses fewer tokens.
"""
SCRATCH_FILE_BYTES = 256_000_000
"""Size of the temporary file for the disk probe, used if there is no weight file."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured machine, with notes on the measurement."""

    machine: Machine
    notes: tuple[str, ...]
    kept_in: Path | None
    """File with the stored profile, or None if it could not be written."""


def load_machine_profile(
    device: torch.device,
    expert: ExpertShape = T2V_A14B,
    models: Path | None = None,
    *,
    folder: Path | None = None,
    make_room: Callable[[], object] = lambda: None,
) -> Machine:
    """Return this machine's stored profile, or measure it now (some seconds).

    A stored profile is ignored with a warning if it is unreadable or belongs to another machine,
    disk or block shape.

    Args:
        device: compute device, `cpu` or `cuda`.
        expert: block shape for the compute probe.
        models: a file or a folder with weights on the disk to measure. None means any disk.
        folder: profile folder. By default it is the user's cache folder.
        make_room: called before a measurement, to free `PROBE_BYTES` on the device.
    """
    stored = _read(profile_path(device, folder), _identity(device, expert, models))
    if isinstance(stored, Machine):
        return stored
    if stored:
        logger.warning("%s: this machine is measured again", stored)
    make_room()
    # Hosts run nodes in inference mode. It is thread-local: other threads could not write
    # to the probe buffers.
    with torch.inference_mode(False):
        return measure_machine(device, expert=expert, models=models, folder=folder).machine


def stored_machine(
    device: torch.device,
    expert: ExpertShape = T2V_A14B,
    models: Path | None = None,
    *,
    folder: Path | None = None,
) -> Machine | None:
    """Return this machine's stored profile, or None without a matching one.

    See `load_machine_profile`.
    """
    stored = _read(profile_path(device, folder), _identity(device, expert, models))
    if isinstance(stored, str):
        return None
    return stored


def measure_machine(
    device: torch.device,
    *,
    expert: ExpertShape = T2V_A14B,
    tokens: int = USUAL_TOKENS,
    models: Path | None = None,
    folder: Path | None = None,
) -> Profile:
    """Measure this machine and store the profile.

    Arguments as for `load_machine_profile`, with `tokens` per lane.

    Raises OSError if no file can be read for the disk probe.
    """
    notes: list[str] = []
    machine = _measured(device, expert, tokens, models, notes)
    path = profile_path(device, folder)
    kept_in: Path | None = path
    identity = _identity(device, expert, models)
    stored = {"format": FORMAT, "identity": identity, "machine": machine.to_dict(), "notes": notes}
    try:
        write_json(path, stored)
    except OSError as err:
        logger.warning(
            "cannot write the machine profile %s (%s): the next run measures again", path, err
        )
        kept_in = None
    return Profile(machine=machine, notes=tuple(notes), kept_in=kept_in)


def profile_path(device: torch.device, folder: Path | None = None) -> Path:
    """Return the profile path for `device`."""
    return (folder or cache_folder()) / f"machine-{device.type}.json"


def _read(path: Path, required: Mapping[str, Any]) -> Machine | str:
    """Return the machine stored in `path` if the identity matches, else a reason.

    The reason is "" without a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as err:
        return f"the machine profile {path} cannot be read ({err})"
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        machine = Machine.from_dict(data["machine"])
        identity = dict(data["identity"])
    except (ValueError, KeyError, TypeError) as err:
        return f"{path} is not a machine profile ({err})"
    now = {name: here for name, here in required.items() if identity.get(name) != here}
    if now:
        was = {name: identity.get(name) for name in now}
        return f"the machine profile {path} is of another machine ({was}, here {now})"
    return machine


def _identity(device: torch.device, expert: ExpertShape, models: Path | None) -> dict[str, Any]:
    """Return the properties that a profile depends on.

    Without `models`, any measured disk will do.
    """
    identity = {
        "device": _device_name(device),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()} {platform.processor()} x {os.cpu_count()}",
        "system": platform.platform(),
        "ram_bytes": _ram_bytes(),
        "block": [expert.width, expert.ffn_width],
        "computes_in": dtype_name(auto_dtype(device)),
    }
    if models is not None:
        identity["disk"] = _disk(models)
    return identity


def _device_name(device: torch.device) -> str:
    runtime = runtime_for(device)
    if runtime is None:
        return processor_name()
    return runtime.name()


def _ram_bytes() -> int:
    """Return the total RAM available to this process.

    Not the free RAM, because it changes while the profile is kept.
    """
    limits = (group.limit for group in limited_groups())
    return min([int(psutil.virtual_memory().total), *limits])


def _disk(models: Path) -> int | None:
    with suppress(OSError):
        return models.stat().st_dev
    return None


def _measured(
    device: torch.device, expert: ExpertShape, tokens: int, models: Path | None, notes: list[str]
) -> Machine:
    runtime = runtime_for(device)
    with _file_to_read(models, notes) as file:
        disk = probe_disk(file)
    notes.append(f"disk: {disk.how}")
    compute = probe_block(expert, tokens, device)
    small, metered = quick_case(expert, compute, device)
    times = measure_block(small, metered, device, most_s=0.2)
    block = block_rates(times, small, metered)
    of_width = ""
    if small != expert:  # the products are further below their limit, but the ratios are similar
        of_width = f" of width {small.width}"
        block = BlockRates(linear_speedups=block.linear_speedups)
    if compute.tokens < tokens:
        notes.append(
            f"compute: measured with {compute.tokens} tokens, extrapolated to {tokens} by "
            "operation count"
        )
    notes += [
        f"{name or dtype_name(auto_dtype(device))}: {each.words}, {metered} tokens{of_width}"
        for name, each in times.items()
    ]
    bus = None if runtime is None else _bus(device, expert, notes)
    return Machine(
        name=_device_name(device),
        origin="measured here",
        vram_bytes=0 if runtime is None else runtime.memory().total,
        ram_bytes=_ram_bytes(),
        bus=bus,
        disk_bytes_per_s=disk.bytes_per_s,
        flops_per_s=compute.flops_per_s,
        decode_bytes_per_s=probe_decode(torch.device("cpu") if runtime is None else device),
        copy_bytes_per_s=probe_copy(),
        quantise_bytes_per_s=probe_quantise(),
        block=block,
    )


def _bus(device: torch.device, expert: ExpertShape, notes: list[str]) -> Bus:
    with torch.inference_mode():
        compute = block_pass(random_block(expert, device), expert, BUSY_TOKENS, device)
        rates = probe_bus(device, compute=compute)
    notes.append(f"bus: {rates.words()}")
    if not rates.locked:
        notes.append(
            "bus: the system refuses to lock pages; all copies were measured from pageable memory"
        )
    return Bus(
        h2d_bytes_per_s=rates.h2d.busy,
        h2d_pageable_bytes_per_s=rates.h2d_pageable.idle,
        d2h_bytes_per_s=rates.d2h.idle,
    )


@contextmanager
def _file_to_read(models: Path | None, notes: list[str]) -> Iterator[Path]:
    """Yield the largest weight file below `models`, or a temporary file without one."""
    found = models and _largest_weights(models)
    if found is not None:
        notes.append(f"read: {found.name}")
        yield found
        return
    # In the models folder, because this is the disk to measure.
    folder = models if models is not None and models.is_dir() else _folder_on_disk()
    with tempfile.TemporaryDirectory(prefix="wanstream-probe-", dir=folder) as scratch:
        path = Path(scratch, "weights")
        with path.open("wb") as file:
            # Random bytes, because some file systems compress.
            part = os.urandom(2**20) * 16
            for _ in range(SCRATCH_FILE_BYTES // len(part)):
                file.write(part)
            file.flush()
            # POSIX_FADV_DONTNEED leaves unwritten pages in the page cache.
            os.fsync(file.fileno())
        notes.append("read: a temporary file, because there is no file of weights to read")
        yield path


def _folder_on_disk() -> Path:
    # On many systems the folder for temporary files is in RAM.
    cache = Path(platformdirs.user_cache_dir())
    if os.access(cache, os.W_OK):
        return cache
    return Path(tempfile.gettempdir())


def _largest_weights(models: Path) -> Path | None:
    if models.is_file():
        return models
    files = (
        path for path in models.rglob("*") if path.suffix.lower() in (*WEIGHT_FILES, *GGUF_FILES)
    )
    return max(
        (path for path in files if path.is_file()),
        key=lambda path: path.stat().st_size,
        default=None,
    )
