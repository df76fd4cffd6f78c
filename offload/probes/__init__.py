"""Probes for this machine: rates of disks, buses, devices and links between workers."""

from .gather import probe_gather
from .machine import (
    probe_bus,
    probe_copy,
    probe_decode,
    probe_disk,
    probe_quantise,
    wrong_decodings,
)

__all__ = [
    "probe_bus",
    "probe_copy",
    "probe_decode",
    "probe_disk",
    "probe_gather",
    "probe_quantise",
    "wrong_decodings",
]
