"""User-written worker descriptions, parsed."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.schema import Mesh
from wanstream.schema.refs import PathMap
from wanstream.schema.refs.workers import ARROW, WorkersError, check_count, check_degrees, path_maps

NAMES = st.from_regex(r"(/[a-z0-9_. -]*[a-z0-9])+|[A-Z]:[/\\][a-z0-9]+", fullmatch=True)


def test_path_map_has_a_folder_here_and_one_there():
    text = "/models -> /mnt/models\n\n  C:\\models->/data \n"
    found = [(each.here, each.there) for each in path_maps(text)]
    assert found == [("/models", "/mnt/models"), ("C:\\models", "/data")]
    assert path_maps("") == path_maps(" \n ") == ()


@given(pairs=st.lists(st.tuples(NAMES, NAMES), max_size=3))
def test_path_maps_survive_as_text(pairs):
    paths = tuple(PathMap(here=here, there=there) for here, there in pairs)
    assert path_maps("\n".join(f"{path.here} {ARROW} {path.there}" for path in paths)) == paths


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/models", "line 1 of the path map is '/models': write the folder here, ->, and the"),
        ("/a -> /b\n/c -> ", "line 2 of the path map is '/c ->'"),
        ("/a -> /b -> /c", "line 1 .* write the folder here"),
        ("/a => /b", "line 1 .* write the folder here"),
        ("models -> /b", "line 1 of the path map: 'models' is not an absolute path"),
        ("/a -> ../b", "line 1 of the path map: '../b' is not an absolute path"),
    ],
)
def test_bad_line_of_a_path_map_is_named(text, said):
    with pytest.raises(WorkersError, match=said):
        path_maps(text)


@pytest.mark.parametrize(
    ("count", "address", "gpus", "said"),
    [
        (2, "local", 2, ""),
        (8, "local", None, ""),
        (8, "h:1", 2, ""),
        (1, "in-process", 1, ""),
        (3, "local", 2, "3 workers, but 2 GPUs here: .* Lower count to 2"),
        (2, "local", 1, "2 workers, but 1 GPU here"),
        (2, "in-process", None, "2 workers in this process: there can be one"),
        (0, "local", None, "0 workers: give 1 to 64"),
        (65, "h:1", None, "65 workers: give 1 to 64"),
    ],
)
def test_more_workers_than_there_is_room_for_are_refused(count, address, gpus, said):
    with pytest.raises(WorkersError, match=said) if said else nullcontext():
        check_count(count, address, gpus=gpus, most=64)


def test_degrees_multiply_to_the_workers_and_divide_the_heads():
    check_degrees(Mesh(data=2, cfg=2), 4)
    check_degrees(Mesh(ulysses=8), 8)
    with pytest.raises(WorkersError, match=r"is 2 x 1 x 2 x 1 x 1 = 4, and there are 3 workers"):
        check_degrees(Mesh(data=2, cfg=2), 3)
    with pytest.raises(WorkersError, match=r"ulysses 3 .* 40 attention heads: give one of 1, 2"):
        check_degrees(Mesh(ulysses=3), 3)
