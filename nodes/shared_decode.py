"""A decode of tiles by workers, under this host."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from ..host import Progress, host
from ..plan import WorkersRef
from ..wan.smaller_tiles import in_words
from ..wan.vae import open_vae
from .decode_settings import DecodeSettings

if TYPE_CHECKING:
    import torch

    from ..distributed.decode import TileDone

LOG = logging.getLogger("wanstream.nodes")


def decode_shared(
    ref: WorkersRef, settings: DecodeSettings, latents: torch.Tensor, *, node_id: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Raw latents [B, C, T, h, w] -> frames [B, F, H, W, 3], as of `decode_in_shared_tiles`, and notes on its tiles.

    Where none are set, the tiles are those of `tiles_by_memory`. The host's Cancel ends it. Raises as both, and what
    starting the workers raises.
    """
    from ..distributed.decode import DecodeJob
    from ..distributed.shared_tiles import decode_in_shared_tiles, tiles_by_memory
    from ..distributed.vae_worker import DecodeCancelled

    told: list[str] = []

    def tell(change: str) -> None:
        LOG.info("%s", change)
        told.append(change)

    # Nothing is loaded here: what it takes is in its file's header.
    with open_vae(settings.vae, settings.dtype) as opened:
        needs, weight_bytes = opened.decode_needs(latents), opened.weight_bytes
    pool = host.worker_pool(ref)
    tiling = settings.tiling
    if tiling is None:
        tiling = tiles_by_memory(
            pool,
            needs,
            weight_bytes=weight_bytes,
            memory_bytes=settings.memory_bytes,
            videos=len(latents),
            check=host.raise_if_stopped,
        )
        tell(f"decoded in {in_words(tiling)}, by the memory of the workers ({len(pool.workers)})")
    job = DecodeJob(
        latents=latents,
        tiling=tiling,
        vae=settings.vae,
        dtype=settings.dtype,
        run_id=uuid.uuid4().hex,
        paths=ref.paths,
    )
    try:
        frames = decode_in_shared_tiles(
            pool,
            job,
            needs,
            max_restarts=ref.max_restarts,
            timeout_s=ref.timeout_s,
            should_stop=host.should_stop,
            on_tile=_Shown(node_id).show,
            on_change=tell,
        )
    except DecodeCancelled:
        host.raise_if_stopped()
        raise
    return frames, told


class _Shown:
    """The node's progress bar over all tiles of one try."""

    def __init__(self, node_id: str | None) -> None:
        self._node_id = node_id
        self._bar: tuple[int, Progress] | None = None

    def show(self, tile: TileDone) -> None:
        if self._bar is None or self._bar[0] != tile.total:
            self._bar = (tile.total, host.progress(tile.total, self._node_id))
        self._bar[1].update(tile.done)
