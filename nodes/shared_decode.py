"""A decode of tiles by workers, under this host."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from ..host import host
from ..plan import WorkersRef
from ..plan.vae_tiles import Tiling, TilingError

if TYPE_CHECKING:
    import torch

    from ..distributed.decode import TileDone


def decode_shared(
    ref: WorkersRef, vae: Path, latents: torch.Tensor, tiling: Tiling | None, *, node_id: str | None
) -> torch.Tensor:
    """Raw latents [B, C, T, h, w] -> frames [B, F, H, W, 3], as of `decode_on_workers`; the host's Cancel ends it.

    Raises TilingError without tiles, and what starting the workers raises.
    """
    from ..distributed.decode import DecodeJob, decode_on_workers
    from ..distributed.vae_worker import DecodeCancelled

    if tiling is None:
        raise TilingError("workers share a video by its tiles: set tile_size, for example to 256, or take workers off")
    pool = host.worker_pool(ref)
    job = DecodeJob(latents=latents, tiling=tiling, vae=vae, run_id=uuid.uuid4().hex, paths=ref.paths)
    bar = host.progress(latents.shape[0] * len(tiling.tiles(*latents.shape[3:])), node_id)

    def show(tile: TileDone) -> None:
        bar.update(tile.done)

    try:
        return decode_on_workers(
            pool, job, restarts=ref.restarts, timeout_s=ref.timeout_s, should_stop=host.should_stop, on_tile=show
        )
    except DecodeCancelled:
        host.raise_if_stopped()
        raise
