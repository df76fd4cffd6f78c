"""Lanes of a run: their inputs and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...wan import ExpertEngine, ExpertPair, Lane, Positions, TokenPart, frame_timesteps
from ..cache.base import LaneName
from ..context_windows import StepWindows
from ..inputs.checks import Texts
from ..inputs.extra_tokens import is_cut, tokens_by_side
from ..inputs.request import DenoiseRequest
from ..inputs.sides import POSITIVE


def lane_names(samples: int, sides: Sequence[int], windows: StepWindows | None = None) -> tuple[LaneName, ...]:
    """Return the names of the lanes that `LaneInputs.lanes` returns, in their order."""
    pieces = (None,) if windows is None else windows.frames
    return tuple(LaneName(side, sample, piece) for side in sides for sample in range(samples) for piece in pieces)


def names_at(request: DenoiseRequest, step: int) -> tuple[LaneName, ...]:
    """Return the names of the lanes in a step of the whole schedule."""
    return lane_names(request.batch, request.sides_at(step), windows_at(request, step))


def patches_at(pair: ExpertPair, request: DenoiseRequest) -> dict[int, int]:
    """Return the `BlockKey.patch` in each step of a run."""
    step_plan = request.step_plan
    return {step: pair.patch_at(step_plan.experts[step], step) for step in step_plan.steps}


def windows_at(request: DenoiseRequest, step: int) -> StepWindows | None:
    """Return the context windows of a step, or None if the video is denoised as a whole."""
    return None if request.windows is None else StepWindows(request.windows, step, request.noise.shape[2])


class LaneInputs:
    """Inputs that all steps share: texts and images on the device, split into samples.

    `reads_reference`: the model has a `ref_conv`; others ignore a reference image, as in ComfyUI.
    """

    def __init__(self, request: DenoiseRequest, device: torch.device, *, reads_reference: bool = False) -> None:
        def samples(given: Texts | None) -> Sequence[torch.Tensor]:
            if given is None:
                return ()
            if isinstance(given, torch.Tensor):
                return list(given.to(device).expand(request.batch, *given.shape[1:]).split(1))
            return [text.to(device) for text in given]

        self._positive, self._negative = samples(request.positive), samples(request.negative)
        self._image = samples(request.image_condition)
        self._embedding = samples(request.image_embedding)
        self._timestep_scales = request.timestep_scales
        self._control_channels = request.control_channels
        positive, negative = request.tokens_of_sides
        moved = positive.to(device)
        # Both sides usually have the same tokens, of which one copy on the device is enough.
        self._tokens = [
            [tokens.of_sample(sample, reads_reference=reads_reference) for sample in range(request.batch)]
            for tokens in tokens_by_side(moved, moved if negative is positive else negative.to(device))
        ]

    def lanes(
        self,
        latents: torch.Tensor,
        sides: Sequence[int],
        *,
        attach_nag: bool = False,
        windows: StepWindows | None = None,
    ) -> list[Lane]:
        """Return one lane per sample for each of the CFG `sides`, in their order.

        Every lane has batch 1. With `windows`, each of them is replaced by one lane per window, in order.

        Args:
            latents: [B, C, T, h, w] of the step.
            sides: see `sides_at`.
            attach_nag: give the positive lanes the negative text too, for NAG.
        """
        states = list(latents.split(1))
        if self._image:
            states = [torch.cat(pair, dim=1) for pair in zip(states, self._image, strict=True)]
        # A control video (Fun Control) follows the windows; the start image behind it may begin every one of them.
        first = latents.shape[1] + self._control_channels
        parts = [[state] if windows is None else windows.cut(state, first) for state in states]
        scales = [[own] if windows is None else windows.cut_timestep_scales(own) for own in self._timestep_scales]
        texts, pieces = (self._positive, self._negative, self._negative), len(parts[0])
        return [
            Lane(
                latents=parts[name.sample][number % pieces],
                text=texts[name.side][name.sample],
                image=self._embedding[name.sample] if self._embedding else None,
                negative_text=self._negative[name.sample] if attach_nag and name.side == POSITIVE else None,
                timestep_scales=scales[name.sample][number % pieces],
                name=name,
                **self._parts(name, latents.shape[2]),
            )
            for number, name in enumerate(lane_names(len(states), sides, windows))
        ]

    def _parts(self, name: LaneName, frames: int) -> dict[str, Any]:
        """Return the parts of a lane next to its video, of `frames` latent frames, and the positions of the video."""
        tokens = self._tokens[name.side][name.sample]
        if not tokens:
            return {}
        parts: dict[str, Any] = {}
        if tokens.reference is not None:
            # The reference image has the place of the first frame, and the video follows.
            parts["front"] = (TokenPart(latents=tokens.reference, through_ref_conv=True),)
            parts["positions"] = Positions(start=(1.0, 0.0, 0.0))
        parts["behind"] = tuple(
            TokenPart(
                latents=context[:, :, list(name.frames)] if name.frames and is_cut(context, frames) else context,
                positions=Positions(source=source),
            )
            for source, context in enumerate(tokens.context, 1)
        )
        return parts

    def prefetch(self, engine: ExpertEngine, calls: Sequence[tuple[str, float, bool]]) -> None:
        """Announce the timesteps and texts of `calls` to the engine, which embeds them together.

        Args:
            calls: expert and timestep of each call, and whether it reads the negative texts too.
        """
        timesteps: dict[str, list[float]] = {}
        for expert, timestep, _ in calls:
            of_frames = (frame_timesteps(scales, timestep) for scales in self._timestep_scales if scales is not None)
            timesteps.setdefault(expert, []).extend(sorted({timestep}.union(*of_frames)))
        texts: dict[str, Sequence[torch.Tensor]] = dict.fromkeys(timesteps, self._positive)
        texts |= {expert: [*self._positive, *self._negative] for expert, _, with_negative in calls if with_negative}
        engine.expect(timesteps, texts)
