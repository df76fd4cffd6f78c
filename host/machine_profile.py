"""What this machine was measured to do, kept in the user's cache folder so that it is measured once."""

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

from ..devices import auto_dtype, cgroup_limits, dtype_name
from ..offload import BusRates, probe_bus, probe_copy, probe_decode, probe_disk, probe_quantise
from ..plan import Machine
from ..schema import T2V_A14B, ExpertShape, VideoShape
from ..wan import block_pass, probe_block, sample_block
from .folders import GGUF_FILES, WEIGHT_FILES

logger = logging.getLogger(__name__)

FORMAT = 1
USUAL_TOKENS = VideoShape(width=832, height=480, frames=81).tokens
BUSY_TOKENS = 4096
"""Of the block that computes beside copies: some tens of milliseconds each, whatever the GPU."""
PROBE_BYTES = 6_000_000_000
"""Of a GPU: a block of A14B, and 4.7 GB of which a pass of `USUAL_TOKENS` takes 3.7. With less, fewer are computed."""
OWN_FILE_BYTES = 256_000_000
"""Written, read and removed where there is no file of weights to read."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine with what was found while it was measured, and where that is kept."""

    machine: Machine
    notes: tuple[str, ...]
    kept_in: Path | None
    """None: it could not be kept."""


def load_machine_profile(
    device: torch.device,
    *,
    expert: ExpertShape = T2V_A14B,
    models: Path | None = None,
    folder: Path | None = None,
    make_room: Callable[[], object] = lambda: None,
) -> Machine:
    """The kept profile of this machine, or one that is measured now, which takes some seconds.

    Args:
        device: what computes, `cpu` or `cuda`.
        expert: whose blocks are computed.
        models: a file of weights, or a folder of them, on the disk that weights are read from; None: any disk.
        folder: where profiles are kept; None: the user's cache folder.
        make_room: called before anything is measured, to free `PROBE_BYTES` of the device.

    A kept profile of another machine, of another disk or of other blocks is told in the log and not used; nor is one
    that cannot be read. A folder that cannot be written to is told too, and the figures hold for this call alone.
    """
    kept = _kept(profile_path(device, folder), _wanted(device, expert, models))
    if isinstance(kept, Machine):
        return kept
    if kept:
        logger.warning("%s: this machine is measured again", kept)
    make_room()
    return measure_machine(device, expert=expert, models=models, folder=folder).machine


def kept_machine(
    device: torch.device, *, expert: ExpertShape = T2V_A14B, models: Path | None = None, folder: Path | None = None
) -> Machine | None:
    """The kept profile of this machine, if there is one that holds for these arguments; see `load_machine_profile`."""
    kept = _kept(profile_path(device, folder), _wanted(device, expert, models))
    return kept if isinstance(kept, Machine) else None


def measure_machine(
    device: torch.device,
    *,
    expert: ExpertShape = T2V_A14B,
    tokens: int = USUAL_TOKENS,
    models: Path | None = None,
    folder: Path | None = None,
) -> Profile:
    """Measure this machine and keep what comes of it; arguments as `load_machine_profile`, `tokens` of one lane.

    Raises OSError when no file can be read.
    """
    notes: list[str] = []
    machine = _measured(device, expert, tokens, models, notes)
    path = profile_path(device, folder)
    identity = _identity(device, expert, models)
    try:
        _write(path, {"format": FORMAT, "identity": identity, "machine": machine.to_dict(), "notes": notes})
    except OSError as err:
        logger.warning("the profile of this machine cannot be kept in %s (%s): it is measured again", path, err)
        return Profile(machine=machine, notes=tuple(notes), kept_in=None)
    return Profile(machine=machine, notes=tuple(notes), kept_in=path)


def profile_path(device: torch.device, folder: Path | None = None) -> Path:
    """The file that the profile for `device` is kept in."""
    return (folder or Path(platformdirs.user_cache_dir("wanstream", appauthor=False))) / f"machine-{device.type}.json"


def _wanted(device: torch.device, expert: ExpertShape, models: Path | None) -> dict[str, Any]:
    wanted = _identity(device, expert, models)
    if models is None:
        del wanted["disk"]  # the one that was measured is as good as any
    return wanted


def _kept(path: Path, wanted: Mapping[str, Any]) -> Machine | str:
    """The machine that `path` tells of, if it is the wanted one; otherwise why not, in words, empty without a file."""
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
        kept, identity = Machine.from_dict(data["machine"]), data["identity"]
    except (ValueError, KeyError, TypeError) as err:
        return f"the machine profile {path} is no profile ({err})"
    changed = [name for name in wanted if not isinstance(identity, dict) or identity.get(name) != wanted[name]]
    if changed:
        was = {name: identity.get(name) for name in changed} if isinstance(identity, dict) else identity
        now = {name: wanted[name] for name in changed}
        return f"the machine profile {path} is of another machine ({was}, here {now})"
    return kept


def _identity(device: torch.device, expert: ExpertShape, models: Path | None) -> dict[str, Any]:
    """What a profile holds for; figures of another machine differ in one of these."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()} {platform.processor()} x {os.cpu_count()}",
        "system": platform.platform(),
        "ram_bytes": _ram_bytes(),
        "disk": None if models is None else _disk(models),
        "block": [expert.width, expert.ffn_width],
        "computes_in": dtype_name(auto_dtype(device)),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _ram_bytes() -> int:
    """All RAM that there is for this process, taken or not: what is free changes, and the profile is kept."""
    return min([int(psutil.virtual_memory().total), *cgroup_limits()])


def _disk(models: Path) -> int | None:
    with suppress(OSError):
        return models.stat().st_dev
    return None


def _measured(device: torch.device, expert: ExpertShape, tokens: int, models: Path | None, notes: list[str]) -> Machine:
    on_gpu = device.type == "cuda"
    with _file_to_read(models, notes) as file:
        disk = probe_disk(file)
    notes.append(f"disk: {disk.how}")
    compute = probe_block(expert, tokens, device)
    if compute.tokens < tokens:
        notes.append(f"compute: measured with {compute.tokens} tokens, extrapolated to {tokens} by its operations")
    bus = _bus(device, expert) if on_gpu else None
    if bus is not None:
        notes.append(f"bus: {bus.words()}")
    if bus is not None and not bus.locked:
        notes.append("bus: the system refuses to lock pages; all copies are from ordinary memory")
    return Machine(
        name=device_name(device),
        origin="measured here",
        computes_on="cuda" if on_gpu else "cpu",
        vram_bytes=int(torch.cuda.get_device_properties(device).total_memory) if on_gpu else 0,
        ram_bytes=_ram_bytes(),
        h2d_bytes_per_s=bus.h2d_busy if bus else None,
        h2d_pageable_bytes_per_s=bus.h2d_pageable if bus else None,
        d2h_bytes_per_s=bus.d2h if bus else None,
        disk_bytes_per_s=disk.bytes_per_s,
        flops_per_s=compute.flops_per_s,
        decode_bytes_per_s=probe_decode(device),
        copy_bytes_per_s=probe_copy(),
        quantise_bytes_per_s=probe_quantise(),
    )


def _bus(device: torch.device, expert: ExpertShape) -> BusRates:
    with torch.inference_mode():
        compute = block_pass(sample_block(expert, device), expert, BUSY_TOKENS, device)
        return probe_bus(device, compute=compute)


@contextmanager
def _file_to_read(models: Path | None, notes: list[str]) -> Iterator[Path]:
    """The largest file of weights below `models`, or a file of our own where there is none."""
    found = None if models is None else _largest_weights(models)
    if found is not None:
        notes.append(f"read: {found}")
        yield found
        return
    # Beside the models, because that is the disk in question.
    place = models if models is not None and models.is_dir() else _place_on_disk()
    with tempfile.NamedTemporaryFile(prefix="wanstream-probe-", dir=place, delete=False) as file:
        own = Path(file.name)
        try:
            part = os.urandom(2**20) * 16
            for _ in range(OWN_FILE_BYTES // len(part)):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            own.unlink()
            raise
    notes.append(f"read: a file of its own in {own.parent}, there is no file of weights to read")
    try:
        yield own
    finally:
        own.unlink()


def _place_on_disk() -> Path:
    """Rather the user's cache folder than that of temporary files, which is RAM on many systems."""
    cache = Path(platformdirs.user_cache_dir())
    return cache if os.access(cache, os.W_OK) else Path(tempfile.gettempdir())


def _largest_weights(models: Path) -> Path | None:
    if models.is_file():
        return models
    files = (path for path in models.rglob("*") if path.suffix.lower() in (*WEIGHT_FILES, *GGUF_FILES))
    return max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size, default=None)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON so that a reader finds the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            Path(file.name).unlink()
            raise
    os.replace(file.name, path)
