"""Decoding runs: tile size, progress and cancellation, in this process or on workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from ...devices import runtime_for
from ...devices.machine import insufficient_ram
from ...distributed import DecodeTask, decode_in_shared_tiles, tiles_by_memory
from ...host import Host, Memory, OutputFile
from ...schema.records import Notice
from ...schema.refs import WorkersRef
from ...schema.text import format_need, format_size
from ...shapes import PIXELS_PER_LATENT
from ...wan.latents import space_of
from ...wan.vae import (
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
)
from .file_checks import DECODER_FOLDERS, check_decoder
from .latent_backup import keep_latent_until_done
from .video_file import VideoEncoding


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Inputs to a decoding node, except the latents."""

    vae: Path
    tiling: Tiling | None
    """Tiles, or None for whole frames or the largest tiles that fit."""
    memory_bytes: int
    """Memory limit for the decode without the weights, or 0 for the device's free memory."""
    dtype: torch.dtype = torch.float32
    """VAE compute dtype. Frames are always fp32."""
    latent_scale: str = BY_FILE_NAME
    """One of `LATENT_SCALES`, for a tiny VAE."""
    notices: tuple[Notice, ...] = ()
    """Notices on the VAE file."""

    @classmethod
    def of(
        cls,
        host: Host,
        vae: str,
        latents: torch.Tensor,
        *,
        tile_size: int = 0,
        memory_gb: float = 0.0,
        compute_dtype: str = "fp32",
        latent_scale: str = BY_FILE_NAME,
    ) -> DecodeSettings:
        """Return the settings from a node's widgets.

        Raises:
            VaeInputError: `latents` do not come from a Wan VAE.
            TilingError: no tiles of this size are possible.
            Exception: any error from `check_decoder`.
        """
        # Again, because `validate_inputs` gets None for linked values. Results are cached.
        notices = check_decoder(host, vae, compute_dtype, latent_scale)
        check_latents(latents)
        return cls(
            vae=host.files.model_path(vae, *DECODER_FOLDERS),
            tiling=requested_tiling(tile_size, space_of(latents.shape[1]).pixels),
            memory_bytes=int(memory_gb * GB),
            dtype=VAE_DTYPES[compute_dtype],
            latent_scale=latent_scale,
            notices=notices,
        )

    def open(self) -> WanVae:
        """Open the VAE. Raises the errors of `open_vae`."""
        return open_vae(self.vae, self.dtype, self.latent_scale)


def requested_tiling(tile_size: int | None, per_latent: int = PIXELS_PER_LATENT) -> Tiling | None:
    """Return tiles with this width in pixels, or None for 0 and for a linked value.

    Raises TilingError.
    """
    return Tiling.of(tile_size, per_latent) if tile_size else None


logger = logging.getLogger("wanstream.nodes")


def decode_shared(
    host: Host,
    ref: WorkersRef,
    settings: DecodeSettings,
    latents: torch.Tensor,
    *,
    node_id: str | None,
) -> tuple[torch.Tensor, list[Notice]]:
    """Decode raw latents [B, C, T, h, w] on workers.

    Returns frames [B, F, H, W, 3] and notes on the tiles.

    Without a tile size, `tiles_by_memory` chooses it. The host's Cancel ends the decode.

    Raises:
        Exception: the errors from `tiles_by_memory`, `decode_in_shared_tiles` and starting the
            workers.
    """
    notes = TileNotes()
    # This reads only the header, which is enough to compute the memory needs.
    with settings.open() as opened:
        needs = opened.decode_needs(latents)
        weight_bytes = opened.weight_bytes
    # After the VAE's header: a bad file must not start workers.
    pool = host.memory.worker_pool(ref)
    tiling = settings.tiling
    if tiling is None:
        tiling = tiles_by_memory(
            pool,
            needs,
            weight_bytes=weight_bytes,
            memory_bytes=settings.memory_bytes,
            videos=len(latents),
            check=host.events.raise_if_stopped,
        )
        notes.add(
            f"decoded in {describe_tiling(tiling)}, by the memory of the workers "
            f"({len(pool.workers)})"
        )
    # The number of tiles changes if the decode starts again with smaller ones.
    bar_over = cache(lambda total: host.events.progress(total, node_id))
    frames = decode_in_shared_tiles(
        pool,
        ref,
        DecodeTask(
            latents=latents,
            vae=settings.vae,
            dtype=settings.dtype,
            latent_scale=settings.latent_scale,
        ),
        tiling,
        needs,
        check=host.events.raise_if_stopped,
        on_tile=lambda done, total: bar_over(total).update(done),
        on_change=notes.add,
    )
    return frames, notes


class TileNotes(list[Notice]):
    """Notes on the tiles in a decode, logged when added."""

    def add(self, note: str) -> None:
        logger.info("%s", note)
        self.append(Notice.of(note))


T = TypeVar("T")

Check = Callable[[], None]
Decode = Callable[[WanVae, "Tiling | None", Check], T]
"""Decoder for tiles of this size, or whole frames. It calls the check before every latent frame in
every tile."""


def decode_images(
    host: Host,
    settings: DecodeSettings,
    latents: torch.Tensor,
    workers: WorkersRef | None,
    *,
    node_id: str | None,
) -> tuple[torch.Tensor, list[Notice]]:
    """Decode raw latents [B, C, T, h, w], here or on workers.

    Returns frames [B, F, H, W, 3] in RAM and notes on tiles.

    A file keeps the latents until the frames are complete; see `keep_latent_until_done`.
    """
    with keep_latent_until_done(host, latents):
        if workers is not None:
            return decode_shared(host, workers, settings, latents, node_id=node_id)

        def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> torch.Tensor:
            return opened.decode(latents, device=host.memory.device(), tiling=tiling, check=check)

        return decode_here(host, settings, latents, decode, to_file=False, node_id=node_id)


def decode_to_file(
    host: Host,
    settings: DecodeSettings,
    latents: torch.Tensor,
    prefix: str,
    *,
    node_id: str | None,
    video: VideoEncoding,
) -> tuple[OutputFile, list[Notice]]:
    """Decode raw latents [B, C, T, h, w] into one file, video after video.

    Returns the file and notes on tiles. If memory runs out, the file is written again with smaller
    tiles.

    Args:
        host: host.
        settings: VAE and tiles.
        latents: raw latents.
        prefix: prefix of the file name.
        node_id: node of the run.
        video: format, rate, quality, graph and sound.
    """
    height, width = (size * space_of(latents.shape[1]).pixels for size in latents.shape[3:])

    def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> None:
        # Each attempt starts from the first frame and writes the file again.
        parts = opened.stream(latents, device=host.memory.device(), tiling=tiling, check=check)
        # Parts [n, H, W, 3] become single frames.
        frames = itertools.chain.from_iterable(parts)
        stop = host.events.raise_if_stopped
        video.write(file.path, frames, stop)

    with keep_latent_until_done(host, latents):
        # Inside the `with`: a folder that cannot be created must not cost the latent.
        file = host.files.output_file(prefix, video.suffix, width=width, height=height)
        _, notes = decode_here(host, settings, latents, decode, to_file=True, node_id=node_id)
    return file, notes


def encode_here(host: Host, vae: Path, video: torch.Tensor) -> torch.Tensor:
    """Encode frames [F, H, W, 3] in 0..1 into raw latents [1, C, T, h, w], in tiles if needed.

    Raises:
        VaeMemoryError: no tile fits into memory.
        Exception: the host's interrupt, and any error from `WanVae.encode`.
    """
    with open_vae(vae) as opened:
        needs = opened.encode_needs(video)
        device = host.memory.device()
        wanted = opened.weight_bytes + needs.device_bytes(None) + needs.host_bytes(None)
        # shared=True: frames and encoder use the same memory.
        tiling = choose_tiling(
            needs, host.memory.make_room(wanted + HEAP_BYTES) - opened.weight_bytes, shared=True
        )
        if tiling is not None:
            logger.info("encoded in %s: whole frames do not fit in memory", describe_tiling(tiling))
        return retry_with_smaller_tiles(
            lambda tiling: opened.encode(
                video, device=device, tiling=tiling, check=host.events.raise_if_stopped
            ),
            needs,
            tiling,
            logger.info,
        )


def decode_here(
    host: Host,
    settings: DecodeSettings,
    latents: torch.Tensor,
    decode: Decode[T],
    *,
    to_file: bool,
    node_id: str | None,
) -> tuple[T, list[Notice]]:
    """Return `decode`'s result for raw latents [B, C, T, h, w], and notes on the tiles.

    The latents are on the host's device.

    Raises:
        VaeMemoryError: no tile fits into memory.
        Exception: the host's interrupt, and any error from `WanVae.decode`.
    """
    batch, _, count, height, width = latents.shape
    notes = TileNotes()
    with settings.open() as opened:
        needs = opened.decode_needs(latents, to_file=to_file)
        first = _first_tiling(host.memory, settings, opened, needs, notes)

        def attempt(tiling: Tiling | None) -> T:
            tiles = 1 if tiling is None else len(tiling.tiles(height, width))
            # `count + 1`: a check before each latent frame of a tile, and one after the last.
            bar = host.events.progress(batch * tiles * (count + 1), node_id)
            # A new count for each attempt, like the bar.
            frames = itertools.count(1)

            def check() -> None:
                host.events.raise_if_stopped()
                bar.update(next(frames))

            return decode(opened, tiling, check)

        return retry_with_smaller_tiles(attempt, needs, first, notes.add), notes


def _first_tiling(
    memory: Memory, settings: DecodeSettings, opened: WanVae, needs: DecodeNeeds, notes: TileNotes
) -> Tiling | None:
    """Return the requested tiles, or fitting ones, after the host has freed memory for them."""
    in_ram = runtime_for(memory.device()) is None
    # Without tiles, this is memory for whole frames. Tiles are chosen below if there is less.
    wanted = settings.memory_bytes or needs.device_bytes(settings.tiling)
    # The weights are not loaded yet and take a part.
    room = memory.make_room(wanted + opened.weight_bytes) - opened.weight_bytes
    tiling = settings.tiling
    if tiling is None:
        # The user's limit counts, but not beyond the free memory.
        budget = min(room, settings.memory_bytes or room)
        tiling = choose_tiling(needs, budget, shared=in_ram)
        if tiling is not None:
            notes.add(
                f"decoded in {describe_tiling(tiling)}: whole frames take "
                f"{format_size(needs.device_bytes(None))}, {format_size(budget)} given"
            )
    # After the eviction, because this may free RAM as well.
    _check_decode_ram(needs, tiling, in_ram=in_ram)
    return tiling


def _check_decode_ram(needs: DecodeNeeds, tiling: Tiling | None, *, in_ram: bool) -> None:
    """Raise VaeMemoryError for frames that do not fit into RAM.

    The system would kill the process.
    """
    needed = needs.host_bytes(tiling)
    if in_ram:
        needed += needs.device_bytes(tiling)
    lacking = insufficient_ram(needed)
    if lacking is None:
        return
    remedies = []
    if in_ram and tiling is not None:
        remedies.append("set tile_size to 0, which chooses tiles by the memory")
    if needs.keeps_frames:
        remedies.append(
            "decode straight into a file (Wan Decode to Video), which keeps a fourth of each frame"
        )
    remedies.append("make the video shorter or smaller")
    raise VaeMemoryError(
        f"decoding {needs.frames} frames takes about {format_need(needed)} of RAM, and "
        f"{format_need(lacking)} are free (swap included), so the system would kill this process: "
        f"{', or '.join(remedies)}"
    )
