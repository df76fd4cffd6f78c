"""Decoding runs: tile size, progress and cancellation, in this process or on workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...devices import insufficient_ram, runtime_for
from ...distributed import DecodeTask, decode_in_shared_tiles, tiles_by_memory
from ...host import OutputFile, current_host
from ...schema import PIXELS_PER_LATENT, WorkersRef, format_need, format_size
from ...wan import (
    BY_FILE_NAME,
    GB,
    HEAP_BYTES,
    VAE_DTYPES,
    DecodeNeeds,
    Tiling,
    VaeMemoryError,
    WanVae,
    check_latents,
    choose_tiling,
    describe_tiling,
    open_vae,
    retry_with_smaller_tiles,
    space_of,
)
from .file_checks import DECODER_FOLDERS
from .latent_backup import keep_latent_until_done
from .video_file import write_mp4


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Inputs of a decoding node except for the latents."""

    vae: Path
    tiling: Tiling | None
    """Tiles; None for whole frames, or for the largest tiles that fit."""
    memory_bytes: int
    """Limit on the memory of the decode without the weights; 0 for the free memory of its device."""
    dtype: torch.dtype = torch.float32
    """Compute dtype of the VAE; frames are always fp32."""
    latent_scale: str = BY_FILE_NAME
    """One of `LATENT_SCALES`, for a tiny VAE."""

    @classmethod
    def of(
        cls,
        vae: str,
        latents: torch.Tensor,
        tile_size: int,
        memory_gb: float,
        compute_dtype: str,
        latent_scale: str = BY_FILE_NAME,
    ) -> DecodeSettings:
        """Return the settings for a node's widgets.

        Raises:
            VaeInputError: `latents` are not those of a Wan VAE.
            TilingError: no tiles of that size are possible.
            Exception: any error of `model_path`.
        """
        check_latents(latents)
        return cls(
            vae=current_host().model_path(vae, *DECODER_FOLDERS),
            tiling=requested_tiling(tile_size, space_of(latents.shape[1]).pixels),
            memory_bytes=int(memory_gb * GB),
            dtype=VAE_DTYPES[compute_dtype],
            latent_scale=latent_scale,
        )

    def open(self) -> WanVae:
        """Open the VAE; raises the errors of `open_vae`."""
        return open_vae(self.vae, self.dtype, self.latent_scale)


def requested_tiling(tile_size: int | None, per_latent: int = PIXELS_PER_LATENT) -> Tiling | None:
    """Return tiles of that width in pixels, or None for 0 and for a linked value; raises TilingError."""
    return Tiling.of(tile_size, per_latent) if tile_size else None


logger = logging.getLogger("wanstream.nodes")


def decode_shared(
    ref: WorkersRef, settings: DecodeSettings, latents: torch.Tensor, *, node_id: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Decode raw latents [B, C, T, h, w] on workers; returns frames [B, F, H, W, 3] and notes on the tiles.

    Without a tile size, `tiles_by_memory` chooses it. The host's Cancel ends the decode.

    Raises:
        Exception: the errors of `tiles_by_memory`, of `decode_in_shared_tiles` and of starting the workers.
    """
    notes = TileNotes()
    # Only the header is read here: it is enough to compute the memory needs.
    with settings.open() as opened:
        needs, weight_bytes = opened.decode_needs(latents), opened.weight_bytes
    pool = current_host().worker_pool(ref)
    tiling = settings.tiling
    if tiling is None:
        tiling = tiles_by_memory(
            pool,
            needs,
            weight_bytes=weight_bytes,
            memory_bytes=settings.memory_bytes,
            videos=len(latents),
            check=current_host().raise_if_stopped,
        )
        notes.add(f"decoded in {describe_tiling(tiling)}, by the memory of the workers ({len(pool.workers)})")
    # The number of tiles changes if the decode starts again with smaller ones.
    bar_over = cache(lambda total: current_host().progress(total, node_id))
    frames = decode_in_shared_tiles(
        pool,
        ref,
        DecodeTask(latents=latents, vae=settings.vae, dtype=settings.dtype, latent_scale=settings.latent_scale),
        tiling,
        needs,
        check=current_host().raise_if_stopped,
        on_tile=lambda done, total: bar_over(total).update(done),
        on_change=notes.add,
    )
    return frames, notes


class TileNotes(list[str]):
    """Notes on the tiles of a decode, which are logged when they are added."""

    def add(self, note: str) -> None:
        logger.info("%s", note)
        self.append(note)


T = TypeVar("T")

Check = Callable[[], None]
Decode = Callable[[WanVae, "Tiling | None", Check], T]
"""Decoder for tiles of that size, or whole frames; it calls the check before every latent frame of every tile."""


def decode_images(
    settings: DecodeSettings, latents: torch.Tensor, workers: WorkersRef | None, *, node_id: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Decode raw latents [B, C, T, h, w], here or on workers; returns frames [B, F, H, W, 3] in RAM and notes on tiles.

    A file keeps the latents until the frames are complete, see `keep_latent_until_done`.
    """
    with keep_latent_until_done(latents):
        if workers is not None:
            return decode_shared(workers, settings, latents, node_id=node_id)

        def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> torch.Tensor:
            return opened.decode(latents, device=current_host().device(), tiling=tiling, check=check)

        return decode_here(settings, latents, decode, to_file=False, node_id=node_id)


def decode_to_file(
    settings: DecodeSettings, latents: torch.Tensor, prefix: str, *, node_id: str | None, **encoding: Any
) -> tuple[OutputFile, list[str]]:
    """Decode raw latents [B, C, T, h, w] into one MP4, video after video. Returns the file and notes on tiles.

    `encoding` are arguments of `write_mp4`. If memory runs out, the file is written again with smaller tiles.
    """
    height, width = (size * space_of(latents.shape[1]).pixels for size in latents.shape[3:])

    def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> None:
        parts = opened.stream(latents, device=current_host().device(), tiling=tiling, check=check)
        frames = itertools.chain.from_iterable(parts)
        write_mp4(file.path, frames, **encoding, check=current_host().raise_if_stopped)

    with keep_latent_until_done(latents):
        file = current_host().output_file(prefix, "mp4", width=width, height=height)
        _, notes = decode_here(settings, latents, decode, to_file=True, node_id=node_id)
    return file, notes


def encode_here(vae: Path, video: torch.Tensor) -> torch.Tensor:
    """Encode frames [F, H, W, 3] in 0..1 into raw latents [1, C, T, h, w], in tiles if whole frames do not fit.

    Raises:
        VaeMemoryError: no tile fits into memory.
        Exception: the host's interrupt, and any error of `WanVae.encode`.
    """
    with open_vae(vae) as opened:
        needs, device = opened.encode_needs(video), current_host().device()
        wanted = opened.weight_bytes + needs.device_bytes(None) + needs.host_bytes(None)
        # shared=True: the frames are in the memory in which they are encoded.
        tiling = choose_tiling(needs, current_host().make_room(wanted + HEAP_BYTES) - opened.weight_bytes, shared=True)
        if tiling is not None:
            logger.info("encoded in %s: whole frames do not fit in memory", describe_tiling(tiling))
        return retry_with_smaller_tiles(
            lambda tiling: opened.encode(video, device=device, tiling=tiling, check=current_host().raise_if_stopped),
            needs,
            tiling,
            logger.info,
        )


def decode_here(
    settings: DecodeSettings, latents: torch.Tensor, decode: Decode[T], *, to_file: bool, node_id: str | None
) -> tuple[T, list[str]]:
    """Return the result of `decode` for raw latents [B, C, T, h, w] on the host's device, and notes on the tiles.

    Raises:
        VaeMemoryError: no tile fits into memory.
        Exception: the host's interrupt, and any error of `WanVae.decode`.
    """
    batch, _, count, height, width = latents.shape
    notes = TileNotes()
    with settings.open() as opened:
        needs = opened.decode_needs(latents, to_file=to_file)
        first = _first_tiling(settings, opened, needs, notes)

        def attempt(tiling: Tiling | None) -> T:
            tiles = 1 if tiling is None else len(tiling.tiles(height, width))
            bar, frames = current_host().progress(batch * tiles * (count + 1), node_id), itertools.count(1)

            def check() -> None:
                current_host().raise_if_stopped()
                bar.update(next(frames))

            return decode(opened, tiling, check)

        return retry_with_smaller_tiles(attempt, needs, first, notes.add), notes


def _first_tiling(settings: DecodeSettings, opened: WanVae, needs: DecodeNeeds, notes: TileNotes) -> Tiling | None:
    """Return the requested tiles, or those that fit, after the host has freed memory for them."""
    wanted = settings.memory_bytes or needs.device_bytes(settings.tiling)
    room = current_host().make_room(wanted + opened.weight_bytes) - opened.weight_bytes
    tiling = settings.tiling
    if tiling is None:
        budget = min(room, settings.memory_bytes) if settings.memory_bytes else room
        tiling = choose_tiling(needs, budget, shared=runtime_for(current_host().device()) is None)
        if tiling is not None:
            notes.add(
                f"decoded in {describe_tiling(tiling)}: whole frames take {format_size(needs.device_bytes(None))}, "
                f"{format_size(budget)} given"
            )
    _check_decode_ram(needs, tiling)
    return tiling


def _check_decode_ram(needs: DecodeNeeds, tiling: Tiling | None) -> None:
    """Raise VaeMemoryError for frames that do not fit into RAM: the system would kill the process."""
    in_ram = runtime_for(current_host().device()) is None
    needed = needs.host_bytes(tiling) + (needs.device_bytes(tiling) if in_ram else 0)
    lacking = insufficient_ram(needed)
    if lacking is None:
        return
    remedies = ["make the video shorter or smaller"]
    if needs.keeps_frames:
        remedies.insert(0, "decode straight into a file (Wan Decode to Video), which keeps a fourth of each frame")
    if in_ram and tiling is not None:
        remedies.insert(0, "set tile_size to 0, which chooses tiles by the memory")
    raise VaeMemoryError(
        f"decoding {needs.frames} frames takes about {format_need(needed)} of RAM, and {format_need(lacking)} are free "
        f"(swap included), so the system would kill this process: {', or '.join(remedies)}"
    )
