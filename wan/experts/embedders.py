"""Cached conditioning embeddings of time, text and image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeVar

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from torch.utils.weak import WeakIdKeyDictionary

from ...offload import host_bytes
from ..checkpoint.meta_model import PARTS, EmbedderPart

Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D] and text [1, L, D]."""

Key = TypeVar("Key")
Row = TypeVar("Row")
MAX_EXTRA_ROWS = {"time": 64, "text": 8}
"""Rows that are cached in addition to the expected ones."""


class CachedEmbedder(WanTimeTextImageEmbedding):  # type: ignore[misc]
    """Drop-in replacement of a diffusers Wan model's embedder that computes each row once.

    Each row is computed alone, so that it is bit-equal to that of a lane that runs alone. Rows are looked up by the
    value of the timestep or text. A text must not be changed in place while lanes use it.

    Args:
        width: D, the width of the model.
        text_width: width of the text embeddings.
        frequencies: number of sinusoids of a timestep.
        compute_dtype: dtype of the rows.
        image_width: width of the image embeddings; None for a model without an image branch.
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
        self._weight_loader: Callable[[EmbedderPart], AbstractContextManager[object]] = lambda part: nullcontext()
        self._times: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        self._texts: dict[Hashable, torch.Tensor] = {}
        self._expected_times: tuple[float, ...] = ()
        self._expected_texts: dict[Hashable, torch.Tensor] = {}
        self._digests = WeakIdKeyDictionary()

    def set_weight_loader(self, loader: Callable[[EmbedderPart], AbstractContextManager[object]]) -> None:
        """Compute rows inside `loader(part)`, the context in which that part's parameters are loaded."""
        self._weight_loader = loader

    @property
    def row_bytes(self) -> int:
        """Bytes of the cached rows."""
        rows = [row for pair in self._times.values() for row in pair] + list(self._texts.values())
        return sum(row.nbytes for row in rows)

    @property
    def missing_parts(self) -> tuple[EmbedderPart, ...]:
        """Parts with expected rows that are not computed yet."""
        missing = {
            "time": not self._times.keys() >= set(self._expected_times),
            "text": not self._texts.keys() >= self._expected_texts.keys(),
        }
        return tuple(part for part in PARTS if missing[part])

    def set_expected(self, timesteps: Sequence[float], texts: Iterable[torch.Tensor]) -> None:
        """Set the timesteps and texts of the next run and drop the rows of all others. Computes nothing."""
        # Rounded to float32 because the timesteps of a run are: rows are looked up by equality.
        self._expected_times = tuple(dict.fromkeys(torch.tensor(timesteps, dtype=torch.float32).tolist()))
        self._expected_texts = {self._digest(text): text for text in texts}
        self._times = {time: row for time, row in self._times.items() if time in self._expected_times}
        self._texts = {digest: row for digest, row in self._texts.items() if digest in self._expected_texts}

    def clear_expected(self) -> None:
        """Expect no rows, for a run of another expert; cached rows are kept."""
        self._expected_times, self._expected_texts = (), {}

    def invalidate(self, part: EmbedderPart) -> None:
        """Drop the rows of one part, whose weights have changed."""
        if part == "time":
            self._times.clear()
        else:
            self._texts.clear()

    def rows(self, timestep: torch.Tensor, texts: Sequence[torch.Tensor]) -> list[Rows]:
        """Return the rows of `timestep` [1] with each of `texts` [1, L, text width], in any dtype and on any device."""
        time, by_digest = float(timestep.float()), {self._digest(text): text for text in texts}
        self._compute_missing([time], by_digest)
        return [(*self._times[time], self._texts[self._digest(text)]) for text in texts]

    def time_rows(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return time [R, D] and modulation [R, 6 D] of R timesteps, each row computed alone."""
        self._compute_missing(timesteps, {})
        times, modulations = zip(*(self._times[time] for time in timesteps), strict=True)
        return torch.cat(times), torch.cat(modulations)

    def compute_expected(self) -> None:
        """Compute the expected rows that are not cached yet."""
        self._compute_missing([], {})

    def forward(
        self,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        timestep_seq_len: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Embed one timestep, one text and at most one image, as diffusers' embedder does."""
        assert timestep_seq_len is None
        [(time, modulation, text)] = self.rows(timestep, [encoder_hidden_states])
        image = encoder_hidden_states_image
        return time, modulation, text, None if image is None else self.image_embedder(image)

    def _compute_missing(self, times: Sequence[float], texts: Mapping[Hashable, torch.Tensor]) -> None:
        """Compute the rows of `times` and `texts` that are not cached, together with all expected ones.

        One call computes all of them so that the weights are loaded only once.
        """
        new_times = [time for time in dict.fromkeys((*times, *self._expected_times)) if time not in self._times]
        every_text = {**texts, **self._expected_texts}
        new_texts = {digest: text for digest, text in every_text.items() if digest not in self._texts}
        # Rows outlive the run that first needs them, and a later run may be outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if new_times:
                with self._weight_loader("time"):
                    self._times |= {time: self._time_row(time) for time in new_times}
            if new_texts:
                with self._weight_loader("text"):
                    self._texts |= {digest: self._text_row(text) for digest, text in new_texts.items()}
        _evict_extra(self._times, {*times, *self._expected_times}, MAX_EXTRA_ROWS["time"])
        _evict_extra(self._texts, {*texts, *self._expected_texts}, MAX_EXTRA_ROWS["text"])

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
        # Hashing copies the text to the CPU, so the digest of a tensor is cached for the lifetime of the tensor.
        if text not in self._digests:
            whole = hashlib.blake2b(host_bytes(text.to("cpu").contiguous()).data, digest_size=16).digest()
            self._digests[text] = (whole, tuple(text.shape), text.dtype)
        found: Hashable = self._digests[text]
        return found


def _evict_extra(rows: dict[Key, Row], needed: set[Key], limit: int) -> None:
    """Drop the oldest rows that are not `needed`, until at most `limit` of those remain."""
    extra = [key for key in rows if key not in needed]
    for key in extra[: max(0, len(extra) - limit)]:
        del rows[key]
