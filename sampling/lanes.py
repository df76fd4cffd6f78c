"""What enters every forward pass of a run beside the latents, and the question whether to go on before each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from ..wan import ExpertEngine, Lane
from .checks import Texts
from .errors import Cancelled
from .request import DenoiseRequest
from .windows import StepWindows

EnterBlock: TypeAlias = "Callable[[int], AbstractContextManager[object]]"
"""Block -> the context in which it is there to compute."""


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

    def texts(self, *, with_negative: bool) -> list[torch.Tensor]:
        """The texts of the lanes that `lanes` gives."""
        return [*self._positive, *(self._negative if with_negative else ())]

    def lanes(
        self,
        latents: torch.Tensor,
        *,
        with_negative: bool,
        held_against: bool = False,
        windows: StepWindows | None = None,
    ) -> list[Lane]:
        """One lane per sample under its positive text, then one per sample under its negative text.

        Where it is `held_against` the positive one, the negative text makes no lanes of its own. With `windows`, each
        of these is as many lanes as there are windows, one after the other.
        """
        states = list(latents.split(1))
        if self._image:
            states = [torch.cat(pair, dim=1) for pair in zip(states, self._image, strict=True)]
        sides = (self._positive, self._negative) if with_negative else (self._positive,)
        embeddings = self._embedding or (None,) * len(states)
        held = self._negative if held_against else (None,) * len(states)
        parts = [[state] if windows is None else windows.cut(state, latents.shape[1]) for state in states]
        return [
            Lane(latents=part, text=text, image=image, against=against)
            for texts in sides
            for own, text, image, against in zip(parts, texts, embeddings, held, strict=True)
            for part in own
        ]


def foretell(
    engine: ExpertEngine, inputs: LaneInputs, calls: Iterable[tuple[str, float]], *, guided: Mapping[str, bool]
) -> None:
    """Tell the engine what it will embed for calls of an expert at a timestep; a guided expert gets the negatives."""
    timesteps: dict[str, list[float]] = {}
    for expert, timestep in calls:
        timesteps.setdefault(expert, []).append(timestep)
    engine.expect(timesteps, {expert: inputs.texts(with_negative=guided[expert]) for expert in timesteps})


def cancellable(enter: EnterBlock, step: int, should_stop: Callable[[], bool] | None) -> EnterBlock:
    """`enter`, with a question before each block; where the answer is to stop, `Cancelled` is raised."""
    if should_stop is None:
        return enter

    def visit(block: int) -> AbstractContextManager[object]:
        if should_stop():
            raise Cancelled(step, block)
        return enter(block)

    return visit
