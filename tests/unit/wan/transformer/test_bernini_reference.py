"""Float64 Bernini-R reference: text to video as in diffusers, contexts by definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.embeddings import get_timestep_embedding

from wanstream.tests.support.bernini_reference import (
    MEAN,
    STD,
    Tensors,
    bernini_forward,
    position_angles,
    source_angles,
    timestep_sinusoid,
)
from wanstream.wan.checkpoint.key_names import native_transformer_name

EXACT = 1e-10
LATENT, TEXT = (2, 16, 3, 4, 6), (2, 5, 64)
GRID, HEAD_DIM = (3, 2, 3), 128
TIMESTEPS = torch.tensor([987.25, 30.5], dtype=torch.float64)


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _raw(latent: torch.Tensor) -> torch.Tensor:
    mean, std = (
        torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1, 1) for each in (MEAN, STD)
    )
    return latent * std + mean


@pytest.fixture
def model(
    make_tiny_expert: Callable[..., WanTransformer3DModel], monkeypatch: pytest.MonkeyPatch
) -> WanTransformer3DModel:
    """Tiny expert with float64 arithmetic throughout.

    Casts to fp32 in diffusers are replaced, and so are the tables.
    """
    model = make_tiny_expert(seed=4, layers=3, text_dim=TEXT[-1]).double()
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    sizes = (44, 42, 42)
    frequencies = [
        10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size) for size in sizes
    ]
    angles = torch.cat(
        [torch.outer(torch.arange(1024.0).double(), each) for each in frequencies], dim=1
    )
    for name in ("cos", "sin"):
        table = getattr(angles, name)().repeat_interleave(2, dim=1)
        # diffusers' own fp32 table is this one rounded.
        torch.testing.assert_close(
            getattr(model.rope, f"freqs_{name}").double(), table, rtol=0, atol=1e-7
        )
        setattr(model.rope, f"freqs_{name}", table)
    monkeypatch.setattr(model.condition_embedder.timesteps_proj, "forward", timestep_sinusoid)
    return model


@pytest.fixture
def weights(model: WanTransformer3DModel) -> Tensors:
    """The model's weights by native name."""
    return {native_transformer_name(name): tensor for name, tensor in model.state_dict().items()}


@pytest.fixture
def forward(weights: Tensors) -> Callable[..., torch.Tensor]:
    """`forward(contexts=(), source_ids=None)`: the reference for fixed latent, timesteps, texts."""

    def forward(contexts: Sequence[torch.Tensor] = (), **settings: object) -> torch.Tensor:
        latent, text = _normal(*LATENT, seed=1), _normal(*TEXT, seed=2)
        return bernini_forward(weights, latent, TIMESTEPS, text, contexts, **settings)

    return forward


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


pytestmark = pytest.mark.usefixtures("no_gradients")


def _contexts() -> list[torch.Tensor]:
    """A canvas-sized video, a shorter one, and a picture with another aspect ratio."""
    sizes = ((3, 4, 6), (2, 4, 6), (1, 6, 4))
    return [_raw(_normal(1, 16, *size, seed=3 + i)) for i, size in enumerate(sizes)]


def test_without_contexts_it_is_the_text_to_video_transformer(
    model: WanTransformer3DModel, forward: Callable[..., torch.Tensor]
) -> None:
    expected = model(
        _normal(*LATENT, seed=1), TIMESTEPS, _normal(*TEXT, seed=2), return_dict=False
    )[0]
    found = forward()
    assert found.dtype == expected.dtype == torch.float64
    assert _distance(found, expected) <= EXACT


def test_one_timestep_is_that_of_every_sample(weights: Tensors) -> None:
    latent, text = _normal(*LATENT, seed=1), _normal(*TEXT, seed=2)
    both = bernini_forward(weights, latent, 500.0, text, _contexts())
    for i in range(2):
        alone = bernini_forward(
            weights, latent[i : i + 1], torch.tensor([500.0]), text[i : i + 1], _contexts()
        )
        assert _distance(alone, both[i : i + 1]) <= EXACT


def test_the_sinusoid_is_the_one_of_diffusers_rounded(forward: Callable[..., torch.Tensor]) -> None:
    rounded = get_timestep_embedding(TIMESTEPS, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(timestep_sinusoid(TIMESTEPS), rounded.double(), rtol=0, atol=1e-4)
    assert 0 < _distance(forward(sinusoid=rounded), forward()) < 1e-3


def test_angles_are_those_of_the_definition() -> None:
    angles, further = position_angles(GRID, HEAD_DIM), source_angles(HEAD_DIM)
    assert angles.shape == (math.prod(GRID), HEAD_DIM // 2)
    # Token 16 is at time 2, row 1, column 1; axes begin at the pairs 0, 22 and 43.
    assert angles[16, 1].item() == pytest.approx(2 * 10000 ** (-2 / 44), rel=1e-14)
    assert angles[16, 22:24].tolist() == pytest.approx([1, 10000 ** (-2 / 42)], rel=1e-14)
    assert angles[16, 43:45].tolist() == pytest.approx([1, 10000 ** (-2 / 42)], rel=1e-14)
    assert angles[0].abs().max() == 0
    assert further[[0, 1, 63]].tolist() == pytest.approx(
        [1, 10000 ** (-2 / 128), 10000 ** (-126 / 128)], rel=1e-14
    )


def test_contexts_are_tokens_behind_the_video_in_diffusers_blocks(
    model: WanTransformer3DModel, forward: Callable[..., torch.Tensor]
) -> None:
    """diffusers' blocks over the joined tokens, cut before the head.

    Tokens are turned by `exp(i s f)` as complex numbers.
    """
    contexts, latent = _contexts(), _normal(*LATENT, seed=1)
    mean, std = (
        torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1, 1) for each in (MEAN, STD)
    )
    streams = [latent, *((each - mean).div(std).repeat(2, 1, 1, 1, 1) for each in contexts)]
    tables = []
    for source, stream in enumerate(streams):
        cos, sin = (table[..., ::2] for table in model.rope(stream))
        further = source * 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        turned = torch.complex(cos, sin) * torch.exp(1j * further)
        tables.append([part.repeat_interleave(2, dim=-1) for part in (turned.real, turned.imag)])
    rotary = tuple(torch.cat(parts, dim=1) for parts in zip(*tables, strict=True))
    tokens = torch.cat([model.patch_embedding(stream).flatten(2).mT for stream in streams], dim=1)
    time_rows, six_rows, text, _ = model.condition_embedder(TIMESTEPS, _normal(*TEXT, seed=2), None)
    for block in model.blocks:
        tokens = block(tokens, text, six_rows.unflatten(1, (6, -1)), rotary)
    shift, scale = (model.scale_shift_table + time_rows.unsqueeze(1)).chunk(2, dim=1)
    rows = model.proj_out(model.norm_out(tokens[:, : math.prod(GRID)]) * (1 + scale) + shift)
    expected = rows.reshape(2, *GRID, 1, 2, 2, 16).permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(LATENT)
    found = forward(contexts)
    assert _distance(found, expected) <= EXACT
    assert _distance(found, forward()) > 0.1


def test_the_order_of_streams_matters_by_their_ids_alone(
    forward: Callable[..., torch.Tensor],
) -> None:
    first, second, third = _contexts()
    expected = forward([first, second, third])
    assert torch.equal(forward([first, second, third], source_ids=(1, 2, 3)), expected)
    assert _distance(forward([second, third, first], source_ids=(2, 3, 1)), expected) <= EXACT
    assert _distance(forward([second, third, first]), expected) > 1e-3


def test_a_copy_of_the_video_with_id_0_changes_nothing(
    forward: Callable[..., torch.Tensor],
) -> None:
    """Every key is there twice, at the same position, so all averages remain.

    With id 1 they do not.
    """
    copy, plain = _raw(_normal(*LATENT, seed=1)), forward()
    assert _distance(forward([copy], source_ids=(0,)), plain) <= EXACT
    assert _distance(forward([copy, copy], source_ids=(0, 0)), plain) <= EXACT
    assert _distance(forward([copy], source_ids=(1,)), plain) > 1e-3
    assert _distance(forward([_normal(*LATENT, seed=1)], source_ids=(0,)), plain) > 1e-3, (
        "contexts are raw"
    )


def test_a_latent_that_does_not_divide_into_patches_is_refused(
    forward: Callable[..., torch.Tensor],
) -> None:
    with pytest.raises(
        ValueError, match=r"a latent of \(1, 5, 4\) does not divide into patches of \(1, 2, 2\)"
    ):
        forward([torch.zeros(1, 16, 1, 5, 4)])
