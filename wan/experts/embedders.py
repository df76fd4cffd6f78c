"""Cached conditioning embeddings of time, text and image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from torch.utils.weak import WeakIdKeyDictionary

from ...offload import host_bytes
from ..checkpoint.detect import WanConfig
from ..checkpoint.meta_model import PARTS, EmbedderPart

Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D] and text [1, L, D]."""

Row: TypeAlias = "tuple[torch.Tensor, ...]"
"""Time and modulation, or text."""

Inputs = Mapping[Hashable, Any]
"""Timesteps or texts by the keys of their rows."""

MAX_EXTRA_ROWS: Mapping[EmbedderPart, int] = {"time": 64, "text": 8}
"""Rows that are cached in addition to the expected ones."""


class CachedEmbedder(WanTimeTextImageEmbedding):  # type: ignore[misc]
    """Drop-in replacement of a diffusers Wan model's embedder that computes each row once.

    Each row is computed alone, so that it is bit-equal to that of a lane that runs alone. Rows are looked up by the
    value of the timestep or text. A text must not be changed in place while lanes use it.

    Args:
        config: sizes of the model.
        compute_dtype: dtype of the rows.
    """

    def __init__(self, config: WanConfig, compute_dtype: torch.dtype) -> None:
        super().__init__(
            config.width,
            time_freq_dim=config.freq_dim,
            time_proj_dim=6 * config.width,
            text_embed_dim=config.text_dim,
            image_embed_dim=config.image_dim,
        )
        self._compute_dtype = compute_dtype
        self._weight_loader: Callable[[EmbedderPart], AbstractContextManager[object]] = lambda part: nullcontext()
        self._rows: dict[EmbedderPart, dict[Hashable, Row]] = {part: {} for part in PARTS}
        self._expected: dict[EmbedderPart, Inputs] = {part: {} for part in PARTS}
        self._digests = WeakIdKeyDictionary()

    def set_weight_loader(self, loader: Callable[[EmbedderPart], AbstractContextManager[object]]) -> None:
        """Compute rows inside `loader(part)`, the context in which that part's parameters are loaded."""
        self._weight_loader = loader

    @property
    def missing_parts(self) -> tuple[EmbedderPart, ...]:
        """Parts with expected rows that are not computed yet."""
        return tuple(part for part in PARTS if not self._rows[part].keys() >= self._expected[part].keys())

    def set_expected(self, timesteps: Sequence[float], texts: Iterable[torch.Tensor]) -> None:
        """Set the timesteps and texts of the next run and drop the rows of all others. Computes nothing."""
        # Rounded to float32 because the timesteps of a run are: rows are looked up by equality.
        times = torch.tensor(timesteps, dtype=torch.float32).tolist()
        self._expected = {"time": {time: time for time in times}, "text": {self._digest(text): text for text in texts}}
        for part in PARTS:
            _evict_extra(self._rows[part], self._expected[part], 0)

    def clear_expected(self) -> None:
        """Expect no rows, for a run of another expert; cached rows are kept."""
        self._expected = {part: {} for part in PARTS}

    def invalidate(self, part: EmbedderPart) -> None:
        """Drop the rows of one part, whose weights have changed."""
        self._rows[part].clear()

    def rows(self, timestep: torch.Tensor, texts: Sequence[torch.Tensor]) -> list[Rows]:
        """Return the rows of `timestep` [1] with each of `texts` [1, L, text width], in any dtype and on any device."""
        at = float(timestep.float())
        self._compute_missing({"time": {at: at}, "text": {self._digest(text): text for text in texts}})
        time, modulation = self._rows["time"][at]
        return [(time, modulation, self._rows["text"][self._digest(text)][0]) for text in texts]

    def time_rows(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return time [R, D] and modulation [R, 6 D] of R timesteps, each row computed alone."""
        self._compute_missing({"time": {time: time for time in timesteps}, "text": {}})
        times, modulations = zip(*(self._rows["time"][time] for time in timesteps), strict=True)
        return torch.cat(times), torch.cat(modulations)

    def compute_expected(self) -> None:
        """Compute the expected rows that are not cached yet."""
        self._compute_missing(self._expected)

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

    def _compute_missing(self, inputs: Mapping[EmbedderPart, Inputs]) -> None:
        """Compute the rows of `inputs` that are not cached, together with all expected ones.

        One call computes all of them so that the weights are loaded only once.
        """
        compute: Mapping[EmbedderPart, Callable[[Any], Row]] = {"time": self._time_row, "text": self._text_row}
        for part, rows in self._rows.items():
            needed = {**inputs[part], **self._expected[part]}
            missing = {key: value for key, value in needed.items() if key not in rows}
            # Rows outlive the run that first needs them, and a later run may be outside inference mode.
            with torch.inference_mode(False), torch.no_grad():
                if missing:
                    with self._weight_loader(part):
                        rows |= {key: compute[part](value) for key, value in missing.items()}
            _evict_extra(rows, needed, MAX_EXTRA_ROWS[part])

    def _time_row(self, time: float) -> Row:
        device, dtype = self.time_proj.weight.device, next(self.time_embedder.parameters()).dtype
        waves = self.timesteps_proj(torch.tensor([time], device=device))
        row = self.time_embedder(waves.to(dtype)).to(self._compute_dtype)
        return row, self.time_proj(self.act_fn(row))

    def _text_row(self, text: torch.Tensor) -> Row:
        device = next(self.text_embedder.parameters()).device
        return (self.text_embedder(text.to(device, self._compute_dtype)),)

    def _digest(self, text: torch.Tensor) -> Hashable:
        # Hashing copies the text to the CPU, so the digest of a tensor is cached for the lifetime of the tensor.
        if text not in self._digests:
            whole = hashlib.blake2b(host_bytes(text.to("cpu").contiguous()).data, digest_size=16).digest()
            self._digests[text] = (whole, tuple(text.shape), text.dtype)
        found: Hashable = self._digests[text]
        return found


def _evict_extra(rows: dict[Hashable, Row], needed: Inputs, limit: int) -> None:
    """Drop the oldest rows that are not `needed`, until at most `limit` of those remain."""
    extra = [key for key in rows if key not in needed]
    for key in extra[: max(0, len(extra) - limit)]:
        del rows[key]
