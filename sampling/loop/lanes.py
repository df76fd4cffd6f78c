"""Lanes of a run: inputs and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from ...wan import ExpertEngine, ExpertPair, Lane, Positions, TokenPart, frame_timesteps
from ..cache.base import LaneName, Stage, StepLanes
from ..inputs.extra_tokens import is_cut, tokens_by_side
from ..inputs.request import DenoiseRequest
from ..inputs.run_inputs import Texts
from ..steps.context_windows import StepWindows
from ..steps.sides import Side


def lane_names(
    samples: int, sides: Sequence[Side], windows: StepWindows | None = None
) -> tuple[LaneName, ...]:
    """Return the names of the lanes from `LaneInputs.lanes`, in order."""
    pieces: Sequence[tuple[int, ...] | None] = (None,)
    if windows is not None:
        pieces = windows.frames
    # Sides vary slowest, for `guided_velocity`, and windows fastest, for `StepWindows.whole`.
    return tuple(LaneName(*each) for each in product(sides, range(samples), pieces))


def names_at(request: DenoiseRequest, step: int) -> tuple[LaneName, ...]:
    """Return the lane names in a step of the whole schedule."""
    return lane_names(request.batch, request.sides_at(step), windows_at(request, step))


def step_lanes(pair: ExpertPair, request: DenoiseRequest, steps: Iterable[int]) -> StepLanes:
    """Return stages and lanes for these steps of the whole schedule."""
    found = {}
    for step in steps:
        expert = request.step_plan.experts[step]
        found[step] = (Stage(expert, pair.patch_at(expert, step)), names_at(request, step))
    return found


def windows_at(request: DenoiseRequest, step: int) -> StepWindows | None:
    """Return a step's context windows, or None if the video is denoised as a whole."""
    windows = request.options.windows
    return None if windows is None else StepWindows(windows, step, request.noise.shape[2])


class LaneInputs:
    """Inputs shared by all steps: texts and images on the device, split into samples.

    `reads_reference`: the model has a `ref_conv`. Other models ignore a reference image, as in
    ComfyUI.
    """

    def __init__(
        self, request: DenoiseRequest, device: torch.device, *, reads_reference: bool = False
    ) -> None:
        inputs = request.inputs

        def samples(given: Texts | None) -> Sequence[torch.Tensor]:
            if given is None:
                return ()
            if isinstance(given, torch.Tensor):
                # Views of one copy on the device, also for a shared text.
                return list(given.to(device).expand(inputs.batch, *given.shape[1:]).split(1))
            return [text.to(device) for text in given]

        self._positive = samples(inputs.positive)
        self._negative = samples(inputs.negative)
        self._image = samples(inputs.image_condition)
        self._embedding = samples(inputs.image_embedding)
        self._timestep_scales = inputs.timestep_scales
        self._control_channels = inputs.control_channels
        positive, negative = inputs.tokens_of_sides
        # Both sides usually have the same tokens, so one copy on the device is enough.
        own = positive.read_by(reads_reference).mapped(lambda latents: latents.to(device))
        other = own
        if negative is not positive:
            other = negative.read_by(reads_reference).mapped(lambda latents: latents.to(device))
        self._tokens = [
            [tokens.of_sample(sample) for sample in range(inputs.batch)]
            for tokens in tokens_by_side(own, other)
        ]

    def lanes(
        self,
        latents: torch.Tensor,
        sides: Sequence[Side],
        *,
        attach_nag: bool = False,
        windows: StepWindows | None = None,
    ) -> list[Lane]:
        """Return one lane per sample for each of the CFG `sides`, in order.

        Every lane has batch 1. `windows` replace each lane by one lane per window, in order.

        Args:
            latents: the step's latents [B, C, T, h, w].
            sides: see `sides_at`.
            attach_nag: give the positive lanes the negative text too, for NAG.
        """
        states = list(latents.split(1))
        if self._image:
            # The noisy latents come first, then the condition: [1, 16 + C, T, h, w].
            states = [torch.cat(pair, dim=1) for pair in zip(states, self._image, strict=True)]
        # A control video (Fun Control) follows the windows. The start image behind it may begin
        # every window.
        first = latents.shape[1] + self._control_channels
        parts = [[state] for state in states]
        scales = [[own] for own in self._timestep_scales]
        if windows is not None:
            parts = [windows.cut(state, first) for state in states]
            scales = [windows.cut_timestep_scales(own) for own in self._timestep_scales]
        texts = (self._positive, self._negative, self._negative)
        pieces = len(parts[0])
        return [
            Lane(
                # Windows vary fastest in the names.
                latents=parts[name.sample][number % pieces],
                text=texts[name.side][name.sample],
                image=self._embedding[name.sample] if self._embedding else None,
                negative_text=self._negative[name.sample]
                if attach_nag and name.side == Side.POSITIVE
                else None,
                timestep_scales=scales[name.sample][number % pieces],
                name=name,
                **self._parts(name, latents.shape[2]),
            )
            for number, name in enumerate(lane_names(len(states), sides, windows))
        ]

    def _parts(self, name: LaneName, frames: int) -> dict[str, Any]:
        """Return the parts next to a lane's video, and the positions of the video.

        The video has `frames` latent frames.
        """
        tokens = self._tokens[name.side][name.sample]
        if not tokens:
            return {}
        parts: dict[str, Any] = {}
        if tokens.reference is not None:
            # The reference image takes the first frame's place, and the video follows.
            parts["front"] = (TokenPart(latents=tokens.reference, through_ref_conv=True),)
            parts["positions"] = Positions(start=(1.0, 0.0, 0.0))
        behind = []
        # The video is source 0.
        for source, context in enumerate(tokens.context, 1):
            own = context
            if name.frames and is_cut(context, frames):
                own = context[:, :, list(name.frames)]
            behind.append(TokenPart(latents=own, positions=Positions(source=source)))
        return {**parts, "behind": tuple(behind)}

    def prefetch(self, engine: ExpertEngine, calls: Sequence[tuple[str, float, bool]]) -> None:
        """Pass the timesteps and texts in `calls` to the engine, to be embedded together.

        Args:
            calls: expert and timestep of each call, and True if it reads the negative texts too.
        """
        timesteps: dict[str, list[float]] = {}
        texts: dict[str, Sequence[torch.Tensor]] = {}
        scaled = [scales for scales in self._timestep_scales if scales is not None]
        for expert, timestep, with_negative in calls:
            of_frames = (frame_timesteps(scales, timestep) for scales in scaled)
            # The step's own timestep is added, because a pass reads this timestep for all lanes.
            timesteps.setdefault(expert, []).extend(sorted({timestep}.union(*of_frames)))
            texts.setdefault(expert, self._positive)
            if with_negative:
                texts[expert] = [*self._positive, *self._negative]
        engine.models.prefetch_embeddings(timesteps, texts)
