"""Opening of pairs: the registry of open experts, and refused files."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.schema.refs.experts import ExpertsRef
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import ExpertsRegistry, open_experts, open_pair


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
    def open_pair(ref: ExpertsRef) -> Any:
        if ref.high_noise == Path("bad"):
            raise OSError("bad file")
        log.append(f"open {ref.high_noise}")
        return FakePair(ref, log)

    return ExpertsRegistry(open_pair)


def _ref(name: str, dtype: str = "bfloat16") -> ExpertsRef:
    return ExpertsRef(high_noise=Path(name), compute_dtype=dtype)


def test_equal_reference_finds_the_pair_open(registry, log):
    assert registry.get(_ref("a")) is registry.get(_ref("a"))
    assert log == ["open a"]


def test_replaced_files_are_opened_again(registry, log):
    registry.get(_ref("changing"))
    registry.get(_ref("changing"))
    assert log == ["open changing", "close changing", "open changing"]


@pytest.mark.parametrize(
    "other", [_ref("b"), _ref("a", "float32"), replace(_ref("a"), storage="fp8")]
)
def test_another_pair_closes_the_former_one_first(registry, log, other):
    registry.get(_ref("a"))
    assert registry.get(other).ref == other  # type: ignore[attr-defined]
    assert log == ["open a", "close a", f"open {other.high_noise}"]


def test_storage_of_the_reference_is_used(tiny_expert_file):
    ref = ExpertsRef(high_noise=tiny_expert_file(), low_noise=tiny_expert_file())
    registry = ExpertsRegistry(open_pair)
    plain = registry.get(ref)
    kept = registry.get(replace(ref, storage="fp8"))
    forms = (plain.block_bytes.quantised_to, kept.block_bytes.quantised_to)
    assert forms == ("as stored", "fp8")
    registry.free()


def test_free_and_failures_close_and_the_next_get_opens(registry, log):
    registry.free()
    registry.get(_ref("a"))
    registry.free()
    registry.free()
    registry.get(_ref("a"))
    assert log == ["open a", "close a", "open a"]
    with pytest.raises(OSError, match="bad file"):
        registry.get(_ref("bad"))
    registry.free()
    assert log[3:] == ["close a"]
    registry.get(_ref("a"))
    assert log[4:] == ["open a"]


def test_threads_open_one_pair(registry, log):
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


def test_missing_experts_are_refused(tiny_expert_file, tiny_expert_folder, tmp_path):
    for high in (tiny_expert_file(), tiny_expert_folder()):
        with pytest.raises(CheckpointError, match="is one expert: give the low-noise expert too"):
            open_experts(high)
    with pytest.raises((OSError, ValueError), match=r"absent.*does not exist"):
        open_experts(tmp_path / "absent")
    (tmp_path / "transformer").mkdir()
    with pytest.raises(CheckpointError, match="has no transformer_2"):
        open_experts(tmp_path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"in_channels": 36}, r"is I2V, but the high-noise expert .* is T2V"),
        ({"layers": 3}, "num_layers is 3 .* 4"),
        ({"heads": 1}, "heads is 1 .* 2"),
        ({"ffn_dim": 256}, "ffn_dim is 256"),
    ],
)
def test_unequal_experts_are_refused(tiny_expert_file, shape, message):
    with pytest.raises(CheckpointError, match=message):
        open_experts(tiny_expert_file(), tiny_expert_file(**shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": torch.float64}, "compute_dtype"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
        ({"storage": "int8"}, "storage is 'int8'; .* 'as stored' or 'fp8' or 'int8 ConvRot'"),
    ],
)
def test_other_options_are_refused(tiny_expert_file, options, message):
    with pytest.raises(ValueError, match=message):
        open_experts(tiny_expert_file(), tiny_expert_file(), **options)
