"""All ways to lay workers out for a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .mesh import Mesh, MeshError
from .mesh_checks import check_mesh
from .offload_job import OffloadJob


def layouts(workers: int, job: OffloadJob, *, heads: int, samples: int, rings: bool) -> tuple[Mesh, ...]:
    """Every mesh of that many workers that passes `check_mesh` for `job`, those with fewer axes first.

    `rings`: whether the workers can compute ring attention, which needs a GPU.
    """
    return tuple(mesh for mesh in _meshes(workers) if (rings or mesh.ring == 1) and _suits(mesh, job, heads, samples))


def fitting_count(workers: int, job: OffloadJob, *, heads: int, samples: int, rings: bool) -> int:
    """The largest number of workers up to that for which there is a layout."""
    return next(
        count for count in range(workers, 0, -1) if layouts(count, job, heads=heads, samples=samples, rings=rings)
    )


def _meshes(workers: int) -> list[Mesh]:
    divisors = [degree for degree in range(1, workers + 1) if workers % degree == 0]
    found = [
        Mesh(data=workers // inner, stage=stage, cfg=cfg, ring=ring, ulysses=ulysses)
        for cfg, ulysses, ring, stage in product((1, 2), divisors, divisors, divisors)
        if workers % (inner := stage * cfg * ring * ulysses) == 0
    ]
    return sorted(found, key=lambda mesh: (axes(mesh), *(degree for _, degree in mesh.degrees)))


def axes(mesh: Mesh) -> int:
    """Along how many axes there is more than one worker."""
    return sum(degree > 1 for _, degree in mesh.degrees)


def _suits(mesh: Mesh, job: OffloadJob, heads: int, samples: int) -> bool:
    try:
        check_mesh(
            mesh,
            workers=mesh.size,
            heads=heads,
            tokens=job.tokens,
            lanes={expert: job.lanes[expert] for expert in dict.fromkeys(job.experts_of_steps)},
            steps=len(job.experts_of_steps),
            samples=samples,
        )
    except MeshError:
        return False
    return not _cuts_elsewhere(mesh, job)


def _cuts_elsewhere(mesh: Mesh, job: OffloadJob) -> bool:
    """Whether there are fewer stages than stretches of one expert."""
    changes = sum(1 for _ in _changes(job))
    return 1 < mesh.stage <= changes


def _changes(job: OffloadJob) -> Iterator[int]:
    experts = job.experts_of_steps
    return (step for step in range(1, len(experts)) if experts[step] != experts[step - 1])
