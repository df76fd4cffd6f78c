"""Parts next to a lane's video: Bernini's contexts, Fun's reference, positions and timesteps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from wanstream.tests.support.rounding import ROUNDING, distance
from wanstream.tests.support.sampling.runs import normal
from wanstream.tests.support.wan.blocks import with_our_blocks
from wanstream.wan import Lane, SkipDecision, forward_lanes
from wanstream.wan.transformer.forward import _local_slice
from wanstream.wan.transformer.token_parts import FROM_ORIGIN, Positions, TokenPart, layout_tables

TEXT_DIM = 64
VIDEO = (1, 16, 3, 4, 6)
TIME = 500.0
CONTEXTS = {
    "a source video": [(3, 4, 6)],
    "images of other sizes": [(1, 8, 4), (1, 2, 10)],
    "a video, a longer one, an image": [(3, 4, 6), (5, 2, 4), (1, 6, 6)],
}


def _contexts(sizes):
    return [normal(1, 16, *size, seed=10 + number) for number, size in enumerate(sizes)]


def _behind(contexts):
    return tuple(
        TokenPart(latents=context, positions=Positions(source=source))
        for source, context in enumerate(contexts, 1)
    )


def _lane(**parts: object) -> Lane:
    return Lane(latents=normal(*VIDEO, seed=1), text=normal(1, 5, TEXT_DIM, seed=2), **parts)


def _forward(model, *lanes, time=TIME):
    with torch.no_grad():
        return forward_lanes(model, lanes, torch.tensor([time]), lambda block: nullcontext())


@pytest.fixture(scope="module")
def plain(make_tiny_expert):
    return make_tiny_expert(seed=3, layers=3, text_dim=TEXT_DIM)


@pytest.fixture(scope="module")
def model(plain):
    return with_our_blocks(plain)


@torch.no_grad()
def _with_contexts(model, lane, contexts):
    """Return the velocity of diffusers' blocks over the joined tokens, cut before the head.

    Each token of source `s` is turned by `exp(i s f)`, on top of its position from the origin.
    """
    frequencies = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    tables = []
    for source, stream in enumerate((lane.latents, *contexts)):
        cos, sin = (table[..., ::2].double() for table in model.rope(stream))
        turned = torch.complex(cos, sin) * torch.exp(1j * source * frequencies)
        parts = (turned.real, turned.imag)
        tables.append([part.repeat_interleave(2, dim=-1).float() for part in parts])
    rotary = tuple(torch.cat(parts, dim=1) for parts in zip(*tables, strict=True))
    streams = [model.patch_embedding(each).flatten(2).mT for each in (lane.latents, *contexts)]
    tokens = torch.cat(streams, dim=1)
    time, six, text, _ = model.condition_embedder(torch.tensor([TIME]), lane.text, None)
    for block in model.blocks:
        tokens = block(tokens, text, six.unflatten(1, (6, -1)), rotary)
    shift, scale = (model.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
    rows = model.proj_out(model.norm_out(tokens[:, : streams[0].shape[1]]) * (1 + scale) + shift)
    return rows.reshape(1, 3, 2, 3, 1, 2, 2, 16).permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(VIDEO)


@pytest.mark.parametrize("sizes", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_are_tokens_behind_the_video(plain, model, sizes):
    contexts = _contexts(sizes)
    lane = _lane(behind=_behind(contexts))
    (velocity,) = _forward(model, lane)
    assert distance(velocity, _with_contexts(plain, lane, contexts)) <= 1e-5
    assert distance(velocity, _with_contexts(plain, lane, [])) > 0.01


def test_lanes_with_other_parts_equal_separate_passes(model):
    lanes = [_lane(), *(_lane(behind=_behind(_contexts(sizes))) for sizes in CONTEXTS.values())]
    for together, lane in zip(_forward(model, *lanes), lanes, strict=True):
        assert torch.equal(together, _forward(model, lane)[0])


def test_positions_start_anywhere_on_every_axis(model):
    own = layout_tables(model, [((3, 2, 3), FROM_ORIGIN)])
    assert all(map(torch.equal, own, model.rope(torch.empty(VIDEO)))), "diffusers' own"
    whole = layout_tables(model, [((5, 5, 5), FROM_ORIGIN)])
    placed = Positions(start=(1.0, 2.0, 0.0))
    for table, every in zip(layout_tables(model, [((2, 3, 2), placed)]), whole, strict=True):
        assert torch.equal(table, every.view(5, 5, 5, 128)[1:3, 2:5, 0:2].reshape(1, 12, 1, 128))
    between = layout_tables(model, [((1, 1, 1), Positions(start=(0.5, 0.0, 0.0)))])
    assert torch.allclose(between[0][0, 0, 0, 0], torch.tensor(0.5).cos())


def test_parts_of_a_video_equal_the_whole_video(make_tiny_expert):
    """The same tokens at the same positions, put together in another way.

    Parts have the step's timestep.
    """
    model = with_our_blocks(make_tiny_expert(seed=5, layers=3, text_dim=TEXT_DIM, in_channels=48))
    latents = normal(1, 48, 4, 4, 6, seed=1)
    whole = replace(_lane(), latents=latents, timestep_scales=(1.0, 0.0, 0.5, 1.0))
    parted = replace(
        whole,
        latents=latents[:, :, 1:3],
        timestep_scales=(0.0, 0.5),
        positions=Positions(start=(1.0, 0.0, 0.0)),
        front=(TokenPart(latents=latents[:, :, :1]),),
        behind=(TokenPart(latents=latents[:, :, 3:], positions=Positions(start=(3.0, 0.0, 0.0))),),
    )
    (expected,) = _forward(model, whole)
    (velocity,) = _forward(model, parted)
    # Not to the last bit: the patch embedding chooses its kernel by patch count.
    assert distance(velocity, expected[:, :, 1:3]) <= ROUNDING
    (untimed,) = _forward(model, replace(parted, timestep_scales=None))
    assert distance(untimed, velocity) > 0.01


def test_reference_goes_through_its_own_convolution(make_tiny_expert):
    """The same tokens as from a patch embedding with the convolution's weights."""
    model = with_our_blocks(make_tiny_expert(seed=6, layers=3, text_dim=TEXT_DIM, reference=True))
    reference = normal(1, 16, 1, 4, 6, seed=3)
    after = Positions(start=(1.0, 0.0, 0.0))
    lane = _lane(front=(TokenPart(latents=reference, through_ref_conv=True),), positions=after)
    (velocity,) = _forward(model, lane)
    assert not torch.equal(velocity, _forward(model, _lane(positions=after))[0])
    (patches,) = _forward(model, replace(lane, front=(TokenPart(latents=reference),)))
    assert not torch.equal(velocity, patches)
    model.ref_conv.weight.copy_(model.patch_embedding.weight[:, :, 0])
    model.ref_conv.bias.copy_(model.patch_embedding.bias)
    assert distance(_forward(model, lane)[0], patches) <= ROUNDING


def test_parts_count_as_tokens(model):
    lane = _lane(behind=_behind(_contexts([(3, 4, 6), (1, 8, 4)])))
    assert _lane().tokens(model.config.patch_size) == 18
    assert lane.tokens(model.config.patch_size) == 18 + 18 + 8


class Measured:
    """Block cache that skips nothing and keeps the video's place among each lane's tokens."""

    whole = False

    def __init__(self) -> None:
        self.videos: list[slice] = []

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        self.videos.append(video)

    def choose(self) -> SkipDecision:
        return SkipDecision(range(len(self.videos)), True)

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("shares", "rank", "expected"),
    [
        (1, 0, slice(6, 24)),
        (2, 0, slice(6, 16)),
        (2, 1, slice(0, 8)),
        (4, 1, slice(0, 8)),
        (4, 2, slice(0, 8)),
        (4, 3, slice(0, 0)),
        (8, 0, slice(4, 4)),
    ],
)
def test_cache_measures_the_video_alone(model, shares, rank, expected):
    """Tokens 6 to 23 among 32 are the video's. A rank has one part."""
    front = TokenPart(latents=normal(1, 16, 1, 4, 6, seed=3))
    lane = _lane(front=(front,), behind=_behind(_contexts([(1, 4, 8)])))
    seen = Measured()
    with torch.no_grad():
        found = _local_slice(slice(6, 24), 32, lambda tokens: tokens.chunk(shares, dim=1)[rank])
        forward_lanes(model, [lane], torch.tensor([TIME]), lambda _: nullcontext(), shortcut=seen)
    assert found == expected
    assert seen.videos == [slice(6, 24)]
