"""Wan2.2 TI2V-5B as a single model: every format, per-frame timesteps, all block kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from safetensors.torch import save_file

from wanstream.block_kernels import EXACT, BlockMath
from wanstream.block_kernels.block_math import TorchMath
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import save_expert_gguf
from wanstream.tests.support.quantised_files import matrices
from wanstream.tests.support.rounding import ROUNDING
from wanstream.tests.support.wan_blocks import computed, diffusers_block
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.experts.open import open_experts, open_single_model
from wanstream.wan.lora.file import open_lora
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler
from wanstream.wan.transformer.per_frame_timestep import (
    FrameModulation,
    Modulation,
    frame_timesteps,
    row_spans,
)

SHAPE = {"in_channels": 48, "layers": 3}
TIME = 937.5
FREEDOM = (0.0, 1.0, 0.25)
POLICY = OffloadPolicy.block_swap(2, 1)

Folder = Callable[..., Path]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _lane(timestep_scales: tuple[float, ...] | None = FREEDOM) -> Lane:
    return Lane(
        latents=_normal(1, 48, 3, 4, 6, seed=1),
        text=_normal(1, 7, 4096, seed=2),
        timestep_scales=timestep_scales,
    )


def _streamed(pair: ExpertPair, lanes: list[Lane]) -> list[torch.Tensor]:
    engine = pair.engine(POLICY, "cpu")
    with torch.inference_mode(), engine.run(step_visits(["high"], engine.block_counts)) as run:
        return forward_lanes(
            engine.models["high"],
            lanes,
            torch.tensor([TIME]),
            lambda block: run.visit(0, "high", block),
        )


def _reference(model: WanTransformer3DModel, lane: Lane) -> torch.Tensor:
    """Return the model's own velocity, with a timestep for every token."""
    dtype, tokens = model.patch_embedding.weight.dtype, 2 * 3
    timestep_scales = lane.timestep_scales or (1.0,) * 3
    times = (torch.tensor(timestep_scales) * TIME).repeat_interleave(tokens)[None]
    with torch.inference_mode():
        velocity: torch.Tensor = model(
            lane.latents.to(dtype), times, lane.text.to(dtype), return_dict=False
        )[0]
    return velocity


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("form", ["native", "prefixed", "fp8", "gguf", "pipeline", "shards"])
def test_it_is_known_in_every_form(
    form: str, tiny_expert_file: Folder, tiny_expert_folder: Folder, tmp_path: Path
) -> None:
    if form == "gguf":
        path = tmp_path / "wan.gguf"
        save_expert_gguf(
            WanTransformer3DModel.from_pretrained(tiny_expert_folder(**SHAPE)),
            path,
            types=matrices("F32"),
        )
    elif form == "pipeline":
        path = tmp_path / "pipeline"
        path.mkdir()
        (path / "transformer").symlink_to(tiny_expert_folder(**SHAPE))
    elif form == "shards":
        path = tiny_expert_folder(**SHAPE, shards=3)
    elif form == "prefixed":
        path = tiny_expert_file(**SHAPE, prefix="model.diffusion_model.")
    else:
        path = tiny_expert_file(**SHAPE, fp8="scaled_fp8" if form == "fp8" else None)
    folder = open_single_model(tiny_expert_folder(**SHAPE), compute_dtype=torch.float32)
    with folder, open_single_model(path, compute_dtype=torch.float32) as pair:
        config = pair.high.config
        assert (config.family, config.in_channels, config.out_channels) == ("ti2v", 48, 48)
        assert config == folder.high.config
        [found], [expected] = _streamed(pair, [_lane()]), _streamed(folder, [_lane()])
        if form == "fp8":
            assert 0 < _distance(found, expected) < 0.2
        else:
            assert torch.equal(found, expected)


def test_as_one_of_a_pair_it_is_refused(
    tiny_expert_folder: Folder, tiny_expert_file: Folder
) -> None:
    other, ours = tiny_expert_folder(), tiny_expert_file(**SHAPE)
    for pair in ((ours, ours), (ours, other), (other, ours)):
        with pytest.raises(
            CheckpointError,
            match=r"is Wan2.2 TI2V-5B \(48 channels\), .* open it as a single model",
        ):
            open_experts(*pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "timestep_scales", [None, FREEDOM, (0.0, 1.0, 1.0), (0.5, 0.5, 0.5)], ids=str
)
def test_a_lane_is_the_models_own_forward_with_a_timestep_for_every_token(
    timestep_scales: tuple[float, ...] | None, dtype: torch.dtype, tiny_expert_folder: Folder
) -> None:
    folder = tiny_expert_folder(**SHAPE)
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).requires_grad_(False)
    with open_single_model(folder, compute_dtype=dtype) as pair:
        found, company = _streamed(pair, [_lane(timestep_scales), _lane((1.0, 0.0, 1.0))])
        # A row is rounded differently in a matrix product with all tokens than alone.
        assert _distance(found, _reference(model, _lane(timestep_scales))) <= (
            1e-6 if dtype == torch.float32 else 1e-2
        )
        assert torch.equal(found, _streamed(pair, [_lane(timestep_scales)])[0]), (
            "company changes nothing"
        )
        assert not torch.equal(found, company)


@pytest.mark.parametrize("chunk", [1, 5, 7, 12, 10**6])
def test_chunks_of_any_size(chunk: int, tiny_expert_folder: Folder) -> None:
    """Chunks end within spans, and spans end within chunks."""
    with open_single_model(tiny_expert_folder(**SHAPE), compute_dtype=torch.float32) as pair:
        [expected] = _streamed(pair, [_lane()])
        settings = pair.engine(POLICY, "cpu").models.settings
        settings.chunk_tokens = chunk
        assert _distance(_streamed(pair, [_lane()])[0], expected) <= ROUNDING
        settings.chunk_tokens = None
        assert torch.equal(_streamed(pair, [_lane()])[0], expected)


@pytest.fixture
def block() -> Iterator[WanTransformerBlock]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield diffusers_block()
    torch._dynamo.reset()


def _inputs(tokens: int, rows: int) -> tuple[Any, ...]:
    angles = _normal(1, tokens, 1, 128, seed=tokens)
    spans, step = [], tokens // rows
    for row in range(rows):
        spans.append((row * step, tokens if row == rows - 1 else (row + 1) * step, row))
    modulation = FrameModulation(rows=_normal(rows, 6, 128, seed=rows), spans=tuple(spans))
    shapes = (_normal(1, tokens, 128, seed=1), _normal(1, 3, 128, seed=2))
    return (*shapes, modulation, (angles.cos(), angles.sin()))


def _by_token(given: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, text, modulation, rotary = given
    return hidden, text, modulation.rows[modulation.row_of_token][None], rotary


@pytest.mark.parametrize("math", [EXACT, TorchMath()], ids=lambda math: math.name)
def test_blocks_compute_it_in_every_way(math: BlockMath, block: WanTransformerBlock) -> None:
    """Compare span rows with diffusers' block, given a row for every token."""
    given = _inputs(40, 2)
    expected = block(*_by_token(given))
    ours = WanBlock(block, BlockSettings(math=math))
    for compiler, chunk in ((None, None), (None, 16), (get_compiler("eager"), None)):
        found = computed(ours, *given, compiler=compiler, chunk_tokens=chunk)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), (compiler, chunk)


@pytest.mark.slow  # whole models
def test_graphs_are_one_for_any_number_of_timesteps(block: WanTransformerBlock) -> None:
    """Expect one more graph for lanes whose frames share a timestep."""
    compiler, settings = get_compiler("eager"), BlockSettings(compiler=get_compiler("eager"))
    blocks = [WanBlock(each, settings) for each in (block, diffusers_block(seed=1))]
    counted = []
    for tokens, rows in ((40, 2), (40, 2), (40, 3), (40, 4)):
        before = compiler.graphs
        for each in blocks:
            computed(each, *_inputs(tokens, rows))
        counted.append(compiler.graphs - before)
    assert counted == [1, 0, 0, 0]
    before = compiler.graphs
    hidden, text, modulation, tables = _inputs(40, 2)
    for each in blocks:
        computed(each, hidden, text, modulation.rows[:1], tables)
    assert compiler.graphs - before == 1


def test_spans_of_all_tokens_and_of_a_part_of_them() -> None:
    assert row_spans([(0, 4), (1, 4), (1, 4)], lambda tokens: tokens) == ((0, 4, 0), (4, 12, 1))
    second = row_spans([(0, 4), (1, 4), (1, 4)], lambda tokens: tokens.chunk(4, dim=1)[1])
    assert second == ((0, 1, 0), (1, 3, 1)), "a part begins within a frame"
    last = row_spans([(0, 4), (1, 4), (1, 4)], lambda tokens: tokens.chunk(4, dim=1)[3])
    assert last == ((0, 3, 1),)
    spans = row_spans([(0, 4), (1, 4), (0, 4)], lambda tokens: tokens)
    assert Modulation((), spans).part(slice(2, 9)).spans == ((0, 2, 0), (2, 6, 1), (6, 7, 0))
    modulation = FrameModulation(rows=torch.zeros(2, 6, 1), spans=second)
    assert modulation.row_of_token.tolist() == [0, 1, 1]


def test_timesteps_are_float32_products() -> None:
    assert frame_timesteps((0.0, 1.0), 937.5) == (0.0, 937.5)
    assert frame_timesteps((0.1,), 0.3) == (float(torch.tensor(0.1) * 0.3),)


def test_no_token_gets_a_copy_of_its_rows(block: WanTransformerBlock) -> None:
    """Whole or in chunks, no tensor with six rows per token is created."""
    given = _inputs(4096, 2)
    everything = 4096 * 6 * 128
    made: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                made.append(found.untyped_storage().nbytes() // 4)
            return found

    with Sizes():
        block(*_by_token(given))
    assert max(made) == everything
    ours = WanBlock(block, BlockSettings(math=TorchMath()))
    for chunk in (None, 512):
        made.clear()
        with Sizes():
            computed(ours, *given, chunk_tokens=chunk)
        assert max(made) < everything / 2


def test_memory_is_known_before_anything_is_read(tiny_expert_folder: Folder) -> None:
    with open_single_model(tiny_expert_folder(**SHAPE), compute_dtype=torch.float32) as pair:
        predicted = pair.device_bytes(POLICY, device="cpu")
        engine = pair.engine(POLICY, "cpu")
        engine.allocate_buffers()
        assert engine.models["high"] is not None
        assert pair.loaded_bytes == predicted


def test_a_lora_changes_what_runs_and_what_stays(
    tiny_expert_folder: Folder, tmp_path: Path
) -> None:
    folder = tiny_expert_folder(**SHAPE)
    tensors = {
        "diffusion_model.blocks.1.self_attn.q.lora_down.weight": _normal(4, 256, seed=5),
        "diffusion_model.blocks.1.self_attn.q.lora_up.weight": _normal(256, 4, seed=6),
        "diffusion_model.time_embedding.0.diff_b": _normal(256, seed=7),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    model = WanTransformer3DModel.from_pretrained(folder).requires_grad_(False)
    down, up, bias = tensors.values()
    model.blocks[1].attn1.to_q.weight += up @ down
    model.condition_embedder.time_embedder.linear_1.bias += bias
    with open_single_model(folder, compute_dtype=torch.float32) as pair:
        [before] = _streamed(pair, [_lane()])
        pair.set_loras(high=[(open_lora(tmp_path / "lora.safetensors"), 1.0)], low=[])
        [found] = _streamed(pair, [_lane()])
        assert _distance(found, _reference(model, _lane())) <= 1e-5
        assert _distance(before, found) > 1e-3
        pair.set_loras(high=[], low=[])
        assert torch.equal(_streamed(pair, [_lane()])[0], before)
