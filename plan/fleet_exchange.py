"""What the workers of a cell tell each other, in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from .links import Links
from .mesh import Mesh
from .offload_job import OffloadJob
from .shapes import FP32_BYTES, PATCH

LATENT_VALUES_PER_TOKEN = 16 * PATCH[0] * PATCH[1] * PATCH[2]
ULYSSES_TENSORS = 4
"""Queries, keys, values, and the output on its way back."""
RING_TENSORS = 2
"""Keys and values, which every worker of a ring gathers from all others (as diffusers does it)."""
STATE_TENSORS = 4
"""Of the size of the latents, in what one stage hands to the next: the latents, and the history of the solver."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one worker receives from others, and how long everybody waits for that."""

    nbytes: float
    seconds: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(nbytes=self.nbytes + other.nbytes, seconds=self.seconds + other.seconds)


NOTHING = Exchange(nbytes=0.0, seconds=0.0)


def lane_exchange(job: OffloadJob, mesh: Mesh, links: Links) -> Exchange:
    """Of one lane in one block: tokens against heads (Ulysses), keys and values (ring)."""
    context = mesh.ring * mesh.ulysses
    tensor = job.tokens / context * job.expert.width * job.value_bytes
    total = NOTHING
    if mesh.ulysses > 1:
        each = _from_others(mesh, "ulysses", tensor / mesh.ulysses, links)
        total += Exchange(nbytes=ULYSSES_TENSORS * each.nbytes, seconds=ULYSSES_TENSORS * each.seconds)
    if mesh.ring > 1:
        total += _from_others(mesh, "ring", RING_TENSORS * tensor, links)
    return total


def step_exchange(job: OffloadJob, mesh: Mesh, links: Links) -> Exchange:
    """Of one step, outside the blocks: what each worker has found, until all of the cell know all of it."""
    whole = job.tokens * LATENT_VALUES_PER_TOKEN * FP32_BYTES
    of_axis = {"ulysses": whole / (mesh.ring * mesh.ulysses), "ring": whole / mesh.ring, "cfg": whole}
    return sum((_from_others(mesh, axis, each, links) for axis, each in of_axis.items()), NOTHING)


def gather_exchange(mesh: Mesh, links: Links, block_bytes: float) -> Exchange:
    """Of one block whose bytes are spread over the cell."""
    workers = mesh.cell_size
    return _between(workers, _machines(mesh, workers, workers, links), block_bytes / workers, links)


def handover_seconds(job: OffloadJob, mesh: Mesh, links: Links) -> float:
    """From the cell of one stage to that of the next, by way of the driver."""
    if mesh.stage == 1:
        return 0.0
    return 2 * job.tokens * LATENT_VALUES_PER_TOKEN * FP32_BYTES * STATE_TENSORS / links.network_bytes_per_s


def _from_others(mesh: Mesh, axis: str, each: float, links: Links) -> Exchange:
    """`each` bytes from every other worker along an axis."""
    inner = {"ulysses": 1, "ring": mesh.ulysses, "cfg": mesh.ulysses * mesh.ring}[axis]
    degree: int = getattr(mesh, axis)
    return _between(degree, _machines(mesh, degree, inner * degree, links), each, links)


def _between(workers: int, machines: int, each: float, links: Links) -> Exchange:
    if workers == 1:
        return NOTHING
    here = workers / machines
    near, far = (here - 1) * each, (workers - here) * each
    # All workers of a machine share its network.
    far_s = far * links.workers_per_machine / links.network_bytes_per_s
    return Exchange(nbytes=near + far, seconds=max(near / links.peer_bytes_per_s, far_s) + links.latency_s)


def _machines(mesh: Mesh, workers: int, reach: int, links: Links) -> int:
    """Over how many machines `workers` of a mesh are spread that lie among `reach` ranks in a row, at worst."""
    here = links.workers_per_machine
    if mesh.size <= here:
        return 1
    if reach <= here:
        return 1 if here % reach == 0 else min(workers, 2)
    return min(workers, -(-reach // here))
