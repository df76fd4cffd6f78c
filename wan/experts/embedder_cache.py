"""Cached conditioning embeddings of time, text and image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias, TypeVar

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from torch.utils.weak import WeakIdKeyDictionary

from ...offload import host_bytes

EmbedderPart = Literal["time", "text"]
PARTS: tuple[EmbedderPart, ...] = ("time", "text")

Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D], text [1, L, D]."""

EMBEDDER = "condition_embedder."


def part_of(parameter: str) -> EmbedderPart | None:
    """The part of the embedder that a parameter of the model belongs to; None: to neither, or to the image branch."""
    if not parameter.startswith(EMBEDDER) or parameter.startswith(f"{EMBEDDER}image_embedder."):
        return None
    return "text" if parameter.startswith(f"{EMBEDDER}text_embedder.") else "time"


Key = TypeVar("Key")
Row = TypeVar("Row")
ROWS_KEPT = {"time": 64, "text": 8}
"""Rows that nobody foretold, beside those that are expected."""


class CachedEmbedder(WanTimeTextImageEmbedding):  # type: ignore[misc]
    """Stands in for the embedder of a diffusers Wan model: equal parameters, equal results, each computed once.

    A row is computed alone, as a lane of its own would compute it, and found again by the value of its timestep or
    text. A text must not be changed in place while lanes use it.

    Args:
        width: D.
        text_width: of the texts that come in.
        frequencies: of the sinusoids that a timestep becomes first.
        compute_dtype: dtype of the rows.
        image_width: of the image embeddings that come in; None: there is no image branch.
    """

    def __init__(
        self,
        *,
        width: int,
        text_width: int,
        frequencies: int,
        compute_dtype: torch.dtype,
        image_width: int | None = None,
    ) -> None:
        super().__init__(
            width,
            time_freq_dim=frequencies,
            time_proj_dim=6 * width,
            text_embed_dim=text_width,
            image_embed_dim=image_width,
        )
        self._compute_dtype = compute_dtype
        self._weights: Callable[[EmbedderPart], AbstractContextManager[object]] = lambda part: nullcontext()
        self._times: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        self._texts: dict[Hashable, torch.Tensor] = {}
        self._expected_times: tuple[float, ...] = ()
        self._expected_texts: dict[Hashable, torch.Tensor] = {}
        self._digests = WeakIdKeyDictionary()

    def take_weights_from(self, weights: Callable[[EmbedderPart], AbstractContextManager[object]]) -> None:
        """Compute inside `weights(part)` only, where that part's parameters are there."""
        self._weights = weights

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows that are there."""
        rows = [row for pair in self._times.values() for row in pair] + list(self._texts.values())
        return sum(row.nbytes for row in rows)

    @property
    def missing(self) -> tuple[EmbedderPart, ...]:
        """The parts that expected rows are still to be computed with."""
        lacks = {
            "time": not self._times.keys() >= set(self._expected_times),
            "text": not self._texts.keys() >= self._expected_texts.keys(),
        }
        return tuple(part for part in PARTS if lacks[part])

    def expect(self, timesteps: Sequence[float], texts: Iterable[torch.Tensor]) -> None:
        """Say what the coming run needs; rows of anything else are dropped. Computes nothing yet."""
        self._expected_times = tuple(dict.fromkeys(torch.tensor(timesteps, dtype=torch.float32).tolist()))
        self._expected_texts = {self._digest(text): text for text in texts}
        self._times = {time: row for time, row in self._times.items() if time in self._expected_times}
        self._texts = {digest: row for digest, row in self._texts.items() if digest in self._expected_texts}

    def expect_nothing(self) -> None:
        """Another expert runs; the rows that are there stay for later."""
        self._expected_times, self._expected_texts = (), {}

    def forget(self, part: EmbedderPart) -> None:
        """Drop the rows of one part: its weights are others now."""
        if part == "time":
            self._times.clear()
        else:
            self._texts.clear()

    def rows(self, timestep: torch.Tensor, texts: Sequence[torch.Tensor]) -> list[Rows]:
        """The rows of `timestep` [1] and of each of `texts` [1, L, text width], any dtype, on any device."""
        time, named = float(timestep.float()), {self._digest(text): text for text in texts}
        self._project([time], named)
        return [(*self._times[time], self._texts[self._digest(text)]) for text in texts]

    def time_rows(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Time [R, D] and modulation [R, 6 D] of R timesteps, each row computed alone."""
        self._project(timesteps, {})
        times, modulations = zip(*(self._times[time] for time in timesteps), strict=True)
        return torch.cat(times), torch.cat(modulations)

    def project_expected(self) -> None:
        """Compute the expected rows that are not there yet."""
        self._project([], {})

    def forward(
        self,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        timestep_seq_len: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See diffusers; one timestep, one text and one image or none."""
        assert timestep_seq_len is None
        [(time, modulation, text)] = self.rows(timestep, [encoder_hidden_states])
        image = encoder_hidden_states_image
        return time, modulation, text, None if image is None else self.image_embedder(image)

    def _project(self, times: Sequence[float], texts: Mapping[Hashable, torch.Tensor]) -> None:
        """Compute what is missing of these and of all that is expected, so that the weights come once."""
        new_times = [time for time in dict.fromkeys((*times, *self._expected_times)) if time not in self._times]
        every_text = {**texts, **self._expected_texts}
        new_texts = {digest: text for digest, text in every_text.items() if digest not in self._texts}
        # Rows outlive the run that first needs them, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if new_times:
                with self._weights("time"):
                    self._times |= {time: self._time_row(time) for time in new_times}
            if new_texts:
                with self._weights("text"):
                    self._texts |= {digest: self._text_row(text) for digest, text in new_texts.items()}
        _keep(self._times, {*times, *self._expected_times}, ROWS_KEPT["time"])
        _keep(self._texts, {*texts, *self._expected_texts}, ROWS_KEPT["text"])

    def _time_row(self, time: float) -> tuple[torch.Tensor, torch.Tensor]:
        device, dtype = self.time_proj.weight.device, next(self.time_embedder.parameters()).dtype
        waves = self.timesteps_proj(torch.tensor([time], device=device))
        row = self.time_embedder(waves.to(dtype)).to(self._compute_dtype)
        return row, self.time_proj(self.act_fn(row))

    def _text_row(self, text: torch.Tensor) -> torch.Tensor:
        device = next(self.text_embedder.parameters()).device
        row: torch.Tensor = self.text_embedder(text.to(device, self._compute_dtype))
        return row

    def _digest(self, text: torch.Tensor) -> Hashable:
        if text not in self._digests:
            whole = hashlib.blake2b(host_bytes(text.to("cpu").contiguous()).data, digest_size=16).digest()
            self._digests[text] = (whole, tuple(text.shape), text.dtype)
        found: Hashable = self._digests[text]
        return found


def _keep(rows: dict[Key, Row], needed: set[Key], others: int) -> None:
    """Drop the oldest of the rows that are not needed, beyond a number of others."""
    idle = [key for key in rows if key not in needed]
    for key in idle[: max(0, len(idle) - others)]:
        del rows[key]
