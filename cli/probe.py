"""`wanstream probe`: measures this machine, prints the figures and stores them for the planner."""

from __future__ import annotations

import json

from ..bench import Table
from ..host import Profile, measure_machine
from ..plan import Machine
from ..schema.text import error_text, format_rate, format_size
from ..shapes import VideoShape
from .arguments import DONE, FAILED, measured_device, video_shape
from .options import ProbeOptions
from .terminal import print_note


def probe(options: ProbeOptions) -> int:
    """Measure, print a table or JSON, and return the exit code. Raises ArgumentError."""
    video = video_shape(options.size)
    device = measured_device(options.device, options.models)
    print_note(f"measuring {device}, which takes some seconds")
    try:
        profile = measure_machine(device, tokens=video.tokens, models=options.models)
    except (OSError, ValueError) as err:
        print_note(f"failed: {error_text(err)}")
        return FAILED
    if options.json:
        print(_as_json(profile))
    else:
        print(probe_table(profile, video))
    return DONE


def probe_table(profile: Profile, video: VideoShape) -> str:
    """Return a line per figure, the measurement's notes and the stored profile's path."""
    machine = profile.machine
    rows = tuple(_figures(machine, video))
    stored = "not stored: see above" if profile.kept_in is None else f"stored in {profile.kept_in}"
    return "\n".join([machine.name, Table(head=("", ""), rows=rows).text(), *profile.notes, stored])


def _figures(machine: Machine, video: VideoShape) -> list[tuple[str, str]]:
    shown = f"{video.width}x{video.height}x{video.frames}"
    figures = [("RAM", format_size(machine.ram_bytes))]
    if machine.bus is not None:
        figures = [
            ("GPU memory", format_size(machine.vram_bytes)),
            *figures,
            ("RAM to GPU, page-locked, while computing", format_rate(machine.bus.h2d_bytes_per_s)),
            ("RAM to GPU, pageable", format_rate(machine.bus.h2d_pageable_bytes_per_s)),
            ("GPU to RAM, page-locked", format_rate(machine.bus.d2h_bytes_per_s)),
        ]
    return [
        *figures,
        ("file to RAM", format_rate(machine.disk_bytes_per_s)),
        ("RAM to RAM", format_rate(machine.copy_bytes_per_s)),
        (f"a Wan block at {shown}", f"{machine.flops_per_s / 1e12:.2f} TFLOP/s"),
        *(
            (f"its linear layers in {name}", f"{rate:.2f} x as fast")
            for name, rate in machine.block.linear_speedups.items()
        ),
        ("decoding fp8 (output bytes)", format_rate(machine.decode_bytes_per_s)),
        ("quantising to fp8 (input bytes)", format_rate(machine.quantise_bytes_per_s)),
    ]


def _as_json(profile: Profile) -> str:
    path = None if profile.kept_in is None else str(profile.kept_in)
    return json.dumps(
        {"machine": profile.machine.to_dict(), "notes": profile.notes, "kept_in": path}, indent=2
    )
