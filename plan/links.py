"""How workers reach each other and the RAM of their machine: makers' figures, and what is expected of them.

One direction, in bytes per second, as in `gpus.py`:

* PCIe: 0.79 of the lanes' rate is what engines see of the bus from page-locked memory. Half of that is assumed for
  what workers send each other: without NVLink it goes through the root complex or through RAM, where sending and
  receiving meet. It passes the lanes that weights come through.
* NVLink: 900 GB/s of NVLink 4 in both directions (NVIDIA H100 datasheet, SXM), 450 in one. Three quarters of it are
  assumed for collectives.
* RAM to all GPUs of a machine: half of the peak rate of two sockets is assumed, of 8 channels of DDR4-3200 each
  (409.6 GB/s) with PCIe 4, of 8 channels of DDR5-4800 each (614.4 GB/s) with PCIe 5 and NVLink.
* Between machines: 100 Gb/s Ethernet with PCIe, eight times 400 Gb/s InfiniBand with NVLink (NVIDIA DGX H100).
* Two CPU workers of one machine over loopback: 1 GB/s is assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .gpus import BUS_SHARE, LANE_BYTES_PER_S
from .machine import Machine

PEER_SHARE, NVLINK_SHARE, RAM_READ_SHARE = 0.5, 0.75, 0.5


class UnknownLinkError(ValueError):
    """A name that is none of `LINKS`; the message lists them."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The wires of workers that are all alike. Rates are of one direction.

    Raises ValueError for a rate that is not above 0, and for machines without workers.
    """

    name: str
    origin: str
    """How the figures are known, in words."""
    peer_bytes_per_s: float
    """What one worker sends to others of its machine, while it receives as much."""
    shares_bus: bool
    """Whether that passes the lanes that weights come through."""
    ram_bytes_per_s: float
    """What the RAM of one machine gives to all of its workers together."""
    network_bytes_per_s: float
    """What all workers of one machine together send to other machines."""
    workers_per_machine: int = 8
    latency_s: float = 20e-6
    """Of one exchange, however small."""

    def __post_init__(self) -> None:
        for name in ("peer_bytes_per_s", "ram_bytes_per_s", "network_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)!r}, it must be a number above 0")
        if self.workers_per_machine < 1:
            raise ValueError(f"workers_per_machine is {self.workers_per_machine}, it must be 1 or more")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s is {self.latency_s}, it must be 0 or more")


def _pcie(generation: int, ram_gb_s: float) -> Links:
    lanes = 16 * LANE_BYTES_PER_S[generation]
    return Links(
        name=f"PCIe {generation}.0 x16",
        origin=f"{PEER_SHARE:.0%} of {BUS_SHARE:.0%} of the lanes' {lanes / 1e9:.1f} GB/s between workers (assumed), "
        f"{RAM_READ_SHARE:.0%} of {ram_gb_s:.1f} GB/s out of RAM (assumed), 100 Gb/s Ethernet between machines",
        peer_bytes_per_s=PEER_SHARE * BUS_SHARE * lanes,
        shares_bus=True,
        ram_bytes_per_s=RAM_READ_SHARE * ram_gb_s * 1e9,
        network_bytes_per_s=12.5e9,
    )


LINKS = {
    "pcie4": _pcie(4, 409.6),
    "pcie5": _pcie(5, 614.4),
    "nvlink": Links(
        name="NVLink 4",
        origin=f"{NVLINK_SHARE:.0%} of the 450 GB/s of NVIDIA's H100 datasheet between workers (assumed), "
        f"{RAM_READ_SHARE:.0%} of 614.4 GB/s out of RAM (assumed), 8 x 400 Gb/s InfiniBand between machines",
        peer_bytes_per_s=NVLINK_SHARE * 450e9,
        shares_bus=False,
        ram_bytes_per_s=RAM_READ_SHARE * 614.4e9,
        network_bytes_per_s=8 * 50e9,
    ),
    "loopback": Links(
        name="loopback",
        origin="1 GB/s between processes of one machine (assumed)",
        peer_bytes_per_s=1e9,
        shares_bus=False,
        ram_bytes_per_s=10e9,
        network_bytes_per_s=1e9,
        workers_per_machine=64,
        latency_s=200e-6,
    ),
}


def known_links(name: str) -> Links:
    """The links of that name. Raises UnknownLinkError."""
    if name not in LINKS:
        raise UnknownLinkError(f"no figures for links {name!r}; there are some for {', '.join(LINKS)}")
    return LINKS[name]


def expected_links(machine: Machine, *, workers_per_machine: int) -> Links:
    """What is expected of machines like this one where nobody has said how its workers are connected.

    GPUs are taken to have no wires of their own beside the bus, at the rate that was found for it.
    """
    if machine.h2d_bytes_per_s is None:
        return replace(LINKS["loopback"], workers_per_machine=workers_per_machine)
    nearest = LINKS["pcie5" if PEER_SHARE * machine.h2d_bytes_per_s > LINKS["pcie4"].peer_bytes_per_s else "pcie4"]
    return replace(
        nearest,
        name="the bus",
        origin=f"{PEER_SHARE:.0%} of the bus of {machine.name} between workers (assumed), the rest as {nearest.name}",
        peer_bytes_per_s=PEER_SHARE * machine.h2d_bytes_per_s,
        workers_per_machine=workers_per_machine,
    )
