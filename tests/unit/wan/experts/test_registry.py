"""Registry of open experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.schema.refs.experts import ExpertsRef
from wanstream.wan.experts.open import ExpertsRegistry, open_pair


class FakePair:
    """Stand-in for an open pair."""

    def __init__(self, ref: ExpertsRef, log: list[str]) -> None:
        self.ref = ref
        self.log = log

    def is_current(self) -> bool:
        return self.ref.high_noise != Path("changing")

    def loras_are_current(self) -> bool:
        return True

    def close(self) -> None:
        self.log.append(f"close {self.ref.high_noise}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def registry(log: list[str]) -> ExpertsRegistry:
    def open_pair(ref: ExpertsRef) -> FakePair:
        if ref.high_noise == Path("bad"):
            raise OSError("bad file")
        log.append(f"open {ref.high_noise}")
        return FakePair(ref, log)

    return ExpertsRegistry(open_pair)  # type: ignore[arg-type]


def _ref(name: str, dtype: str = "bfloat16") -> ExpertsRef:
    return ExpertsRef(high_noise=Path(name), compute_dtype=dtype)


def test_an_equal_reference_finds_the_pair_open(registry: ExpertsRegistry, log: list[str]) -> None:
    first = registry.get(_ref("a"))
    assert registry.get(_ref("a")) is first
    assert log == ["open a"]


def test_a_pair_whose_files_were_replaced_is_opened_again(
    registry: ExpertsRegistry, log: list[str]
) -> None:
    registry.get(_ref("changing"))
    registry.get(_ref("changing"))
    assert log == ["open changing", "close changing", "open changing"]


@pytest.mark.parametrize(
    "other", [_ref("b"), _ref("a", "float32"), replace(_ref("a"), storage="fp8")]
)
def test_another_pair_closes_the_former_one_first(
    registry: ExpertsRegistry, log: list[str], other: ExpertsRef
) -> None:
    registry.get(_ref("a"))
    assert registry.get(other).ref == other  # type: ignore[attr-defined]
    assert log == ["open a", "close a", f"open {other.high_noise}"]


def test_a_pair_is_opened_with_the_storage_that_its_reference_names(
    tiny_expert_file: Callable[..., Path],
) -> None:
    ref = ExpertsRef(high_noise=tiny_expert_file(), low_noise=tiny_expert_file())
    registry = ExpertsRegistry(open_pair)
    plain, kept = registry.get(ref), registry.get(replace(ref, storage="fp8"))
    assert kept is not plain
    forms = (plain.block_bytes.quantised_to, kept.block_bytes.quantised_to)
    assert forms == ("as stored", "fp8")
    assert kept.block_bytes.stored < plain.block_bytes.stored
    registry.free()


def test_free_closes_and_the_next_get_opens_again(
    registry: ExpertsRegistry, log: list[str]
) -> None:
    registry.free()
    registry.get(_ref("a"))
    registry.free()
    registry.free()
    registry.get(_ref("a"))
    assert log == ["open a", "close a", "open a"]


def test_a_pair_that_cannot_be_opened_leaves_none(
    registry: ExpertsRegistry, log: list[str]
) -> None:
    registry.get(_ref("a"))
    with pytest.raises(OSError, match="bad file"):
        registry.get(_ref("bad"))
    registry.free()
    assert log == ["open a", "close a"]
    registry.get(_ref("a"))
    assert log[-1] == "open a"


def test_threads_open_one_pair(registry: ExpertsRegistry, log: list[str]) -> None:
    barrier = threading.Barrier(8)

    def get() -> None:
        barrier.wait()
        registry.get(_ref("a"))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == ["open a"]
