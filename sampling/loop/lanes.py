"""What enters every forward pass of a run beside the latents, and the question whether to go on before each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...wan import ExpertEngine, Lane, frame_timesteps
from ..context_windows import StepWindows
from ..inputs.checks import Texts
from ..inputs.request import DenoiseRequest


class LaneName(NamedTuple):
    """Which lane of a run it is: the same name in another step is the same piece of the same video under its text."""

    side: int
    """0 under the positive text, 1 under the negative one."""
    sample: int
    frames: tuple[int, ...] | None = None
    """Those of the latent that a context window holds; None: the video as a whole."""


def lane_names(samples: int, *, with_negative: bool, windows: StepWindows | None = None) -> tuple[LaneName, ...]:
    """Of the lanes that `LaneInputs.lanes` gives, in their order."""
    pieces = (None,) if windows is None else windows.frames
    sides = range(2 if with_negative else 1)
    return tuple(LaneName(side, sample, piece) for side in sides for sample in range(samples) for piece in pieces)


def names_of(lanes: Sequence[Lane]) -> tuple[LaneName, ...]:
    """Of lanes that `LaneInputs.lanes` gave."""
    return tuple(lane.name for lane in lanes if isinstance(lane.name, LaneName))


def count_texts(names: Sequence[LaneName]) -> int:
    """How many lanes these would be without windows: one for each text of each sample."""
    return len({(name.side, name.sample) for name in names})


def names_at(request: DenoiseRequest, step: int) -> tuple[LaneName, ...]:
    """Of the lanes of a step of the whole schedule."""
    with_negative = request.step_plan.guidance[step] != 1
    return lane_names(request.batch, with_negative=with_negative, windows=windows_at(request, step))


def windows_at(request: DenoiseRequest, step: int) -> StepWindows | None:
    """The context windows of a step; None: the video is looked at as a whole."""
    return None if request.windows is None else StepWindows(request.windows, step, request.noise.shape[2])


class LaneInputs:
    """What stays the same over all steps: texts and image, on the device, cut into samples."""

    def __init__(self, request: DenoiseRequest, device: torch.device) -> None:
        def samples(given: Texts | None) -> Sequence[torch.Tensor]:
            if given is None:
                return ()
            if isinstance(given, torch.Tensor):
                return list(given.to(device).expand(request.batch, *given.shape[1:]).split(1))
            return [text.to(device) for text in given]

        self._positive, self._negative = samples(request.positive), samples(request.negative)
        self._image = samples(request.image_condition)
        self._embedding = samples(request.image_embedding)
        self._freedom = request.freedom

    def texts(self, *, with_negative: bool) -> list[torch.Tensor]:
        """The texts of the lanes that `lanes` gives."""
        return [*self._positive, *(self._negative if with_negative else ())]

    def lanes(
        self,
        latents: torch.Tensor,
        *,
        with_negative: bool,
        attach_nag: bool = False,
        windows: StepWindows | None = None,
    ) -> list[Lane]:
        """One lane per sample under its positive text, then one per sample under its negative text.

        Where it is `attach_nag` the positive one, positive lanes hold the negative text too. With `windows`, each of
        these is as many lanes as there are windows, one after the other.
        """
        states = list(latents.split(1))
        if self._image:
            states = [torch.cat(pair, dim=1) for pair in zip(states, self._image, strict=True)]
        sides = (self._positive, self._negative) if with_negative else (self._positive,)
        embeddings = self._embedding or (None,) * len(states)
        nothing = (None,) * len(states)
        held = self._negative if attach_nag else nothing
        parts = [[state] if windows is None else windows.cut(state, latents.shape[1]) for state in states]
        freedom = [[own] if windows is None else windows.cut_freedom(own) for own in self._freedom]
        names = iter(lane_names(len(states), with_negative=with_negative, windows=windows))
        return [
            Lane(latents=part, text=text, image=image, against=against, freedom=part_freedom, name=next(names))
            for texts, against_texts in zip(sides, (held, nothing), strict=False)
            for own, times, text, image, against in zip(parts, freedom, texts, embeddings, against_texts, strict=True)
            for part, part_freedom in zip(own, times, strict=True)
        ]

    def timesteps(self, timestep: float) -> set[float]:
        """All that a step at `timestep` asks of the model, with those of frames that have their own."""
        own = (frame_timesteps(freedom, timestep) for freedom in self._freedom if freedom is not None)
        return {timestep}.union(*own)


def prefetch_embeddings(
    engine: ExpertEngine, inputs: LaneInputs, calls: Iterable[tuple[str, float]], *, guided: Mapping[str, bool]
) -> None:
    """Tell the engine what it will embed for calls of an expert at a timestep; a guided expert gets the negatives."""
    timesteps: dict[str, list[float]] = {}
    for expert, timestep in calls:
        timesteps.setdefault(expert, []).extend(sorted(inputs.timesteps(timestep)))
    engine.expect(timesteps, {expert: inputs.texts(with_negative=guided[expert]) for expert in timesteps})
