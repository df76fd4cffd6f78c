"""Time and text embedders: brief loading, as few reads as possible, rows equal to the model's."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.offload.sources import InsufficientRamError, read_tensors
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.wan_fixtures import wait_for_embedders
from wanstream.wan import ExpertPair
from wanstream.wan.checkpoint.meta_model import embedder_part
from wanstream.wan.experts.engine import ExpertEngine
from wanstream.wan.experts.models import ExpertModels
from wanstream.wan.experts.open import open_experts
from wanstream.wan.transformer.embedders import MAX_EXTRA_ROWS, CachedEmbedder

H, L = "high", "low"
TIMES = {H: [999.0, 937.5], L: [833.3, 625.0, 3.0]}


def _text(seed: int, tokens: int = 5) -> torch.Tensor:
    return torch.randn(1, tokens, 4096, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[ExpertPair]:
    folders = [tiny_expert_folder(seed=seed) for seed in (1, 2)]
    with open_experts(*folders, compute_dtype=torch.bfloat16) as pair:
        yield pair


@pytest.fixture
def engine(pair: ExpertPair) -> ExpertEngine:
    return pair.engine(OffloadPolicy.layerwise(), "cpu")


def _part_bytes(pair: ExpertPair, part: str) -> int:
    return sum(
        tensor.nbytes for name, tensor in pair.high.weights.items() if embedder_part(name) == part
    )


def _embedder(engine: ExpertEngine, expert: str) -> CachedEmbedder:
    embedder: CachedEmbedder = engine.models[expert].condition_embedder
    return embedder


def _rows(engine: ExpertEngine, expert: str, time: float, *texts: torch.Tensor) -> list[Any]:
    return _embedder(engine, expert).rows(torch.tensor([time]), texts)


def _watch(engine: ExpertEngine, expert: str) -> list[tuple[str, int]]:
    """Record each embedder call from now on, with the row count."""
    seen: list[tuple[str, int]] = []
    embedder = engine.models[expert].condition_embedder
    for name in ("time_embedder", "time_proj", "text_embedder"):
        module = embedder.get_submodule(name)
        module.register_forward_hook(
            lambda _, given, __, name=name: seen.append((name, given[0].shape[:-1].numel()))
        )
    return seen


class TestRows:
    @pytest.mark.parametrize("expected_rows", [True, False])
    def test_are_those_of_the_model(
        self, pair: ExpertPair, engine: ExpertEngine, expected_rows: bool
    ) -> None:
        texts = [_text(1), _text(2, tokens=512)]
        if expected_rows:
            engine.models.prefetch_embeddings(TIMES, {H: texts, L: texts[:1]})
        for expert, loaded in ((H, pair.high), (L, pair.low)):
            whole = WanTransformer3DModel.from_pretrained(
                loaded.path, torch_dtype=torch.bfloat16
            ).condition_embedder
            for parameter in whole.parameters():
                parameter.data = parameter.data.clone()
            for time in TIMES[expert]:
                for text, rows in zip(texts, _rows(engine, expert, time, *texts), strict=True):
                    with torch.no_grad():
                        expected = whole(torch.tensor([time]), text.bfloat16(), None)
                    assert all(map(torch.equal, rows, expected))

    def test_each_is_computed_once_and_alone(self, engine: ExpertEngine) -> None:
        seen = _watch(engine, H)
        engine.models.prefetch_embeddings({H: [9.0, 8.0, 9.0]}, {H: [_text(1), _text(2), _text(1)]})
        for _ in range(3):
            for time in (9.0, 8.0):
                _rows(engine, H, time, _text(1), _text(2))
        assert (
            sorted(seen)
            == [("text_embedder", 5)] * 2 + [("time_embedder", 1)] * 2 + [("time_proj", 1)] * 2
        )

    def test_a_text_is_known_by_its_value(self, engine: ExpertEngine) -> None:
        seen, text = _watch(engine, H), _text(1)
        first = _rows(engine, H, 9.0, text)
        changed = text.clone()
        changed[0, 0, 0] += 1
        others = [text.clone(), changed, text.bfloat16(), text[:, :4]]
        rows = [_rows(engine, H, 9.0, other)[0][2] for other in others]
        assert rows[0] is first[0][2]
        assert [name for name, _ in seen].count("text_embedder") == 4

    def test_unexpected_ones_do_not_pile_up(self, engine: ExpertEngine) -> None:
        engine.models.prefetch_embeddings({H: [9.0]}, {H: [_text(1)]})
        for time in range(MAX_EXTRA_ROWS["time"] + 20):
            _rows(engine, H, 100.0 + time, _text(1))
        seen = _watch(engine, H)
        _rows(engine, H, 9.0, _text(1))
        _rows(engine, H, 100.0 + time, _text(1))
        assert seen == []
        assert len(_embedder(engine, H)._rows["time"]) <= MAX_EXTRA_ROWS["time"] + 2

    def test_they_serve_outside_inference_mode(self, engine: ExpertEngine) -> None:
        with torch.inference_mode():
            rows = _rows(engine, H, 9.0, _text(1))
        assert not any(row.is_inference() for row in rows[0])


class TestWeights:
    def test_are_there_for_a_moment_only(
        self, pair: ExpertPair, engine: ExpertEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in (H, L):
            engine.models[name]
        stored: list[weakref.ref[torch.Tensor]] = []

        def noted(tensors: Any) -> dict[str, torch.Tensor]:
            read = read_tensors(tensors)
            stored.extend(map(weakref.ref, read.values()))
            return read

        monkeypatch.setattr("wanstream.wan.experts.models.read_tensors", noted)
        resident = engine.loaded_bytes
        engine.models.prefetch_embeddings(TIMES, {H: [_text(1)], L: [_text(1)]})
        for expert in (H, L):
            _rows(engine, expert, TIMES[expert][0], _text(1))
            assert all(parameter.is_meta for parameter in _embedder(engine, expert).parameters())
        assert engine.loaded_bytes == resident
        assert wait_for_embedders(engine) == 0
        gc.collect()
        assert stored
        assert not any(tensor() is not None for tensor in stored), (
            "nothing keeps the bytes of the file"
        )

    def test_too_little_ram_is_refused_with_figures(
        self, engine: ExpertEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("wanstream.wan.experts.models.insufficient_ram", lambda nbytes: 10**8)
        with pytest.raises(
            InsufficientRamError, match=r"of the high expert, 0\.1 GB are available: keep fewer"
        ):
            _rows(engine, H, 55.0, _text(3))

    def test_an_expected_run_reads_each_once_and_the_next_equal_one_nothing(
        self, pair: ExpertPair, engine: ExpertEngine
    ) -> None:
        for name in (H, L):
            engine.models[name]
        resident, parts = (
            engine.models.non_block_bytes,
            _part_bytes(pair, "time") + _part_bytes(pair, "text"),
        )
        for _ in range(2):
            engine.models.prefetch_embeddings(TIMES, {H: [_text(1), _text(2)], L: [_text(1)]})
            for expert in (H, L):
                for time in TIMES[expert]:
                    _rows(engine, expert, time, _text(1))
            assert engine.models.non_block_bytes - resident == 2 * parts

    def test_another_text_reads_the_text_embedder_alone(
        self, pair: ExpertPair, engine: ExpertEngine
    ) -> None:
        engine.models.prefetch_embeddings({H: [9.0]}, {H: [_text(1)]})
        _rows(engine, H, 9.0, _text(1))
        read = engine.models.non_block_bytes
        engine.models.prefetch_embeddings({H: [9.0]}, {H: [_text(2)]})
        _rows(engine, H, 9.0, _text(2))
        assert engine.models.non_block_bytes - read == _part_bytes(pair, "text")
        _rows(engine, H, 7.0, _text(2))
        assert engine.models.non_block_bytes - read == _part_bytes(pair, "text") + _part_bytes(
            pair, "time"
        )

    def test_a_run_of_one_expert_leaves_the_rows_of_the_other(
        self, pair: ExpertPair, engine: ExpertEngine
    ) -> None:
        """Two samplers in a chain, one stage each, queued again and again."""
        for _ in range(2):
            for expert in (H, L):
                engine.models.prefetch_embeddings({expert: TIMES[expert]}, {expert: [_text(1)]})
                _rows(engine, expert, TIMES[expert][0], _text(1))
        embedders = 2 * (_part_bytes(pair, "time") + _part_bytes(pair, "text"))
        resident = sum(
            tensor.nbytes
            for expert in (pair.high, pair.low)
            for name, tensor in expert.weights.items()
            if embedder_part(name) is None and tensor.nbytes < 2**17
        )
        assert embedders < engine.models.non_block_bytes <= embedders + resident

    def test_the_second_experts_come_when_those_of_the_first_are_gone(
        self, pair: ExpertPair, engine: ExpertEngine
    ) -> None:
        one = _part_bytes(pair, "time") + _part_bytes(pair, "text")
        seen = _watch(engine, L)
        engine.models.prefetch_embeddings(TIMES, {H: [_text(1)], L: [_text(1)]})
        most = wait_for_embedders(engine)
        assert 0 < most <= one
        _rows(engine, H, TIMES[H][0], _text(1))
        assert 0 < wait_for_embedders(engine) <= one
        assert seen == []
        engine.models[H]  # the look-up in the first expert's next step
        assert [name for name, _ in seen].count("time_proj") == len(TIMES[L])
        assert wait_for_embedders(engine) == 0

    def test_what_was_read_for_an_expert_that_does_not_run_is_dropped(
        self, engine: ExpertEngine
    ) -> None:
        assert wait_for_embedders(engine) > 0
        engine.models.prefetch_embeddings({L: [3.0]}, {L: [_text(1)]})
        _rows(engine, L, 3.0, _text(1))
        assert wait_for_embedders(engine) == 0

    def test_closing_drops_unused_reads_and_ends_its_threads(self, pair: ExpertPair) -> None:
        before = set(threading.enumerate())
        engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
        wait_for_embedders(engine)
        pair.close()
        assert not engine.models._reads
        assert set(threading.enumerate()) == before


def test_blocks_of_both_experts_share_the_settings(engine: ExpertEngine) -> None:
    blocks = [block for stack in engine.models.blocks.values() for block in stack]
    assert all(block.settings is engine.models.settings for block in blocks)


class TestOnADevice:
    def test_weights_leave_nothing(self, gpu: Accelerator, pair: ExpertPair) -> None:
        engine = pair.engine(OffloadPolicy.layerwise(), gpu.device)
        for name in (H, L):
            engine.models[name]
        gpu.runtime.current_stream().synchronize()
        before = gpu.runtime.allocated_bytes()
        assert wait_for_embedders(engine) > 0
        engine.models.prefetch_embeddings(TIMES, {H: [_text(1)], L: [_text(1)]})
        for expert, loaded in ((H, pair.high), (L, pair.low)):
            whole = WanTransformer3DModel.from_pretrained(
                loaded.path, torch_dtype=torch.bfloat16
            ).condition_embedder
            whole.to(gpu.device)
            for time in TIMES[expert]:
                [rows] = _rows(engine, expert, time, _text(1))
                with torch.no_grad():
                    expected = whole(
                        torch.tensor([time], device=gpu.device),
                        _text(1).to(gpu.device, torch.bfloat16),
                        None,
                    )
                assert all(map(torch.equal, rows, expected))
            del whole, expected
        gpu.runtime.current_stream().synchronize()
        rows = [
            row
            for name in (H, L)
            for rows in _embedder(engine, name)._rows.values()
            for row in rows.values()
        ]
        kept = sum(tensor.nbytes for row in rows for tensor in row)
        assert gpu.runtime.allocated_bytes() - before <= kept + 512 * 20
        assert wait_for_embedders(engine) == 0


class TestNextRun:
    @pytest.mark.parametrize("new_text", [True, False])
    @pytest.mark.parametrize("source", ["pinned", "file"])
    def test_from_ram_it_finds_the_embedder_of_its_first_expert_read(
        self,
        gpu: Accelerator,
        pair: ExpertPair,
        monkeypatch: pytest.MonkeyPatch,
        source: str,
        new_text: bool,
    ) -> None:
        engine = pair.engine(OffloadPolicy.layerwise(source=source), gpu.device)
        reads: list[tuple[str, str | None]] = []
        read = ExpertModels._read
        monkeypatch.setattr(
            ExpertModels, "_read", lambda models, part: reads.append(part) or read(models, part)
        )

        def run(first: float, text: torch.Tensor) -> None:
            engine.models.prefetch_embeddings(
                {H: [first], L: [first - 100]}, {H: [text], L: [text]}
            )
            for expert, time in ((H, first), (L, first - 100)):
                _rows(engine, expert, time, text)

        run(900.0, _text(1))
        kept = wait_for_embedders(engine)
        assert kept == (
            _part_bytes(pair, "time") + _part_bytes(pair, "text") if source == "pinned" else 0
        )
        assert engine.models.kept_bytes == kept
        reads.clear()
        run(800.0, _text(2) if new_text else _text(1))
        assert wait_for_embedders(engine) == kept
        parts = ["time", "text"] if new_text else ["time"]
        high, low = ([(expert, part) for part in parts] for expert in (H, L))
        assert reads == (low + high if source == "pinned" else high + low)
        assert engine.pinned_bytes - engine.ram.locked_bytes == engine.models.pinned_bytes
        assert (engine.models.pinned_bytes > 0) == (source == "pinned")
        _embedder(engine, L).invalidate("text")
        text = _text(2) if new_text else _text(1)
        engine.models.prefetch_embeddings({H: [800.0], L: [700.0]}, {H: [text], L: [text]})
        assert [name for name, part in engine.models._reads if part == "text"] == [L], (
            "two embedders are in RAM"
        )
        pair.engine(OffloadPolicy.layerwise(), gpu.device)
        run(800.0, _text(2) if new_text else _text(1))
        assert wait_for_embedders(engine) == 0, "blocks are not kept in RAM any more"
