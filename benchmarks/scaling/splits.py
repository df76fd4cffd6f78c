"""Ways to split a number of GPUs that are compared on the page."""

from __future__ import annotations

from collections.abc import Callable

from wanstream.plan import Mesh, MeshError, check_mesh

from .setups import MANY, job_of

HEADS = 40


def _ulysses_first(count: int) -> Mesh:
    ulysses = min(count, 8)
    return Mesh(data=count // ulysses, ulysses=ulysses)


def _sides_then_ulysses(count: int) -> Mesh:
    ulysses = min(count // 2, 8)
    return Mesh(data=count // 2 // ulysses, cfg=2, ulysses=ulysses)


def _all_for_one(count: int) -> Mesh:
    ulysses = min(count // 2, 8)
    return Mesh(cfg=2, ring=count // 2 // ulysses, ulysses=ulysses)


def _stages_of_eight(count: int) -> Mesh:
    ulysses = min(count // 2, 8)
    return Mesh(data=count // 2 // ulysses, stage=2, ulysses=ulysses)


SPLITS: dict[str, Callable[[int], Mesh]] = {
    "data": lambda count: Mesh(data=count),
    "two stages, data": lambda count: Mesh(data=count // 2, stage=2),
    "a stage per GPU": lambda count: Mesh(stage=count),
    "cfg 2, data": lambda count: Mesh(data=count // 2, cfg=2),
    "ulysses up to 8, data": _ulysses_first,
    "cfg 2, ulysses up to 8, data": _sides_then_ulysses,
    "two stages, ulysses up to 8, data": _stages_of_eight,
    "all for one: cfg 2, ring, ulysses 8": _all_for_one,
}


def mesh_of(split: str, count: int) -> Mesh | None:
    """The mesh of that split; None where there is none for so many GPUs, or for the video of the page."""
    if count == 1:
        return Mesh()
    mesh, job = SPLITS[split](count), job_of()
    try:
        check_mesh(
            mesh,
            workers=count,
            heads=HEADS,
            tokens=job.tokens,
            lanes=job.lanes,
            steps=len(job.experts_of_steps),
            samples=MANY,
        )
    except MeshError:
        return None
    return mesh
