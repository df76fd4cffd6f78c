"""Cached time, text and image embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...offload import host_bytes
from ..checkpoint.meta_model import PARTS, EmbedderPart

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding

Rows: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Time [1, D], modulation [1, 6 D] and text [1, L, D]."""

Row: TypeAlias = "tuple[torch.Tensor, ...]"
"""Time and modulation, or text."""

Inputs = Mapping[Hashable, Any]
"""Timesteps or texts by row key."""

MAX_EXTRA_ROWS: Mapping[EmbedderPart, int] = {"time": 64, "text": 8}
"""Number of rows cached in addition to the expected ones."""


class CachedEmbedder(nn.Module):
    """Embedder for a Wan model that computes each row once, with diffusers' embedder modules.

    Each row is computed alone, so it is bit-equal to the row of a lane that runs alone. Rows are
    looked up by timestep or text value. A text must not be changed in place while lanes use it.

    Args:
        embedder: diffusers' embedder. The parameters have the same names here.
        compute_dtype: row dtype.
    """

    def __init__(self, embedder: WanTimeTextImageEmbedding, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.timesteps_proj = embedder.timesteps_proj
        self.time_embedder = embedder.time_embedder
        self.act_fn = embedder.act_fn
        self.time_proj = embedder.time_proj
        self.text_embedder = embedder.text_embedder
        self.image_embedder = embedder.image_embedder
        self._compute_dtype = compute_dtype
        self.weight_loader: Callable[[EmbedderPart], AbstractContextManager[object]] = nullcontext
        """Context that loads a part's parameters. Rows are computed inside
        `weight_loader(part)`."""
        self._rows: dict[EmbedderPart, dict[Hashable, Row]] = {part: {} for part in PARTS}
        self._expected: dict[EmbedderPart, Inputs] = {part: {} for part in PARTS}
        # By identity: `WeakKeyDictionary` compares with ==, and two tensors then give a tensor.
        self._digests = WeakIdKeyDictionary()

    @property
    def missing_parts(self) -> tuple[EmbedderPart, ...]:
        """Parts with expected rows still to compute."""
        return tuple(
            part for part in PARTS if not self._rows[part].keys() >= self._expected[part].keys()
        )

    def set_expected(self, timesteps: Sequence[float], texts: Iterable[torch.Tensor]) -> None:
        """Set the next run's timesteps and texts and drop all other rows.

        Computes nothing.
        """
        # Rounded to float32 like a run's timesteps, because rows are looked up by equality.
        times = torch.tensor(timesteps, dtype=torch.float32).tolist()
        self._expected = {
            "time": {time: time for time in times},
            "text": {self._digest(text): text for text in texts},
        }
        for part in PARTS:
            _evict_extra(self._rows[part], self._expected[part], 0)

    def clear_expected(self) -> None:
        """Expect no rows, for a run with another expert. Cached rows are kept."""
        self._expected = {part: {} for part in PARTS}

    def invalidate(self, part: EmbedderPart) -> None:
        """Drop one part's rows, after a change of weights."""
        self._rows[part].clear()

    def rows(self, timestep: torch.Tensor, texts: Sequence[torch.Tensor]) -> list[Rows]:
        """Return the rows for `timestep` [1] with each of `texts` [1, L, text width].

        Inputs may have any dtype and device.
        """
        at = float(timestep.float())
        self._compute_missing(
            {"time": {at: at}, "text": {self._digest(text): text for text in texts}}
        )
        time, modulation = self._rows["time"][at]
        return [(time, modulation, self._rows["text"][self._digest(text)][0]) for text in texts]

    def time_rows(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return time [R, D] and modulation [R, 6 D] for R timesteps, each row computed alone."""
        self._compute_missing({"time": {time: time for time in timesteps}, "text": {}})
        times, modulations = zip(*(self._rows["time"][time] for time in timesteps), strict=True)
        return torch.cat(times), torch.cat(modulations)

    def compute_expected(self) -> None:
        """Compute the expected rows that are not cached yet."""
        self._compute_missing(self._expected)

    def _compute_missing(self, inputs: Mapping[EmbedderPart, Inputs]) -> None:
        """Compute the uncached rows for `inputs`, together with all expected ones.

        One call computes them all, so that the weights are loaded only once.
        """
        compute: Mapping[EmbedderPart, Callable[[Any], Row]] = {
            "time": self._time_row,
            "text": self._text_row,
        }
        for part, rows in self._rows.items():
            needed = {**inputs[part], **self._expected[part]}
            missing = {key: value for key, value in needed.items() if key not in rows}
            # Rows outlive the run that first needs them, and a later run may be outside inference
            # mode.
            with torch.inference_mode(False), torch.no_grad():
                if missing:
                    with self.weight_loader(part):
                        rows |= {key: compute[part](value) for key, value in missing.items()}
            _evict_extra(rows, needed, MAX_EXTRA_ROWS[part])

    def _time_row(self, time: float) -> Row:
        device = self.time_proj.weight.device
        # As in diffusers: fp32 up to the embedder's result, then the compute dtype.
        dtype = next(self.time_embedder.parameters()).dtype
        waves = self.timesteps_proj(torch.tensor([time], device=device))
        row = self.time_embedder(waves.to(dtype)).to(self._compute_dtype)
        return row, self.time_proj(self.act_fn(row))

    def _text_row(self, text: torch.Tensor) -> Row:
        device = next(self.text_embedder.parameters()).device
        return (self.text_embedder(text.to(device, self._compute_dtype)),)

    def _digest(self, text: torch.Tensor) -> Hashable:
        # Hashing copies the text to the CPU, so a tensor's digest is cached for the tensor's
        # lifetime.
        if text not in self._digests:
            whole = hashlib.blake2b(
                host_bytes(text.to("cpu").contiguous()).data, digest_size=16
            ).digest()
            # Texts with other shapes may have the same bytes.
            self._digests[text] = (whole, tuple(text.shape), text.dtype)
        found: Hashable = self._digests[text]
        return found


def _evict_extra(rows: dict[Hashable, Row], needed: Inputs, limit: int) -> None:
    """Drop the oldest rows outside `needed`, until at most `limit` extra ones remain."""
    # Dicts keep the order of insertion, so the oldest rows come first.
    extra = [key for key in rows if key not in needed]
    for key in extra[: max(0, len(extra) - limit)]:
        del rows[key]
