"""Time and text embedders: brief loading, as few reads as possible, rows equal to the model's."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch

from wanstream.offload.sources import InsufficientRamError, read_tensors
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.fixtures import wait_for_embedders
from wanstream.tests.support.wan.opened_experts import whole_model
from wanstream.wan import ExpertEngine
from wanstream.wan.checkpoint.meta_model import embedder_part
from wanstream.wan.experts.models import ExpertModels
from wanstream.wan.transformer.embedders import MAX_EXTRA_ROWS, CachedEmbedder

H = "high"
L = "low"
TIMES = {H: [999.0, 937.5], L: [833.3, 625.0, 3.0]}
BF16 = torch.bfloat16


def _text(seed: int, tokens: int = 5) -> torch.Tensor:
    return torch.randn(1, tokens, 4096, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair(open_pair):
    return open_pair(compute_dtype=BF16)


@pytest.fixture
def engine(pair):
    engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
    assert all(engine.models[name] for name in (H, L))
    return engine


def _part_bytes(pair, *parts):
    weights = pair.high.weights.items()
    return sum(tensor.nbytes for name, tensor in weights if embedder_part(name) in parts)


def _embedder(engine: ExpertEngine, expert: str) -> CachedEmbedder:
    return engine.models[expert].condition_embedder


def _rows(engine, expert, time, *texts):
    return _embedder(engine, expert).rows(torch.tensor([time]), texts)


def _expect(engine: ExpertEngine, high: list[float], *texts: torch.Tensor) -> None:
    """Announce a run of the high-noise expert."""
    engine.models.prefetch_embeddings({H: high}, {H: list(texts)})


def _expect_both(engine: ExpertEngine) -> None:
    engine.models.prefetch_embeddings(TIMES, {H: [_text(1)], L: [_text(1)]})


def _watch(engine: ExpertEngine, expert: str) -> list[tuple[str, int]]:
    """Record each embedder call from now on, with the row count."""
    seen: list[tuple[str, int]] = []
    embedder = _embedder(engine, expert)
    for name in ("time_embedder", "time_proj", "text_embedder"):
        embedder.get_submodule(name).register_forward_hook(
            lambda _, given, __, name=name: seen.append((name, given[0].shape[:-1].numel()))
        )
    return seen


@pytest.mark.parametrize("is_expected", [True, False])
def test_rows_equal_the_models(pair, engine, is_expected):
    texts = [_text(1), _text(2, tokens=512)]
    if is_expected:
        engine.models.prefetch_embeddings(TIMES, {H: texts, L: texts[:1]})
    for name, expert in ((H, pair.high), (L, pair.low)):
        whole = whole_model(expert.path, BF16).condition_embedder
        for time in TIMES[name]:
            for text, rows in zip(texts, _rows(engine, name, time, *texts), strict=True):
                expected = whole(torch.tensor([time]), text.bfloat16(), None)
                assert all(map(torch.equal, rows, expected))


def test_each_row_is_computed_once_and_alone(engine):
    seen = _watch(engine, H)
    _expect(engine, [9.0, 8.0, 9.0], _text(1), _text(2), _text(1))
    for time in (9.0, 8.0) * 3:
        _rows(engine, H, time, _text(1), _text(2))
    once = Counter([("text_embedder", 5), ("time_embedder", 1), ("time_proj", 1)])
    assert Counter(seen) == once + once


def test_text_is_known_by_its_value(engine):
    seen = _watch(engine, H)
    text = _text(1)
    first = _rows(engine, H, 9.0, text)
    changed = text.clone()
    changed[0, 0, 0] += 1
    others = [text.clone(), changed, text.bfloat16(), text[:, :4]]
    rows = [_rows(engine, H, 9.0, other)[0][2] for other in others]
    assert rows[0] is first[0][2]
    assert [name for name, _ in seen].count("text_embedder") == 4


def test_unexpected_rows_do_not_pile_up(engine):
    _expect(engine, [9.0], _text(1))
    times = [100.0 + time for time in range(MAX_EXTRA_ROWS["time"] + 20)]
    for time in times:
        _rows(engine, H, time, _text(1))
    seen = _watch(engine, H)
    for time in (9.0, times[-1]):
        _rows(engine, H, time, _text(1))
    assert seen == []
    assert len(_embedder(engine, H)._rows["time"]) <= MAX_EXTRA_ROWS["time"] + 2


def test_rows_serve_outside_inference_mode(engine):
    with torch.inference_mode():
        rows = _rows(engine, H, 9.0, _text(1))
    assert not any(row.is_inference() for row in rows[0])


def test_weights_are_there_for_a_moment_only(engine, monkeypatch):
    stored: list[weakref.ref[torch.Tensor]] = []

    def noted(tensors):
        read = read_tensors(tensors)
        stored.extend(map(weakref.ref, read.values()))
        return read

    monkeypatch.setattr("wanstream.wan.experts.models.read_tensors", noted)
    resident = engine.loaded_bytes
    _expect_both(engine)
    for expert in (H, L):
        _rows(engine, expert, TIMES[expert][0], _text(1))
        assert all(parameter.is_meta for parameter in _embedder(engine, expert).parameters())
    assert engine.loaded_bytes == resident
    assert wait_for_embedders(engine) == 0
    gc.collect()
    assert stored
    assert not any(tensor() is not None for tensor in stored), "the bytes of the file are kept"


def test_too_little_ram_is_refused_with_figures(pair, monkeypatch):
    engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
    monkeypatch.setattr("wanstream.wan.experts.models.insufficient_ram", lambda nbytes: 10**8)
    said = r"of the high expert, 0\.1 GB are available: keep fewer"
    with pytest.raises(InsufficientRamError, match=said):
        _rows(engine, H, 55.0, _text(3))


def test_expected_run_reads_each_block_once(pair, engine):
    resident = engine.models.non_block_bytes
    for _ in range(2):
        engine.models.prefetch_embeddings(TIMES, {H: [_text(1), _text(2)], L: [_text(1)]})
        for expert in (H, L):
            for time in TIMES[expert]:
                _rows(engine, expert, time, _text(1))
        assert engine.models.non_block_bytes - resident == 2 * _part_bytes(pair, "time", "text")


def test_another_text_reads_the_text_embedder_alone(pair, engine):
    read = []
    for text in (_text(1), _text(2), _text(1)):
        _expect(engine, [9.0], text)
        _rows(engine, H, 9.0, text)
        read.append(engine.models.non_block_bytes)
    _rows(engine, H, 7.0, text)
    assert read[1] - read[0] == _part_bytes(pair, "text")
    assert read[2] - read[1] == _part_bytes(pair, "text"), "rows of the last run alone are kept"
    assert engine.models.non_block_bytes - read[2] == _part_bytes(pair, "time")


def test_run_of_one_expert_leaves_the_rows_of_the_other(pair, engine):
    """Two samplers in a chain, one stage each, queued again and again."""
    resident = engine.models.non_block_bytes
    for expert in (H, L, H, L):
        engine.models.prefetch_embeddings({expert: TIMES[expert]}, {expert: [_text(1)]})
        _rows(engine, expert, TIMES[expert][0], _text(1))
    assert engine.models.non_block_bytes - resident == 2 * _part_bytes(pair, "time", "text")


def test_second_experts_come_when_those_of_the_first_are_gone(pair, engine):
    one = _part_bytes(pair, "time", "text")
    seen = _watch(engine, L)
    _expect_both(engine)
    assert 0 < wait_for_embedders(engine) <= one
    _rows(engine, H, TIMES[H][0], _text(1))
    assert 0 < wait_for_embedders(engine) <= one
    assert seen == []
    engine.models[H]  # the look-up in the first expert's next step
    assert [name for name, _ in seen].count("time_proj") == len(TIMES[L])
    assert wait_for_embedders(engine) == 0


def test_read_for_an_expert_that_does_not_run_is_dropped(pair):
    engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
    assert wait_for_embedders(engine) > 0
    engine.models.prefetch_embeddings({L: [3.0]}, {L: [_text(1)]})
    _rows(engine, L, 3.0, _text(1))
    assert wait_for_embedders(engine) == 0


def test_closing_drops_unused_reads_and_ends_its_threads(pair):
    before = set(threading.enumerate())
    engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
    wait_for_embedders(engine)
    pair.close()
    assert not engine.models._reads
    assert set(threading.enumerate()) == before


def test_blocks_of_both_experts_share_the_settings(engine):
    blocks = [block for stack in engine.models.blocks.values() for block in stack]
    assert all(block.settings is engine.models.settings for block in blocks)


def test_weights_leave_nothing_on_a_device(gpu, pair):
    engine = pair.engine(OffloadPolicy.layerwise(), gpu.device)
    assert all(engine.models[name] for name in (H, L))
    gpu.runtime.current_stream().synchronize()
    before = gpu.runtime.allocated_bytes()
    assert wait_for_embedders(engine) > 0
    _expect_both(engine)
    kept = 0
    for name, expert in ((H, pair.high), (L, pair.low)):
        whole = whole_model(expert.path, BF16).condition_embedder.to(gpu.device)
        text = _text(1).to(gpu.device, BF16)
        for time in TIMES[name]:
            [rows] = _rows(engine, name, time, _text(1))
            expected = whole(torch.tensor([time], device=gpu.device), text, None)
            assert all(map(torch.equal, rows, expected))
        cached = _embedder(engine, name)._rows.values()
        kept += sum(tensor.nbytes for rows in cached for row in rows.values() for tensor in row)
        del whole, expected, text
    gpu.runtime.current_stream().synchronize()
    assert gpu.runtime.allocated_bytes() - before <= kept + 512 * 20
    assert wait_for_embedders(engine) == 0


@pytest.mark.parametrize("new_text", [True, False])
@pytest.mark.parametrize("source", ["pinned", "file"])
def test_next_run_finds_its_first_embedder_in_ram(gpu, pair, monkeypatch, source, new_text):
    engine = pair.engine(OffloadPolicy.layerwise(source=source), gpu.device)
    reads: list[tuple[str, str | None]] = []
    own = ExpertModels._read
    monkeypatch.setattr(
        ExpertModels, "_read", lambda models, part: reads.append(part) or own(models, part)
    )

    def run(first: float, text: torch.Tensor) -> None:
        times = {H: [first], L: [first - 100]}
        engine.models.prefetch_embeddings(times, {H: [text], L: [text]})
        for expert, (time,) in times.items():
            _rows(engine, expert, time, text)

    run(900.0, _text(1))
    kept = wait_for_embedders(engine)
    is_pinned = source == "pinned"
    assert kept == (_part_bytes(pair, "time", "text") if is_pinned else 0)
    assert engine.models.kept_bytes == kept
    reads.clear()
    text = _text(2 if new_text else 1)
    run(800.0, text)
    assert wait_for_embedders(engine) == kept
    parts = ["time", "text"] if new_text else ["time"]
    high, low = ([(expert, part) for part in parts] for expert in (H, L))
    assert reads == (low + high if is_pinned else high + low)
    assert engine.pinned_bytes - engine.ram.locked_bytes == engine.models.pinned_bytes
    assert (engine.models.pinned_bytes > 0) == is_pinned
    _embedder(engine, L).invalidate("text")
    engine.models.prefetch_embeddings({H: [800.0], L: [700.0]}, {H: [text], L: [text]})
    in_ram = [name for name, part in engine.models._reads if part == "text"]
    assert in_ram == [L], "two embedders are in RAM"
    pair.engine(OffloadPolicy.layerwise(), gpu.device)
    run(800.0, text)
    assert wait_for_embedders(engine) == 0, "blocks are not kept in RAM any more"
