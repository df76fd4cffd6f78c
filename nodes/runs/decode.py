"""Decoding runs: tile size, progress and cancellation, in this process or on workers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...devices import surely_lacks
from ...host import OutputFile, ProgressBar, current_host
from ...schema import PIXELS_PER_LATENT, WorkersRef, need_text, size_text
from ...wan import (
    GB,
    HEAP_BYTES,
    DecodeNeeds,
    Tiling,
    VaeRoomError,
    WanVae,
    check_latents,
    fitting_tiling,
    in_words,
    open_vae,
    space_of,
    with_smaller_tiles,
)
from .latent_backup import keep_latent_until_done
from .video_file import write_mp4

if TYPE_CHECKING:
    from ...distributed import TileDone


VAE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What a VAE may compute in. Not fp16, whose largest number its activations may pass."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The inputs of a node that decodes, but for the latents."""

    vae: Path
    tiling: Tiling | None
    """None: the largest that fits."""
    memory_bytes: int
    """Limit on the decode's memory without the weights; 0 for the free memory of its device."""
    dtype: torch.dtype = torch.float32
    """What the VAE computes in; frames are fp32 in any case."""

    @classmethod
    def of(
        cls, vae: str, latents: torch.Tensor, tile_size: int, memory_gb: float, compute_dtype: str
    ) -> DecodeSettings:
        """As a node takes them; raises VaeInputError, TilingError, and as `current_host().model_path`."""
        check_latents(latents)
        return cls(
            vae=current_host().model_path(vae, "diffusers", "vae"),
            tiling=asked(tile_size, space_of(latents.shape[1]).pixels),
            memory_bytes=int(memory_gb * GB),
            dtype=VAE_DTYPES[compute_dtype],
        )


def asked(tile_size: int | None, per_latent: int = PIXELS_PER_LATENT) -> Tiling | None:
    """The tiles of that width; None for 0, and for a link, which is not known yet. Raises TilingError."""
    return Tiling.of(tile_size, per_latent) if tile_size else None


logger = logging.getLogger("wanstream.nodes")


def decode_shared(
    ref: WorkersRef, settings: DecodeSettings, latents: torch.Tensor, *, node_id: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Raw latents [B, C, T, h, w] -> frames [B, F, H, W, 3], as of `decode_in_shared_tiles`, and notes on its tiles.

    Where none are set, the tiles are those of `tiles_by_memory`. The host's Cancel ends it. Raises as both, and what
    starting the workers raises.
    """
    from ...distributed import DecodeCancelled, DecodeJob, decode_in_shared_tiles, tiles_by_memory

    told: list[str] = []

    def tell(change: str) -> None:
        logger.info("%s", change)
        told.append(change)

    # Nothing is loaded here: what it takes is in its file's header.
    with open_vae(settings.vae, settings.dtype) as opened:
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
            should_stop=current_host().should_stop,
            on_tile=_ShownTiles(node_id).show,
            on_change=tell,
        )
    except DecodeCancelled:
        current_host().raise_if_stopped()
        raise
    return frames, told


class _ShownTiles:
    """The node's progress bar over all tiles of one try."""

    def __init__(self, node_id: str | None) -> None:
        self._node_id = node_id
        self._bar: tuple[int, ProgressBar] | None = None

    def show(self, tile: TileDone) -> None:
        if self._bar is None or self._bar[0] != tile.total:
            self._bar = (tile.total, current_host().progress(tile.total, self._node_id))
        self._bar[1].update(tile.done)


Made = TypeVar("Made")

Check = Callable[[], None]
Decode = Callable[[WanVae, "Tiling | None", Check], Made]
"""Decodes in tiles of that size, or whole frames; the last is called before every latent frame of every tile."""


def decode_images(
    settings: DecodeSettings, latents: torch.Tensor, workers: WorkersRef | None, *, node_id: str | None
) -> tuple[torch.Tensor, list[str]]:
    """Raw latents [B, C, T, h, w] -> frames [B, F, H, W, 3] in RAM, here or by workers, and notes on its tiles.

    Until the frames are there the latents lie in a file, see `keep_latent_until_done`.
    """
    with keep_latent_until_done(latents):
        if workers is not None:
            return decode_shared(workers, settings, latents, node_id=node_id)

        def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> torch.Tensor:
            return opened.decode(latents, device=current_host().device(), tiling=tiling, check=check)

        return decode_here(settings, latents, decode, to_file=False, node_id=node_id)


def decode_to_file(
    settings: DecodeSettings, latents: torch.Tensor, prefix: str, *, node_id: str | None, **encoding: Any
) -> OutputFile:
    """Raw latents [B, C, T, h, w] -> an MP4 of that name, one video after the other; `encoding` as of `write_mp4`.

    Where memory runs out, the file is begun anew with smaller tiles.
    """
    height, width = (size * space_of(latents.shape[1]).pixels for size in latents.shape[3:])

    def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> None:
        parts = opened.stream(latents, device=current_host().device(), tiling=tiling, check=check)
        first = next(parts)  # reads the VAE's file: its errors are not those of the video's
        write_mp4(file.path, chain.from_iterable(chain([first], parts)), **encoding)

    with keep_latent_until_done(latents):
        file = current_host().output_file(prefix, "mp4", width=width, height=height)
        decode_here(settings, latents, decode, to_file=True, node_id=node_id)
    return file


def encode_here(vae: Path, video: torch.Tensor) -> torch.Tensor:
    """Frames [F, H, W, 3] in 0..1 -> raw latents [1, C, T, h, w], in the tiles that the free memory allows.

    Raises VaeRoomError where no tile fits, and as of `WanVae.encode`.
    """
    with open_vae(vae) as opened:
        needs, device = opened.encode_needs(video), current_host().device()
        wanted = opened.weight_bytes + needs.device_bytes(None) + needs.host_bytes(None)
        # The video lies where it is encoded.
        tiling = fitting_tiling(needs, current_host().make_room(wanted + HEAP_BYTES) - opened.weight_bytes, shared=True)
        if tiling is not None:
            logger.info("encoded in %s: there is no memory for whole frames", in_words(tiling))
        return with_smaller_tiles(
            lambda tiling: opened.encode(video, device=device, tiling=tiling), needs, tiling, logger.info
        )


def decode_here(
    settings: DecodeSettings, latents: torch.Tensor, decode: Decode[Made], *, to_file: bool, node_id: str | None
) -> tuple[Made, list[str]]:
    """The result of `decode` for raw latents [B, C, T, h, w] on the host's device, and notes on its tiles.

    Raises VaeRoomError where no tile fits, the host's interrupt, and as of `WanVae.decode`.
    """
    told: list[str] = []

    def tell(change: str) -> None:
        logger.info("%s", change)
        told.append(change)

    with open_vae(settings.vae, settings.dtype) as opened:
        needs = opened.decode_needs(latents, to_file=to_file)
        first = _first_tiling(settings, opened, needs, tell)

        def attempt(tiling: Tiling | None) -> Made:
            return decode(opened, tiling, _Shown(latents, tiling, node_id).check)

        return with_smaller_tiles(attempt, needs, first, tell), told


def _first_tiling(
    settings: DecodeSettings, opened: WanVae, needs: DecodeNeeds, tell: Callable[[str], None]
) -> Tiling | None:
    """What is asked for, or what fits; in any case the host has made room for it."""
    wanted = settings.memory_bytes or needs.device_bytes(settings.tiling)
    room = current_host().make_room(wanted + opened.weight_bytes) - opened.weight_bytes
    if settings.tiling is not None:
        _check_decode_ram(needs, settings.tiling)
        return settings.tiling
    budget = min(room, settings.memory_bytes) if settings.memory_bytes else room
    tiling = fitting_tiling(needs, budget, shared=current_host().device().type == "cpu")
    if tiling is not None:
        tell(
            f"decoded in {in_words(tiling)}: whole frames take {size_text(needs.device_bytes(None))}, "
            f"{size_text(budget)} given"
        )
    _check_decode_ram(needs, tiling)
    return tiling


def _check_decode_ram(needs: DecodeNeeds, tiling: Tiling | None) -> None:
    """Refuse frames for which there is too little RAM: the system would end the process. Raises VaeRoomError."""
    on_cpu = current_host().device().type == "cpu"
    needed = needs.host_bytes(tiling) + (needs.device_bytes(tiling) if on_cpu else 0)
    lacking = surely_lacks(needed)
    if lacking is None:
        return
    ways = ["make the video shorter or smaller"]
    if needs.keeps_frames:
        ways.insert(0, "decode straight into a file (Wan Decode to Video), which keeps a fourth of each frame")
    if on_cpu and tiling is not None:
        ways.insert(0, "set tile_size to 0, which chooses tiles by the memory")
    raise VaeRoomError(
        f"decoding {needs.frames} frames takes about {need_text(needed)} of RAM, and {need_text(lacking)} are free "
        f"(swap included), so the system would end this process: {', or '.join(ways)}"
    )


class _Shown:
    """The node's progress bar over all latent frames of all tiles of one try."""

    def __init__(self, latents: torch.Tensor, tiling: Tiling | None, node_id: str | None) -> None:
        batch, _, count, height, width = latents.shape
        tiles = 1 if tiling is None else len(tiling.tiles(height, width))
        self._bar = current_host().progress(batch * tiles * (count + 1), node_id)
        self._done = 0

    def check(self) -> None:
        """Count, and end the decode where the user has stopped it."""
        current_host().raise_if_stopped()
        self._done += 1
        self._bar.update(self._done)
