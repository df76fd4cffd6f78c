"""The forward pass of one expert, block by block, for several hidden states at once.

All lanes pass through a block during one visit, so the block's weights are needed once per step and not once per
lane. Every lane is computed alone (batch 1), which makes it equal, bit for bit, to a forward pass of its own. The
model's submodules are called as the model calls them: hooks on `rope`, `blocks.0` or `proj_out` fire as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...schema import OUTPUT_TOKENS
from ..experts.embedder_cache import Rows
from .block_cache import BlockCache
from .per_frame_timestep import FrameModulation, OwnTokens, frame_timesteps, pieces_of, rows_and_runs, token_runs

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

    from .nag import Texts


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One hidden state of a step: a sample under one prompt.

    `latents` is [1, C, T, h, w] in the model's space (C is 16, 36 with the image condition, or 48), `text` is
    [1, L, 4096], and `image` [1, N, 1280] is what CLIP sees in the start image. Any floating dtype; all are cast to the
    model's compute dtype. A model with an image branch needs the image and a text of 512 tokens; another one does not
    look at it, as in ComfyUI.
    """

    latents: torch.Tensor
    text: torch.Tensor
    image: torch.Tensor | None = None
    against: torch.Tensor | None = None
    """A text that is held against `text`, of any length; for models inside `attach_nag`."""
    freedom: tuple[float, ...] | None = None
    """How free each latent frame is: its timestep by the step's, for models that take that (TI2V-5B). 0 where a frame
    is given. None: 1 for all."""
    name: object = None
    """Tells which lane of a run it is, where something is kept of it from step to step."""


@dataclass(frozen=True, kw_only=True)
class _Conditions:
    """What a lane brings to every block besides its hidden state."""

    text: torch.Tensor | Texts  # [1, L, dim]; with an image branch, the image's N rows come first
    time: torch.Tensor  # [R, dim], a row for each timestep
    modulation: torch.Tensor | FrameModulation  # [1, 6, dim], or that many rows
    rotary: tuple[torch.Tensor, torch.Tensor]
    grid: tuple[int, int, int]  # patches along time, height and width


def forward_lanes(
    model: WanTransformer3DModel,
    lanes: Sequence[Lane],
    timestep: torch.Tensor,
    visit: Callable[[int], AbstractContextManager[object]],
    shortcut: BlockCache | None = None,
    own_tokens: OwnTokens | None = None,
) -> list[torch.Tensor]:
    """Return each lane's velocity [1, 16 or 48, T, h, w], in the model's compute dtype.

    `timestep` is [1], shared by the lanes; an engine's model takes it from the CPU best, as it reads the value. Inside
    `visit(i)` block i must be ready to compute; the context is entered once per block, whatever the number of lanes.
    With a `shortcut`, lanes leave out the blocks that it says, and blocks that none needs are not visited. Where
    workers share the tokens of a lane, `own_tokens` says which are computed here; None: all.
    """
    # Lanes of one shape share their positions: 77 MB at 1280x720x81.
    rotary = {lane.latents.shape[2:]: model.rope(lane.latents) for lane in lanes}
    held = [lane.against for lane in lanes if lane.against is not None]
    # Before the texts, so that what embeds timesteps is there once for all of them.
    timed = _frame_times(model, lanes, float(timestep.float()), own_tokens or _all_tokens)
    rows = _embedded(model, [*(lane.text for lane in lanes), *held], timestep)
    own, against = rows[: len(lanes)], iter(rows[len(lanes) :])
    conditions = [
        _conditions(model, lane, row, against, rotary[lane.latents.shape[2:]], timed.get(_times_key(lane)))
        for lane, row in zip(lanes, own, strict=True)
    ]
    hidden = _through_blocks(model, lanes, conditions, visit, shortcut)
    return [_velocity(model, lane, tokens) for lane, tokens in zip(conditions, hidden, strict=True)]


class _FrameTimes(NamedTuple):
    """What lanes of one shape and of the same timesteps of frames have in common."""

    time: torch.Tensor
    modulation: FrameModulation


def _times_key(lane: Lane) -> Hashable:
    return (lane.freedom, lane.latents.shape[2:])


def _frame_times(
    model: WanTransformer3DModel, lanes: Sequence[Lane], timestep: float, own: OwnTokens
) -> dict[Hashable, _FrameTimes]:
    """Of those lanes whose frames have timesteps of their own."""
    found = {}
    for lane in lanes:
        if lane.freedom is None or _times_key(lane) in found:
            continue
        times = frame_timesteps(lane.freedom, timestep)
        distinct = sorted(set(times))
        _, height, width = _grid(model, lane)
        runs = token_runs([distinct.index(time) for time in times], height * width, own)
        time, modulation = _time_rows(model, distinct)
        rows = FrameModulation(rows=modulation.unflatten(1, (6, -1)), runs=runs)
        found[_times_key(lane)] = _FrameTimes(time, rows)
    return found


def _time_rows(model: WanTransformer3DModel, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Time [R, D] and modulation [R, 6 D] of each timestep."""
    from ..experts.embedder_cache import CachedEmbedder

    embedder = model.condition_embedder
    if isinstance(embedder, CachedEmbedder):
        return embedder.time_rows(timesteps)
    no_text = model.patch_embedding.weight.new_zeros(1, 1, model.config.text_dim)
    each = [embedder(torch.tensor([time]), no_text, None)[:2] for time in timesteps]
    return torch.cat([time for time, _ in each]), torch.cat([modulation for _, modulation in each])


def _all_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


def _grid(model: WanTransformer3DModel, lane: Lane) -> tuple[int, int, int]:
    frames, height, width = lane.latents.shape[2:]
    patch_frames, patch_height, patch_width = model.config.patch_size
    return frames // patch_frames, height // patch_height, width // patch_width


def _through_blocks(
    model: WanTransformer3DModel,
    lanes: Sequence[Lane],
    conditions: Sequence[_Conditions],
    visit: Callable[[int], AbstractContextManager[object]],
    shortcut: BlockCache | None,
) -> list[torch.Tensor]:
    """The tokens of each lane behind the last block."""
    if shortcut is not None and shortcut.whole:
        return [shortcut.without_blocks(at, _tokens(model, lane)) for at, lane in enumerate(lanes)]
    hidden: list[torch.Tensor] = []
    going: Sequence[int] = range(len(lanes))
    for index, block in enumerate(model.blocks):
        with visit(index):
            for at in going:
                lane = conditions[at]
                # Not before: where workers share the tokens, the first block leaves each of them its own only.
                tokens = _tokens(model, lanes[at]) if index == 0 else hidden[at]
                passed = block(tokens, lane.text, lane.modulation, lane.rotary)
                if index > 0:
                    hidden[at] = passed
                    continue
                hidden.append(passed)
                if shortcut is not None:
                    shortcut.entered(at, tokens, passed)
        if index == 0 and shortcut is not None:
            going, visits = shortcut.choose()
            if not visits:
                break
    return hidden if shortcut is None else _ended(hidden, going, shortcut)


def _ended(hidden: Sequence[torch.Tensor], going: Sequence[int], shortcut: BlockCache) -> list[torch.Tensor]:
    """The tokens of lanes that went on to the last block, and what the others have in their place."""
    for at in going:
        shortcut.ended(at, hidden[at])
    return [tokens if at in going else shortcut.from_first(at, tokens) for at, tokens in enumerate(hidden)]


def _tokens(model: WanTransformer3DModel, lane: Lane) -> torch.Tensor:
    """Latents -> one token per patch [1, S, dim]."""
    latents = lane.latents.to(model.patch_embedding.weight.dtype)
    patches: torch.Tensor = model.patch_embedding(latents)
    return patches.flatten(2).transpose(1, 2)


def _embedded(model: WanTransformer3DModel, texts: Sequence[torch.Tensor], timestep: torch.Tensor) -> list[Rows]:
    """The timestep and each of the texts, embedded."""
    from ..experts.embedder_cache import CachedEmbedder

    embedder = model.condition_embedder
    if isinstance(embedder, CachedEmbedder):
        return embedder.rows(timestep, texts)
    return [embedder(timestep, text.to(model.patch_embedding.weight.dtype), None)[:3] for text in texts]


def _conditions(
    model: WanTransformer3DModel,
    lane: Lane,
    rows: Rows,
    against: Iterator[Rows],
    rotary: tuple[torch.Tensor, torch.Tensor],
    timed: _FrameTimes | None,
) -> _Conditions:
    """`against` gives the next text that a lane holds against its own."""
    time, modulation, text = rows
    embed_image = model.condition_embedder.image_embedder
    if embed_image is not None:
        assert lane.image is not None, "requests without an image are refused"
        text = torch.cat([embed_image(lane.image.to(text.device, text.dtype)), text], dim=1)
    return _Conditions(
        text=text if lane.against is None else (text, next(against)[2]),
        time=time if timed is None else timed.time,
        modulation=modulation.unflatten(1, (6, -1)) if timed is None else timed.modulation,
        rotary=rotary,
        grid=_grid(model, lane),
    )


def _velocity(model: WanTransformer3DModel, lane: _Conditions, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [1, S, dim] -> velocity: modulated norm, projection, patches put back in place.

    The projection sees all tokens at once: context parallelism gathers those of every rank behind it.
    """
    shift, scale = (model.scale_shift_table + lane.time.unsqueeze(1)).chunk(2, dim=1)
    _, runs = rows_and_runs(lane.modulation, tokens.shape[1])
    normed = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for start in range(0, tokens.shape[1], OUTPUT_TOKENS):
        for piece, row in pieces_of(slice(start, start + OUTPUT_TOKENS), runs):
            normed[:, piece] = model.norm_out(tokens[:, piece].float()) * (1 + scale[row]) + shift[row]
    patches: torch.Tensor = model.proj_out(normed).reshape(1, *lane.grid, *model.config.patch_size, -1)
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
