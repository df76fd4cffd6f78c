"""Mesh ranks, coordinates and groups."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.schema import Mesh, MeshError

MOST = {"data": 4, "stage": 4, "cfg": 2, "ring": 3, "ulysses": 5}
MESHES = st.builds(Mesh, **{axis: st.integers(1, most) for axis, most in MOST.items()})


def coordinates(mesh: Mesh) -> dict[int, dict[str, int]]:
    """Return each rank's position along each axis. The last axis changes fastest."""
    axes, degrees = zip(*mesh.degrees, strict=True)
    places = itertools.product(*map(range, degrees))
    return {rank: dict(zip(axes, place, strict=True)) for rank, place in enumerate(places)}


@given(MESHES)
def test_cells_hold_all_workers_once_and_share_data_and_stage(mesh):
    worker_groups = [mesh.worker_group(*at) for at in mesh.worker_groups()]
    assert [rank for group in worker_groups for rank in group] == list(range(mesh.size))
    for (data, stage), worker_group in zip(mesh.worker_groups(), worker_groups, strict=True):
        assert len(worker_group) == mesh.cell_size
        places = [coordinates(mesh)[rank] for rank in worker_group]
        assert {(place["data"], place["stage"]) for place in places} == {(data, stage)}


@given(MESHES, st.data())
def test_group_of_an_axis_has_workers_that_differ_in_it(mesh, data):
    rank = data.draw(st.integers(0, mesh.size - 1))
    places = coordinates(mesh)
    assert len(places) == mesh.size
    for axis, degree in mesh.degrees:
        others = {**places[rank], axis: None}
        group = [at for at in places if {**places[at], axis: None} == others]
        assert mesh.group(axis, rank) == tuple(group)
        assert len(group) == degree


def test_last_axis_changes_fastest():
    mesh = Mesh(data=2, cfg=2, ulysses=2)
    groups = {axis: mesh.group(axis, 5) for axis in ("ulysses", "cfg", "data")}
    assert groups == {"ulysses": (4, 5), "cfg": (5, 7), "data": (1, 5)}
    assert list(mesh.worker_group(1, 0)) == [4, 5, 6, 7]
    assert str(Mesh()) == "one worker"
    assert str(Mesh(stage=2, cfg=2, ulysses=4)) == "stage 2 x cfg 2 x ulysses 4"


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"data": 0}, "data is 0: give a whole number of 1 or more"),
        ({"ring": True}, "ring is True"),
        ({"ulysses": 2.0}, "ulysses is 2.0"),
        ({"cfg": 3}, "cfg is 3: it divides the lanes of a step into two halves at most"),
    ],
)
def test_impossible_degrees_are_refused(degrees, message):
    with pytest.raises(MeshError, match=message):
        Mesh(**degrees)
