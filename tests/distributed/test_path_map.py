"""Paths of experts, as they are on the machine of a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.distributed.path_map import MissingPathError, check_paths, mapped, mapped_experts, paths_of
from wanstream.distributed.tasks import WorkerFacts
from wanstream.plan import ExpertsRef, LoraRef, PathMap

MODELS = PathMap(here="/models", there="/mnt/share/models")
LORAS = PathMap(here="/models/loras", there="/fast/loras")
ROOT = PathMap(here="/", there="/net/desk")
WINDOWS = PathMap(here="/models", there="D:\\models")

FACTS = WorkerFacts(
    pid=1,
    node="rack",
    address="127.0.0.1",
    device="cpu",
    device_name="CPU",
    free_bytes=None,
    wanstream="0",
    torch="0",
    diffusers="0",
    python="0",
)


@pytest.mark.parametrize(
    ("path", "maps", "there"),
    [
        ("/models/a/high.safetensors", (), "/models/a/high.safetensors"),
        ("/models/a/high.safetensors", (MODELS,), "/mnt/share/models/a/high.safetensors"),
        ("/models", (MODELS,), "/mnt/share/models"),
        ("/models2/high.safetensors", (MODELS,), "/models2/high.safetensors"),
        ("/models/loras/l.safetensors", (LORAS, MODELS), "/fast/loras/l.safetensors"),
        ("/models/loras/l.safetensors", (MODELS, LORAS), "/mnt/share/models/loras/l.safetensors"),
        ("/models/high.safetensors", (LORAS, MODELS), "/mnt/share/models/high.safetensors"),
        ("/anything", (MODELS, ROOT), "/net/desk/anything"),
        ("/models/a/high.safetensors", (WINDOWS,), "D:\\models\\a\\high.safetensors"),
    ],
)
def test_the_first_map_whose_folder_holds_a_path_counts(path: str, maps: tuple[PathMap, ...], there: str) -> None:
    assert str(mapped(Path(path), maps)) == there


def test_every_path_of_the_experts_is_mapped_and_nothing_else() -> None:
    lora = LoraRef(high_noise=Path("/models/l.safetensors"), strength_high=0.5)
    experts = ExpertsRef(high_noise=Path("/models/pair"), compute_dtype="float32", storage="fp8", loras=(lora,))
    there = mapped_experts(experts, (MODELS,))
    assert there == replace(
        experts,
        high_noise=Path("/mnt/share/models/pair"),
        loras=(replace(lora, high_noise=Path("/mnt/share/models/l.safetensors")),),
    )
    both = replace(experts, low_noise=Path("/models/low"))
    assert mapped_experts(both, (MODELS,)).low_noise == Path("/mnt/share/models/low")
    assert mapped_experts(both, ()) == both
    low = replace(both, loras=(LoraRef(low_noise=Path("/models/l.safetensors")),))
    assert mapped_experts(low, (MODELS,)).loras == (LoraRef(low_noise=Path("/mnt/share/models/l.safetensors")),)


def test_paths_of_experts_are_told_once_each() -> None:
    lora = LoraRef(high_noise=Path("/l"), low_noise=Path("/l"))
    experts = ExpertsRef(high_noise=Path("/high"), low_noise=Path("/low"), loras=(lora, replace(lora, low_noise=None)))
    assert paths_of(experts) == (Path("/high"), Path("/low"), Path("/l"))
    assert paths_of(ExpertsRef(high_noise=Path("/pair"))) == (Path("/pair"),)


def test_a_missing_path_is_told_with_its_machines() -> None:
    check_paths([FACTS, FACTS], ())
    workers = [
        replace(FACTS, node="desk"),
        replace(FACTS, node="rack", missing=("/high", "/low")),
        replace(FACTS, node="rack", missing=("/high", "/low")),
        replace(FACTS, node="box", missing=("/low",)),
    ]
    with pytest.raises(MissingPathError) as refused:
        check_paths(workers, (MODELS,))
    told = str(refused.value)
    assert "/high is not there on rack; /low is not there on rack and box: put the file there" in told
    assert "the map is /models -> /mnt/share/models" in told
    with pytest.raises(MissingPathError, match="the map is empty"):
        check_paths(workers, ())
