"""A decode under this host: how large its tiles are, what is shown of it, and how it ends early."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..host import OutputFile, host
from ..offload.available_memory import surely_lacks
from ..plan import WorkersRef
from ..plan.figure_words import need_text, size_text
from ..plan.vae_room import HEAP_BYTES, DecodeNeeds, VaeRoomError, fitting_tiling
from ..plan.vae_tiles import Tiling
from ..wan.latent_space import space_of
from ..wan.smaller_tiles import in_words, with_smaller_tiles
from ..wan.vae import WanVae, open_vae
from .decode_settings import DecodeSettings
from .latent_file import keep_latent_until_done
from .shared_decode import decode_shared
from .video_file import write_mp4

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("wanstream.nodes")

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
            return opened.decode(latents, device=host.device(), tiling=tiling, check=check)

        return decode_here(settings, latents, decode, to_file=False, node_id=node_id)


def decode_to_file(
    settings: DecodeSettings, latents: torch.Tensor, prefix: str, *, node_id: str | None, **encoding: Any
) -> OutputFile:
    """Raw latents [B, C, T, h, w] -> an MP4 of that name, one video after the other; `encoding` as of `write_mp4`.

    Where memory runs out, the file is begun anew with smaller tiles.
    """
    height, width = (size * space_of(latents.shape[1]).pixels for size in latents.shape[3:])

    def decode(opened: WanVae, tiling: Tiling | None, check: Check) -> None:
        parts = opened.stream(latents, device=host.device(), tiling=tiling, check=check)
        first = next(parts)  # reads the VAE's file: its errors are not those of the video's
        write_mp4(file.path, chain.from_iterable(chain([first], parts)), **encoding)

    with keep_latent_until_done(latents):
        file = host.output_file(prefix, "mp4", width=width, height=height)
        decode_here(settings, latents, decode, to_file=True, node_id=node_id)
    return file


def encode_here(vae: Path, video: torch.Tensor) -> torch.Tensor:
    """Frames [F, H, W, 3] in 0..1 -> raw latents [1, C, T, h, w], in the tiles that the free memory allows.

    Raises VaeRoomError where no tile fits, and as of `WanVae.encode`.
    """
    with open_vae(vae) as opened:
        needs, device = opened.encode_needs(video), host.device()
        wanted = opened.weight_bytes + needs.device_bytes(None) + needs.host_bytes(None)
        # The video lies where it is encoded.
        tiling = fitting_tiling(needs, host.make_room(wanted + HEAP_BYTES) - opened.weight_bytes, shared=True)
        if tiling is not None:
            LOG.info("encoded in %s: there is no memory for whole frames", in_words(tiling))
        return with_smaller_tiles(
            lambda tiling: opened.encode(video, device=device, tiling=tiling), needs, tiling, LOG.info
        )


def decode_here(
    settings: DecodeSettings, latents: torch.Tensor, decode: Decode[Made], *, to_file: bool, node_id: str | None
) -> tuple[Made, list[str]]:
    """The result of `decode` for raw latents [B, C, T, h, w] on the host's device, and notes on its tiles.

    Raises VaeRoomError where no tile fits, the host's interrupt, and as of `WanVae.decode`.
    """
    told: list[str] = []

    def tell(change: str) -> None:
        LOG.info("%s", change)
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
    room = host.make_room(wanted + opened.weight_bytes) - opened.weight_bytes
    if settings.tiling is not None:
        _check_decode_ram(needs, settings.tiling)
        return settings.tiling
    budget = min(room, settings.memory_bytes) if settings.memory_bytes else room
    tiling = fitting_tiling(needs, budget, shared=host.device().type == "cpu")
    if tiling is not None:
        tell(
            f"decoded in {in_words(tiling)}: whole frames take {size_text(needs.device_bytes(None))}, "
            f"{size_text(budget)} given"
        )
    _check_decode_ram(needs, tiling)
    return tiling


def _check_decode_ram(needs: DecodeNeeds, tiling: Tiling | None) -> None:
    """Refuse frames for which there is too little RAM: the system would end the process. Raises VaeRoomError."""
    on_cpu = host.device().type == "cpu"
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
        self._bar = host.progress(batch * tiles * (count + 1), node_id)
        self._done = 0

    def check(self) -> None:
        """Count, and end the decode where the user has stopped it."""
        host.raise_if_stopped()
        self._done += 1
        self._bar.update(self._done)
