"""Expert paths on a worker's machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.distributed import path_map
from wanstream.distributed.messages import WorkerFacts
from wanstream.schema.refs import ExpertsRef, LoraRef, PathMap

MODELS = PathMap(here="/models", there="/mnt/share/models")
LORAS = PathMap(here="/models/loras", there="/fast/loras")
ROOT = PathMap(here="/", there="/net/desk")
DATA = PathMap(here="/models", there="/data")
WINDOWS = PathMap(here="/models", there="D:\\models")

FACTS = WorkerFacts(pid=1, node="rack", address="127.0.0.1", device="cpu", versions={})
HIGH = "/models/a/high.safetensors"
LORA = "/models/loras/l"


@pytest.mark.parametrize(
    ("path", "maps", "there"),
    [
        (HIGH, (), []),
        (HIGH, (MODELS,), ["/mnt/share/models/a/high.safetensors"]),
        ("/models", (MODELS,), ["/mnt/share/models"]),
        ("/models2/high.safetensors", (MODELS,), []),
        (LORA, (LORAS, MODELS), ["/fast/loras/l", "/mnt/share/models/loras/l"]),
        ("/models/high", (LORAS, MODELS), ["/mnt/share/models/high"]),
        ("/anything", (MODELS, ROOT), ["/net/desk/anything"]),
        (HIGH, (WINDOWS,), ["D:\\models\\a\\high.safetensors"]),
        ("/models/x", (MODELS, DATA, MODELS), ["/mnt/share/models/x", "/data/x"]),
        ("/models/high", (PathMap(here="/models", there="/models"),), []),
    ],
)
def test_places_of_a_mapped_path(path, maps, there):
    assert [str(place) for place in path_map.places(Path(path), maps)] == [*there, path]


def test_a_path_resolves_to_the_first_place_that_exists(tmp_path):
    here, first, second = (tmp_path / name for name in ("here", "first", "second"))
    maps = tuple(PathMap(here=str(here), there=str(there)) for there in (first, second))
    # A path that exists nowhere resolves to the first place.
    assert path_map.resolve_path(here / "high", maps) == first / "high"
    for folder in (here, second, first):
        folder.mkdir()
        (folder / "high").touch()
        assert path_map.resolve_path(here / "high", maps) == folder / "high"
    assert path_map.resolve_path(here / "high", ()) == here / "high"


def test_every_path_of_the_experts_is_located_and_nothing_else(tmp_path):
    maps = (PathMap(here="/models", there=str(tmp_path)),)
    for name in ("pair", "low", "l.safetensors"):
        (tmp_path / name).touch()
    lora = LoraRef(high_noise=Path("/models/l.safetensors"), strength_high=0.5)
    given = {"compute_dtype": "float32", "storage": "fp8", "loras": (lora,)}
    experts = ExpertsRef(high_noise=Path("/models/pair"), **given)
    there = replace(lora, high_noise=tmp_path / "l.safetensors")
    wanted = replace(experts, high_noise=tmp_path / "pair", loras=(there,))
    assert path_map.resolve_experts(experts, maps) == wanted
    both = replace(experts, low_noise=Path("/models/low"))
    assert path_map.resolve_experts(both, maps).low_noise == tmp_path / "low"
    assert path_map.resolve_experts(both, ()) == both
    low = replace(both, loras=(LoraRef(low_noise=Path("/models/l.safetensors")),))
    assert path_map.resolve_experts(low, maps).loras == (
        LoraRef(low_noise=tmp_path / "l.safetensors"),
    )


def test_paths_of_experts_are_told_once_each():
    lora = LoraRef(high_noise=Path("/l"), low_noise=Path("/l"))
    loras = (lora, replace(lora, low_noise=None))
    experts = ExpertsRef(high_noise=Path("/high"), low_noise=Path("/low"), loras=loras)
    assert path_map.paths_of(experts) == (Path("/high"), Path("/low"), Path("/l"))
    assert path_map.paths_of(ExpertsRef(high_noise=Path("/pair"))) == (Path("/pair"),)


def test_a_missing_path_is_told_with_its_machines():
    path_map.check_paths([FACTS, FACTS], ())
    rack = replace(FACTS, sizes={"/high": None, "/low": None})
    workers = [replace(FACTS, node="desk"), rack, rack]
    workers.append(replace(FACTS, node="box", sizes={"/low": None}))
    with pytest.raises(path_map.MissingPathError) as refused:
        path_map.check_paths(workers, (MODELS,))
    missing = "/high does not exist on rack; /low does not exist on rack and box"
    assert f"{missing}: copy the file there" in str(refused.value)
    assert "the map is /models -> /mnt/share/models" in str(refused.value)
    with pytest.raises(path_map.MissingPathError, match="the map is empty"):
        path_map.check_paths(workers, ())
    places_there = "/mnt/share/models/high or /models/high does not exist on rack: "
    with pytest.raises(path_map.MissingPathError, match=f"^{places_there}"):
        path_map.check_paths([replace(FACTS, sizes={"/models/high": None})], (MODELS,))


def test_weights_of_a_path(tmp_path):
    for name, nbytes in (("a.safetensors", 3), ("b.gguf", 4), ("notes.md", 50)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.safetensors").write_bytes(bytes(100))
    assert path_map.weight_bytes(tmp_path) == 7
    assert path_map.weight_bytes(tmp_path / "a.safetensors") == 3


def test_other_weights_under_one_path_are_noticed():
    """Each machine alone would compute, but their videos or sides would not fit together."""
    desk = replace(FACTS, node="desk", sizes={"/models/high": 28, "/models/low": 30})
    rack = replace(desk, node="rack")
    path_map.check_paths([desk, rack, desk], ())
    other = replace(rack, sizes={"/models/high": 28, "/models/low": 31})
    said = r"/models/low have 30 bytes on desk and 31 bytes on rack: .*same files"
    with pytest.raises(path_map.DifferentFilesError, match=said):
        path_map.check_paths([desk, desk, other], ())
