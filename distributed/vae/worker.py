"""Tile decoder of one worker; its VAE keeps its weights until `free`."""

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
from ..transport.path_map import resolve_path

RAM_SHARE = 0.5
"""Fraction of the available RAM for decoders on a CPU; the rest is for the frames of the driver."""


def decode_budget(device: torch.device, releasable_bytes: int) -> int:
    """Return the bytes of `device` that a decode may use; `releasable_bytes` are freed for it if it runs out."""
    free = free_bytes(device)
    if free is None:
        return int(RAM_SHARE * available_bytes())
    return max(0, free + releasable_bytes - VRAM_RESERVE)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeTask:
    """One tile of a video to be decoded."""

    run_id: str
    vae: Path
    """VAE file or folder, as a path on the driver's machine."""
    latents: torch.Tensor
    """[1, C, T, h, w], raw latents of the tile, on the CPU."""
    dtype: torch.dtype = torch.float32
    """Compute dtype of the VAE."""
    paths: tuple[PathMap, ...] = ()
    """Mapping of the path to the worker's machine."""


class DecodeCancelled(Cancelled):
    """The decode was stopped before a latent frame; the worker can decode again immediately."""


class TileDecoder:
    """Decoder of one tile at a time on one device. Thread-safe; concurrent calls wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: tuple[tuple[Path, torch.dtype], WanVae] | None = None

    def decode(self, task: DecodeTask, is_stopped: Callable[[], bool]) -> torch.Tensor:
        """Decode one tile -> [3, F, H, W] fp32 on the CPU, the format of `TileBlender`.

        Raises:
            DecodeCancelled: `is_stopped` returned True before a latent frame.
            VaeInputError: the shape of the latents does not fit the VAE.
            CheckpointFileError: the VAE cannot be read.
        """

        def check() -> None:
            if is_stopped():
                raise DecodeCancelled(f"the decode {task.run_id} was stopped")

        with self._lock:
            vae = self._vae(resolve_path(task.vae, task.paths), task.dtype)
            return vae.decode_tile(task.latents, device=self._device, check=check)

    def free(self) -> None:
        """Release the weights. Freeing twice is allowed; the next decode reads them again."""
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
