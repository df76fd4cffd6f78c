"""`forward_lanes` against the model's forward: bit-equal for one lane and for several."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.tests.support.wan_blocks import with_our_blocks
from wanstream.wan.transformer.forward import forward_lanes
from wanstream.wan.transformer.lane import Lane

DTYPES = [torch.float32, torch.bfloat16]
T2V, I2V = 16, 36


def expert(in_channels, dtype):
    """Return a tiny expert in `dtype`, except parameters kept in fp32 by `from_pretrained`."""
    torch.manual_seed(in_channels)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        num_layers=3,
        ffn_dim=256,
        text_dim=64,
        in_channels=in_channels,
        out_channels=16,
    )
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def lanes_for(model, shapes):
    """Return one lane for each (frames, height, width, tokens)."""
    generator = torch.Generator().manual_seed(1)
    return [
        Lane(
            latents=torch.randn(1, model.config.in_channels, *size, generator=generator),
            text=torch.randn(1, tokens, 64, generator=generator),
        )
        for *size, tokens in shapes
    ]


def model_forward(model, lane, timestep):
    return model(
        hidden_states=lane.latents.to(model.patch_embedding.weight.dtype),
        timestep=timestep,
        encoder_hidden_states=lane.text.to(model.patch_embedding.weight.dtype),
        return_dict=False,
    )[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_channels", [T2V, I2V])
@pytest.mark.parametrize("time", [1000.0, 875.25, 3.5])
def test_a_lane_equals_the_models_own_forward(in_channels, dtype, time):
    model = expert(in_channels, dtype)
    timestep = torch.tensor([time])
    [lane] = lanes_for(model, [(3, 8, 12, 7)])
    [velocity] = forward_lanes(
        with_our_blocks(model), [lane], timestep, lambda block: nullcontext()
    )
    assert velocity.shape == (1, 16, 3, 8, 12)
    assert torch.equal(velocity, model_forward(model, lane, timestep))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_channels", [T2V, I2V])
def test_lanes_of_any_shape_equal_separate_forwards(in_channels, dtype):
    model = expert(in_channels, dtype)
    timestep = torch.tensor([900.0])
    lanes = lanes_for(model, [(3, 8, 12, 7), (3, 8, 12, 31), (1, 6, 4, 1), (5, 12, 8, 512)])
    velocities = forward_lanes(with_our_blocks(model), lanes, timestep, lambda block: nullcontext())
    for velocity, lane in zip(velocities, lanes, strict=True):
        assert torch.equal(velocity, model_forward(model, lane, timestep))


@pytest.mark.parametrize("in_channels", [T2V, I2V])
@pytest.mark.parametrize("size", [(9, 8), (7, 9), (8, 5), (1, 1), (45, 6)])
def test_odd_sides_repeat_the_first_row_and_column(in_channels, size):
    """A lane with odd sides beside one with even sides."""
    model = expert(in_channels, torch.float32)
    lanes = lanes_for(model, [(3, *size, 7), (1, 4, 4, 3)])
    rows, columns = (torch.arange(side + side % 2) % side for side in size)
    whole = replace(lanes[0], latents=lanes[0].latents[..., rows, :][..., columns])
    timestep = torch.tensor([875.0])
    velocity, other = forward_lanes(
        with_our_blocks(model), lanes, timestep, lambda block: nullcontext()
    )
    assert torch.equal(velocity, model_forward(model, whole, timestep)[..., : size[0], : size[1]])
    assert torch.equal(other, model_forward(model, lanes[1], timestep))
    assert (
        lanes[0].tokens((1, 2, 2)) == whole.tokens((1, 2, 2)) == 3 * len(rows) * len(columns) // 4
    )


def test_each_block_is_visited_once_for_all_lanes_and_computes_inside_its_visit():
    model = with_our_blocks(expert(T2V, torch.float32))
    events = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: events.append(f"block {index}"))

    @contextmanager
    def visit(index):
        events.append(f"enter {index}")
        yield
        events.append(f"leave {index}")

    forward_lanes(
        model, lanes_for(model, [(1, 4, 4, 3), (1, 4, 4, 5)]), torch.tensor([500.0]), visit
    )
    assert events == [
        event
        for i in range(3)
        for event in (f"enter {i}", f"block {i}", f"block {i}", f"leave {i}")
    ]


def test_hooks_of_the_outer_modules_fire():
    """Context parallelism hooks these modules. Calling their submodules would bypass it."""
    model = expert(T2V, torch.float32)
    fired = []
    for name in ("rope", "patch_embedding", "condition_embedder", "proj_out"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    forward_lanes(
        with_our_blocks(model),
        lanes_for(model, [(1, 4, 4, 3)]),
        torch.tensor([500.0]),
        lambda block: nullcontext(),
    )
    assert sorted(fired) == ["condition_embedder", "patch_embedding", "proj_out", "rope"]
