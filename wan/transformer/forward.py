"""Forward pass of one expert for several lanes, block by block, with a step cache interface.

All lanes pass through a block during one visit, so its weights are needed once per step, not once
per lane. Each lane is computed alone (batch 1) and is therefore bit-equal to a separate forward
pass. Submodules are called as in the model's own forward pass, so hooks on `rope`, `blocks.0` or
`proj_out` fire as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from ...block_kernels import chunk_slices
from ...shapes import OUTPUT_TOKENS, patch_grid
from .block import settings_of
from .lane import BlockCache, Lane
from .per_frame_timestep import (
    FrameModulation,
    Modulation,
    TokenSelector,
    frame_timesteps,
    row_spans,
    rows_and_spans,
)
from .token_parts import FROM_ORIGIN, Grid, layout_tables, padded

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

    from .embedders import CachedEmbedder, Rows
    from .nag import Texts


@dataclass(frozen=True, kw_only=True)
class _Conditions:
    """Inputs for a lane, the same in every block."""

    text: torch.Tensor | Texts  # [1, L, dim]; with an image branch, the image's N rows come first
    time: torch.Tensor  # [R, dim], one row for each distinct timestep
    modulation: torch.Tensor | FrameModulation  # [1, 6, dim], or [R, 6, dim] with spans of rows
    rotation: torch.Tensor  # of all tokens of this worker, as of `BlockMath.rotation`
    grid: Grid  # patches of the video along time, height and width
    video: slice  # tokens of the video among all tokens of the lane


def forward_lanes(
    model: WanTransformer3DModel,
    lanes: Sequence[Lane],
    timestep: torch.Tensor,
    visit: Callable[[int], AbstractContextManager[object]],
    shortcut: BlockCache | None = None,
    local_tokens: TokenSelector | None = None,
) -> list[torch.Tensor]:
    """Return each lane's velocity [1, 16 or 48, T, h, w], in the model's compute dtype.

    Args:
        model: an expert with a `CachedEmbedder`. Blocks need their weights only inside their visit.
        lanes: lanes with any shapes.
        timestep: [1], shared by the lanes. Pass it on the CPU: the value is read, and reading it
            would synchronise a device.
        visit: returns a context in which block i is ready to compute. Entered once per block for
            all lanes.
        shortcut: lets lanes skip blocks. Blocks that no lane needs are not visited.
        local_tokens: selects this worker's tokens where workers share a lane. None: all.
    """
    # Before the padding: velocities are cut to these sizes at the end.
    sizes = [lane.latents.shape[3:] for lane in lanes]
    lanes = [replace(lane, latents=padded(lane.latents, model.config.patch_size)) for lane in lanes]
    select = local_tokens or (lambda tokens: tokens)
    # Lanes with equal parts share their rotary embedding: 77 MB at 1280x720x81.
    rotations: dict[Hashable, torch.Tensor] = {}
    for lane in lanes:
        if _layout(model, lane) not in rotations:
            rotations[_layout(model, lane)] = _rotation(model, lane, select)
    negative_texts = [lane.negative_text for lane in lanes if lane.negative_text is not None]
    # Before the texts, so that the time embedder's weights are loaded once for all timesteps.
    frame_times = _frame_times(model, lanes, float(timestep.float()), select)
    rows = _embedder(model).rows(timestep, [*(lane.text for lane in lanes), *negative_texts])
    positive = rows[: len(lanes)]
    negative = iter(rows[len(lanes) :])
    conditions = [
        _conditions(
            model,
            lane,
            row,
            negative,
            rotations[_layout(model, lane)],
            frame_times.get(_frame_key(model, lane)),
        )
        for lane, row in zip(lanes, positive, strict=True)
    ]
    hidden = _through_blocks(model, lanes, conditions, visit, shortcut, select)
    return [
        _velocity(model, lane, tokens)[..., : size[0], : size[1]]
        for lane, tokens, size in zip(conditions, hidden, sizes, strict=True)
    ]


_FrameTimes: TypeAlias = "tuple[torch.Tensor, FrameModulation]"
"""Time embeddings and modulation shared by lanes with equal shapes and per-frame timesteps."""


def _layout(model: WanTransformer3DModel, lane: Lane) -> Hashable:
    """Return an equal key for lanes with the same parts at the same positions."""
    return lane.placed(model.config.patch_size)


def _rotation(model: WanTransformer3DModel, lane: Lane, select: TokenSelector) -> torch.Tensor:
    """Return the rotary embedding for this worker's tokens in a lane."""
    parts = lane.placed(model.config.patch_size)
    if len(parts) == 1 and lane.positions == FROM_ORIGIN:
        # Through the module: a context-parallel hook on it selects this worker's part.
        cosines, sines = model.rope(lane.latents)
    else:
        cosines, sines = map(select, layout_tables(model, parts))
    return settings_of(model).used_math.rotation(cosines, sines)


def _frame_key(model: WanTransformer3DModel, lane: Lane) -> Hashable:
    return (lane.timestep_scales, _layout(model, lane))


def _timestep_runs(model: WanTransformer3DModel, lane: Lane) -> list[tuple[float, int]]:
    """Return timestep scale and tokens by part and video frame, or () if all scales are 1.

    Tokens are consecutive, in order. Parts next to the video have the step's timestep.
    """
    if lane.timestep_scales is None:
        return []
    patch = model.config.patch_size
    _, height, width = patch_grid(lane.latents.shape[2:], patch)
    front, behind = (
        [(1.0, math.prod(part.grid(patch))) for part in parts]
        for parts in (lane.front, lane.behind)
    )
    return [*front, *((scale, height * width) for scale in lane.timestep_scales), *behind]


def _frame_times(
    model: WanTransformer3DModel, lanes: Sequence[Lane], timestep: float, select: TokenSelector
) -> dict[Hashable, _FrameTimes]:
    """Return time embeddings for lanes with several timesteps, by `_frame_key`."""
    found: dict[Hashable, _FrameTimes] = {}
    for lane in lanes:
        runs = _timestep_runs(model, lane)
        if not runs or _frame_key(model, lane) in found:
            continue
        times = frame_timesteps([scale for scale, _ in runs], timestep)
        # One row for each distinct timestep. Six rows for each token would take gigabytes.
        distinct = sorted(set(times))
        rows = [
            (distinct.index(time), tokens) for time, (_, tokens) in zip(times, runs, strict=True)
        ]
        time, modulation = _embedder(model).time_rows(distinct)
        modulated = FrameModulation(
            rows=modulation.unflatten(1, (6, -1)), spans=row_spans(rows, select)
        )
        found[_frame_key(model, lane)] = (time, modulated)
    return found


def _through_blocks(
    model: WanTransformer3DModel,
    lanes: Sequence[Lane],
    conditions: Sequence[_Conditions],
    visit: Callable[[int], AbstractContextManager[object]],
    shortcut: BlockCache | None,
    select: TokenSelector,
) -> list[torch.Tensor]:
    """Return each lane's tokens after the last block."""
    if shortcut is not None and shortcut.whole:
        return [shortcut.skip_all(at, _tokens(model, lane)) for at, lane in enumerate(lanes)]
    hidden: list[torch.Tensor] = []
    going: Sequence[int] = range(len(lanes))
    for index, block in enumerate(model.blocks):
        with visit(index):
            for at in going:
                lane = conditions[at]
                # Patches are embedded here, not before the loop. Where workers share tokens, a
                # hook on the first block cuts them to this worker's part, so only one lane at a
                # time has all its tokens.
                tokens = _tokens(model, lanes[at]) if index == 0 else hidden[at]
                passed = block(tokens, lane.text, lane.modulation, lane.rotation)
                if index > 0:
                    hidden[at] = passed
                    continue
                hidden.append(passed)
                if shortcut is not None:
                    shortcut.entered(
                        at, tokens, passed, _local_slice(lane.video, tokens.shape[1], select)
                    )
        # Outside the visit, so that a fetch can start while the choice waits for the device.
        if index == 0 and shortcut is not None:
            going, visits = shortcut.choose()
            if not visits:
                break
    if shortcut is None:
        return hidden
    # Lanes that ran every block have final tokens. Other lanes' tokens are predicted.
    for at in going:
        shortcut.ended(at, hidden[at])
    return [
        tokens if at in going else shortcut.skip_rest(at, tokens)
        for at, tokens in enumerate(hidden)
    ]


def _tokens(model: WanTransformer3DModel, lane: Lane) -> torch.Tensor:
    """Embed the latents and the other parts as one token per patch, [1, S, dim]."""
    latents = lane.latents.to(model.patch_embedding.weight.dtype)
    patches: torch.Tensor = model.patch_embedding(latents)
    video = patches.flatten(2).transpose(1, 2).contiguous()  # kernels of blocks read rows
    if not lane.front and not lane.behind:
        return video
    return torch.cat(
        [
            *(part.embed(model) for part in lane.front),
            video,
            *(part.embed(model) for part in lane.behind),
        ],
        dim=1,
    )


def _embedder(model: WanTransformer3DModel) -> CachedEmbedder:
    embedder: CachedEmbedder = model.condition_embedder
    return embedder


def _conditions(
    model: WanTransformer3DModel,
    lane: Lane,
    rows: Rows,
    negative: Iterator[Rows],
    rotation: torch.Tensor,
    frame_times: _FrameTimes | None,
) -> _Conditions:
    """Collect a lane's inputs. A lane with a negative text takes the next item in `negative`."""
    time, flat, text = rows
    modulation: torch.Tensor | FrameModulation = flat.unflatten(1, (6, -1))
    if frame_times is not None:
        time, modulation = frame_times
    patch = model.config.patch_size
    grid = patch_grid(lane.latents.shape[2:], patch)
    start = sum(math.prod(part.grid(patch)) for part in lane.front)
    embed_image = model.condition_embedder.image_embedder
    if embed_image is not None:
        assert lane.image is not None, "requests without an image are refused"
        text = torch.cat([embed_image(lane.image.to(text.device, text.dtype)), text], dim=1)
    return _Conditions(
        text=text if lane.negative_text is None else (text, next(negative)[2]),
        time=time,
        modulation=modulation,
        rotation=rotation,
        grid=grid,
        video=slice(start, start + math.prod(grid)),
    )


def _local_slice(video: slice, tokens: int, select: TokenSelector) -> slice:
    """Return this worker's part of `video`. A worker has consecutive tokens among all `tokens`."""
    if video == slice(0, tokens):
        return video
    # The selector cuts [1, S, D] tokens along dim 1, here with token numbers as D = 1.
    own = select(torch.arange(tokens)[None, :, None]).flatten()
    first = int(own[0])
    count = len(own)
    start, stop = (min(max(0, end - first), count) for end in (video.start, video.stop))
    return slice(start, stop)


def _velocity(
    model: WanTransformer3DModel, lane: _Conditions, tokens: torch.Tensor
) -> torch.Tensor:
    """Turn video tokens [1, S, dim] into the velocity: modulated norm, projection, unpatchify."""
    values = (model.scale_shift_table + lane.time.unsqueeze(1)).unsqueeze(2).unbind(1)
    modulation = Modulation(values, rows_and_spans(lane.modulation)[1])
    math = settings_of(model).used_math
    normed = torch.empty_like(tokens)
    # In pieces: the exact norm makes fp32 tensors. For all tokens at once they would need more
    # memory than a chunked block.
    for at in chunk_slices(tokens.shape[1], OUTPUT_TOKENS):
        math.norm(tokens[:, at], modulation.part(at).norm(0, model.norm_out.eps), out=normed[:, at])
    # The projection is called once for all tokens, because a context-parallel hook on it gathers
    # every rank's tokens. The other parts are cut off after it, because a rank may have only their
    # tokens.
    patches: torch.Tensor = model.proj_out(normed)[:, lane.video].reshape(
        1, *lane.grid, *model.config.patch_size, -1
    )
    # [1, T, h, w, pt, ph, pw, C] becomes [1, C, T pt, h ph, w pw].
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
