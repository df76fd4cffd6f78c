"""`forward_lanes` against the model's forward: bit-equal for one lane and for several."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.tests.support.wan.blocks import with_our_blocks
from wanstream.tests.support.wan.opened_experts import plain_velocity
from wanstream.wan import Lane, forward_lanes

T2V = 16
I2V = 36


@pytest.fixture
def expert(make_tiny_expert):
    """Return `expert(in_channels, dtype)`: a tiny expert as from `from_pretrained`."""

    def make(in_channels, dtype=torch.float32):
        model = make_tiny_expert(layers=3, ffn_dim=256, text_dim=64, in_channels=in_channels)
        for name, parameter in model.named_parameters():
            if not set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules):
                parameter.data = parameter.data.to(dtype)
        return model

    return make


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


def forward(model, lanes, time, visit=lambda block: nullcontext()):
    return forward_lanes(with_our_blocks(model), lanes, torch.tensor([time]), visit)


@pytest.mark.parametrize(
    ("in_channels", "dtype", "time"),
    [
        (T2V, torch.float32, 1000.0),
        (T2V, torch.bfloat16, 875.25),
        (I2V, torch.float32, 3.5),
        (I2V, torch.bfloat16, 1000.0),
    ],
)
def test_lanes_alone_and_together_equal_the_models_own_forward(expert, in_channels, dtype, time):
    model = expert(in_channels, dtype)
    shapes = [(3, 8, 12, 7), (3, 8, 12, 31), (1, 6, 4, 1), (2, 12, 8, 512)]
    lanes = lanes_for(model, shapes if time < 1000 else shapes[:1])
    for velocity, lane in zip(forward(model, lanes, time), lanes, strict=True):
        assert velocity.shape == (1, 16, *lane.latents.shape[2:])
        assert torch.equal(velocity, plain_velocity(model, lane, time))


@pytest.mark.parametrize(("in_channels", "size"), [(T2V, (9, 8)), (I2V, (7, 9)), (T2V, (1, 1))])
def test_odd_sides_repeat_the_first_row_and_column(expert, in_channels, size):
    """A lane with odd sides beside one with even sides."""
    model = expert(in_channels)
    odd, even = lanes_for(model, [(3, *size, 7), (1, 4, 4, 3)])
    rows, columns = (torch.arange(side + side % 2) % side for side in size)
    whole = replace(odd, latents=odd.latents[..., rows, :][..., columns])
    velocity, other = forward(model, [odd, even], 875.0)
    assert torch.equal(velocity, plain_velocity(model, whole, 875.0)[..., : size[0], : size[1]])
    assert torch.equal(other, plain_velocity(model, even, 875.0))
    tokens = 3 * len(rows) * len(columns) // 4
    assert odd.tokens((1, 2, 2)) == whole.tokens((1, 2, 2)) == tokens


def test_hooks_of_the_outer_modules_fire(expert):
    """Context parallelism hooks these modules. Calling their submodules would bypass it."""
    model = expert(T2V)
    fired = []
    names = ["condition_embedder", "patch_embedding", "proj_out", "rope"]
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    forward(model, lanes_for(model, [(1, 4, 4, 3)]), 500.0)
    assert sorted(fired) == names
