"""`wanstream probe`: measures this machine, prints the figures and stores them for the planner."""

from __future__ import annotations

import json
import sys

from ..bench import Table
from ..host import Profile, measure_machine
from ..plan import Machine
from ..schema import VideoShape, format_rate, format_size
from .arguments import DONE, FAILED, INVALID, ArgumentError, error_text, measured_device, video_shape
from .options import ProbeOptions


def probe(options: ProbeOptions) -> int:
    """Measure, print a table or JSON, and return the exit code."""
    try:
        video = video_shape(options.size)
        device = measured_device(options.device, options.models)
    except ArgumentError as err:
        print(err, file=sys.stderr)
        return INVALID
    print(f"measuring {device}, which takes some seconds", file=sys.stderr)
    try:
        profile = measure_machine(device, tokens=video.tokens, models=options.models)
    except (OSError, ValueError) as err:
        print(f"failed: {error_text(err)}", file=sys.stderr)
        return FAILED
    print(_as_json(profile) if options.json else probe_table(profile, video))
    return DONE


def probe_table(profile: Profile, video: VideoShape) -> str:
    """Return one line per figure, then the notes of the measurement and the path of the stored profile."""
    machine = profile.machine
    rows = tuple((name, figure) for name, figure in _figures(machine, video) if figure)
    stored = "not stored: see above" if profile.kept_in is None else f"stored in {profile.kept_in}"
    return "\n".join([machine.name, Table(head=("", ""), rows=rows).text(), *profile.notes, stored])


def _figures(machine: Machine, video: VideoShape) -> list[tuple[str, str]]:
    shown = f"{video.width}x{video.height}x{video.frames}"
    return [
        ("GPU memory", format_size(machine.vram_bytes) if machine.vram_bytes else ""),
        ("RAM", format_size(machine.ram_bytes)),
        ("RAM to GPU, page-locked, while computing", _rate(machine.h2d_bytes_per_s)),
        ("RAM to GPU, pageable", _rate(machine.h2d_pageable_bytes_per_s)),
        ("GPU to RAM, page-locked", _rate(machine.d2h_bytes_per_s)),
        ("file to RAM", _rate(machine.disk_bytes_per_s)),
        ("RAM to RAM", _rate(machine.copy_bytes_per_s)),
        (f"a Wan block at {shown}", f"{machine.flops_per_s / 1e12:.2f} TFLOP/s"),
        *((f"its linear layers in {name}", f"{rate:.2f} x as fast") for name, rate in machine.linear_speedups.items()),
        ("decoding fp8 (output bytes)", _rate(machine.decode_bytes_per_s)),
        ("quantising to fp8 (input bytes)", _rate(machine.quantise_bytes_per_s)),
    ]


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else format_rate(bytes_per_s)


def _as_json(profile: Profile) -> str:
    path = None if profile.kept_in is None else str(profile.kept_in)
    return json.dumps({"machine": profile.machine.to_dict(), "notes": profile.notes, "kept_in": path}, indent=2)
