"""The VAE of one worker: it decodes the tiles that it is given, and keeps the weights until it is told to free them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...devices import available_bytes, free_bytes
from ...plan import VRAM_RESERVE
from ...schema import Cancelled, PathMap
from ...wan import WanVae, open_vae
from ..transport.path_map import located

RAM_SHARE = 0.5
"""Of the RAM that can be taken, what decoders on a CPU may take; in the rest the driver puts the frames together."""


def tile_room(device: torch.device, held: int) -> int:
    """Bytes of `device` that a decode may take, where `held` bytes more become free when it lacks them."""
    free = free_bytes(device)
    if free is None:
        return int(RAM_SHARE * available_bytes())
    return max(0, free + held - VRAM_RESERVE)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeTask:
    """One tile of a video."""

    run_id: str
    vae: Path
    """Of the VAE's file or folder, as it is on the driver's machine."""
    latents: torch.Tensor
    """[1, C, T, h, w], raw: the tile's part of the video, on the CPU."""
    dtype: torch.dtype = torch.float32
    """Which the VAE computes in."""
    paths: tuple[PathMap, ...] = ()
    """Where the VAE lies on the worker's machine."""


class DecodeCancelled(Cancelled):
    """The decode was stopped before a frame; the worker can decode again at once."""


class TileDecoder:
    """Decodes one tile at a time on one device; callers on other threads wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: tuple[tuple[Path, torch.dtype], WanVae] | None = None

    def decode(self, task: DecodeTask, is_stopped: Callable[[], bool]) -> torch.Tensor:
        """[3, F, H, W] fp32 on the CPU, as `TileBlender` takes it.

        Raises:
            DecodeCancelled: `is_stopped` said so before a latent frame.
            VaeInputError: the latents have another shape.
            CheckpointFileError: the VAE cannot be read.
        """

        def check() -> None:
            if is_stopped():
                raise DecodeCancelled(f"the decode {task.run_id} was stopped")

        with self._lock:
            vae = self._vae(located(task.vae, task.paths), task.dtype)
            return vae.decode_tile(task.latents, device=self._device, check=check)

    def free(self) -> None:
        """Let go of the weights. Freeing twice is allowed, and so is decoding again."""
        with self._lock:
            self._close()

    def _vae(self, path: Path, dtype: torch.dtype) -> WanVae:
        if self._open is None or self._open[0] != (path, dtype):
            self._close()
            self._open = ((path, dtype), open_vae(path, dtype))
        return self._open[1]

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()
