"""Forward pass of one expert, block by block, for several lanes, with the interface of step caches.

All lanes pass through a block during one visit, so the block's weights are needed once per step, not once per lane.
Each lane is computed alone (batch 1) and is therefore bit-equal to a separate forward pass. The model's submodules are
called as the model calls them: hooks on `rope`, `blocks.0` or `proj_out` fire as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...schema import OUTPUT_TOKENS, patch_grid
from .block import chunk_slices, settings_of
from .per_frame_timestep import FrameModulation, Modulation, TokenSelector, frame_timesteps, row_spans, rows_and_spans
from .token_parts import FROM_ORIGIN, Grid, Placed, Positions, TokenPart, layout_tables, padded

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

    from ..experts.embedders import Rows
    from .nag import Texts


class SkipDecision(NamedTuple):
    """Lanes that continue after the first block."""

    lanes: Sequence[int]
    """Indices of the lanes that also pass through the remaining blocks."""
    visits: bool
    """True if the remaining blocks are visited: for these lanes, or for lanes of another worker."""


class BlockCache(Protocol):
    """Source of predicted block outputs in one forward pass. Tokens are [1, S, dim].

    Where workers share the tokens of a lane, a worker has only its own part of them after the first block.
    """

    @property
    def whole(self) -> bool:
        """True if no lane needs any block."""

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the output of the last block from all tokens of a lane; return this worker's part."""

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        """Record `hidden`, the first block's output for `tokens`; `tokens` may include those of other workers.

        `video` selects the tokens of the video in `hidden`: a change is measured in them alone.
        """

    def choose(self) -> SkipDecision:
        """Return the lanes that continue, once the first block has computed all of them."""

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """Predict the output of the last block from that of the first, for a lane that does not continue."""

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """Record `hidden`, the output of the last block."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One hidden state of a step: one CFG branch of one sample.

    Tensors have any floating dtype and are cast to the model's compute dtype. A model with an image branch needs
    `image` and a text of 512 tokens; other models ignore `image`, as in ComfyUI.
    """

    latents: torch.Tensor
    """[1, C, T, h, w] in the model's latent space; C is 16, 36 with the image condition, or 48. Odd sides are padded to
    whole patches."""
    text: torch.Tensor
    """[1, L, 4096]."""
    image: torch.Tensor | None = None
    """CLIP vision embedding of the start image, [1, N, 1280]."""
    negative_text: torch.Tensor | None = None
    """Negative text of any length, for models inside `attach_nag`."""
    timestep_scales: tuple[float, ...] | None = None
    """Multipliers of the step's timestep by latent frame (TI2V-5B): 0 for a given frame, 1 for a generated one. None: 1
    for all frames."""
    name: object = None
    """Key of the lane within its run, under which caches keep values from step to step."""
    front: tuple[TokenPart, ...] = ()
    """Tokens before those of the video."""
    behind: tuple[TokenPart, ...] = ()
    """Tokens after those of the video."""
    positions: Positions = FROM_ORIGIN
    """Rotary positions of the video."""

    def tokens(self, patch_size: Sequence[int]) -> int:
        """Return the number of all tokens of the lane."""
        return sum(math.prod(grid) for grid, _ in self.placed(patch_size))

    def placed(self, patch_size: Sequence[int]) -> tuple[Placed, ...]:
        """Return the grid and the positions of each part, the video included, in the order of the tokens."""
        return (
            *((part.grid(patch_size), part.positions) for part in self.front),
            (patch_grid(self.latents.shape[2:], patch_size), self.positions),
            *((part.grid(patch_size), part.positions) for part in self.behind),
        )


@dataclass(frozen=True, kw_only=True)
class _Conditions:
    """Inputs of a lane, the same for every block."""

    text: torch.Tensor | Texts  # [1, L, dim]; with an image branch, the image's N rows come first
    time: torch.Tensor  # [R, dim], one row for each distinct timestep
    modulation: torch.Tensor | FrameModulation  # [1, 6, dim], or [R, 6, dim] with the spans of the rows
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
        model: an expert; its blocks need their weights only inside their visit.
        lanes: of any shapes.
        timestep: [1], shared by the lanes. Pass it on the CPU: the value is read, and a device would be synchronised.
        visit: returns a context in which block i is ready to compute; entered once per block for all lanes.
        shortcut: lets lanes skip blocks; blocks that no lane needs are not visited.
        local_tokens: selects the tokens that this worker computes, where workers share a lane. None: all.
    """
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
    rows = _embedded(model, [*(lane.text for lane in lanes), *negative_texts], timestep)
    positive, negative = rows[: len(lanes)], iter(rows[len(lanes) :])
    conditions = [
        _conditions(
            model, lane, row, negative, rotations[_layout(model, lane)], frame_times.get(_frame_key(model, lane))
        )
        for lane, row in zip(lanes, positive, strict=True)
    ]
    hidden = _through_blocks(model, lanes, conditions, visit, shortcut, select)
    return [
        _velocity(model, lane, tokens)[..., : size[0], : size[1]]
        for lane, tokens, size in zip(conditions, hidden, sizes, strict=True)
    ]


class _FrameTimes(NamedTuple):
    """Time embeddings shared by lanes of one shape with equal per-frame timesteps."""

    time: torch.Tensor
    modulation: FrameModulation


def _layout(model: WanTransformer3DModel, lane: Lane) -> Hashable:
    """Return a key that is equal for lanes with the same parts at the same positions."""
    return lane.placed(model.config.patch_size)


def _rotation(model: WanTransformer3DModel, lane: Lane, select: TokenSelector) -> torch.Tensor:
    """Return the rotary embedding of this worker's tokens of a lane."""
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
    """Return the timestep scale and the number of tokens of each part, and of each frame of the video; () if all are 1.

    Consecutive tokens, in order. Parts next to the video have the timestep of the step.
    """
    if lane.timestep_scales is None:
        return []
    patch = model.config.patch_size
    _, height, width = patch_grid(lane.latents.shape[2:], patch)
    front, behind = ([(1.0, math.prod(part.grid(patch))) for part in parts] for parts in (lane.front, lane.behind))
    return [*front, *((scale, height * width) for scale in lane.timestep_scales), *behind]


def _frame_times(
    model: WanTransformer3DModel, lanes: Sequence[Lane], timestep: float, select: TokenSelector
) -> dict[Hashable, _FrameTimes]:
    """Return the time embeddings of the lanes with several timesteps, by `_frame_key`."""
    found: dict[Hashable, _FrameTimes] = {}
    for lane in lanes:
        runs = _timestep_runs(model, lane)
        if not runs or _frame_key(model, lane) in found:
            continue
        times = frame_timesteps([scale for scale, _ in runs], timestep)
        distinct = sorted(set(times))
        rows = [(distinct.index(time), tokens) for time, (_, tokens) in zip(times, runs, strict=True)]
        time, modulation = _time_rows(model, distinct)
        modulated = FrameModulation(rows=modulation.unflatten(1, (6, -1)), spans=row_spans(rows, select))
        found[_frame_key(model, lane)] = _FrameTimes(time, modulated)
    return found


def _time_rows(model: WanTransformer3DModel, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embedding [R, D] and the modulation [R, 6 D] of each timestep."""
    from ..experts.embedders import CachedEmbedder

    embedder = model.condition_embedder
    if isinstance(embedder, CachedEmbedder):
        return embedder.time_rows(timesteps)
    no_text = model.patch_embedding.weight.new_zeros(1, 1, model.config.text_dim)
    each = [embedder(torch.tensor([time]), no_text, None)[:2] for time in timesteps]
    return torch.cat([time for time, _ in each]), torch.cat([modulation for _, modulation in each])


def _through_blocks(
    model: WanTransformer3DModel,
    lanes: Sequence[Lane],
    conditions: Sequence[_Conditions],
    visit: Callable[[int], AbstractContextManager[object]],
    shortcut: BlockCache | None,
    select: TokenSelector,
) -> list[torch.Tensor]:
    """Return the tokens of each lane after the last block."""
    if shortcut is not None and shortcut.whole:
        return [shortcut.skip_all(at, _tokens(model, lane)) for at, lane in enumerate(lanes)]
    hidden: list[torch.Tensor] = []
    going: Sequence[int] = range(len(lanes))
    for index, block in enumerate(model.blocks):
        with visit(index):
            for at in going:
                lane = conditions[at]
                # Patches are embedded here, not before the loop: where workers share tokens, a hook of the first block
                # cuts them to this worker's part, so that only one lane has all of its tokens at a time.
                tokens = _tokens(model, lanes[at]) if index == 0 else hidden[at]
                passed = block(tokens, lane.text, lane.modulation, lane.rotation)
                if index > 0:
                    hidden[at] = passed
                    continue
                hidden.append(passed)
                if shortcut is not None:
                    shortcut.entered(at, tokens, passed, _local_slice(lane.video, tokens.shape[1], select))
        if index == 0 and shortcut is not None:
            going, visits = shortcut.choose()
            if not visits:
                break
    return hidden if shortcut is None else _ended(hidden, going, shortcut)


def _ended(hidden: Sequence[torch.Tensor], going: Sequence[int], shortcut: BlockCache) -> list[torch.Tensor]:
    """Return the tokens of lanes that passed the last block, and the predicted tokens of the others."""
    for at in going:
        shortcut.ended(at, hidden[at])
    return [tokens if at in going else shortcut.skip_rest(at, tokens) for at, tokens in enumerate(hidden)]


def _tokens(model: WanTransformer3DModel, lane: Lane) -> torch.Tensor:
    """Embed the latents and the other parts as one token per patch, [1, S, dim]."""
    latents = lane.latents.to(model.patch_embedding.weight.dtype)
    patches: torch.Tensor = model.patch_embedding(latents)
    video = patches.flatten(2).transpose(1, 2).contiguous()  # kernels of blocks read rows
    if not lane.front and not lane.behind:
        return video
    return torch.cat(
        [*(part.embed(model) for part in lane.front), video, *(part.embed(model) for part in lane.behind)], dim=1
    )


def _embedded(model: WanTransformer3DModel, texts: Sequence[torch.Tensor], timestep: torch.Tensor) -> list[Rows]:
    """Return the embedded timestep with each of the embedded texts."""
    from ..experts.embedders import CachedEmbedder

    embedder = model.condition_embedder
    if isinstance(embedder, CachedEmbedder):
        return embedder.rows(timestep, texts)
    return [embedder(timestep, text.to(model.patch_embedding.weight.dtype), None)[:3] for text in texts]


def _conditions(
    model: WanTransformer3DModel,
    lane: Lane,
    rows: Rows,
    negative: Iterator[Rows],
    rotation: torch.Tensor,
    frame_times: _FrameTimes | None,
) -> _Conditions:
    """Collect the inputs of a lane; one with a negative text takes the next item of `negative`."""
    time, modulation, text = rows
    patch = model.config.patch_size
    grid = patch_grid(lane.latents.shape[2:], patch)
    start = sum(math.prod(part.grid(patch)) for part in lane.front)
    embed_image = model.condition_embedder.image_embedder
    if embed_image is not None:
        assert lane.image is not None, "requests without an image are refused"
        text = torch.cat([embed_image(lane.image.to(text.device, text.dtype)), text], dim=1)
    return _Conditions(
        text=text if lane.negative_text is None else (text, next(negative)[2]),
        time=time if frame_times is None else frame_times.time,
        modulation=modulation.unflatten(1, (6, -1)) if frame_times is None else frame_times.modulation,
        rotation=rotation,
        grid=grid,
        video=slice(start, start + math.prod(grid)),
    )


def _local_slice(video: slice, tokens: int, select: TokenSelector) -> slice:
    """Return the tokens of `video` among those of this worker, which has consecutive ones of all `tokens`."""
    if video == slice(0, tokens):
        return video
    own = select(torch.arange(tokens)[None, :, None]).flatten()
    first, count = int(own[0]), len(own)
    start, stop = (min(max(0, end - first), count) for end in (video.start, video.stop))
    return slice(start, stop)


def _velocity(model: WanTransformer3DModel, lane: _Conditions, tokens: torch.Tensor) -> torch.Tensor:
    """Turn the video's part of tokens [1, S, dim] into the velocity: modulated norm, projection, unpatchify."""
    values = (model.scale_shift_table + lane.time.unsqueeze(1)).unsqueeze(2).unbind(1)
    modulation = Modulation(values, rows_and_spans(lane.modulation)[1])
    math = settings_of(model).used_math
    normed = torch.empty_like(tokens)
    # In pieces: the exact norm makes fp32 tensors, which for all tokens would need more memory than a chunked block.
    for at in chunk_slices(tokens.shape[1], OUTPUT_TOKENS):
        math.norm(tokens[:, at], modulation.part(at).norm(0, model.norm_out.eps), out=normed[:, at])
    # The projection is called once for all tokens: a context-parallel hook on it gathers the tokens of every rank. The
    # other parts are cut off after it, because a rank may have tokens of theirs only.
    patches: torch.Tensor = model.proj_out(normed)[:, lane.video].reshape(1, *lane.grid, *model.config.patch_size, -1)
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
