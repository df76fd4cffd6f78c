"""Moving previews during a run: the current estimate's first frames, decoded by a tiny VAE.

A preview is decoded between two steps. In this process it uses the memory in which blocks compute,
because that is free between steps. With workers it uses memory in this process, and local workers
do not plan for it.

All previews together take at most `MAX_SHARE` of the run, except the first. The first one shows few
frames, and their time determines the pause before a full preview.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, features

from ...devices import auto_dtype, forget, is_out_of_memory
from ...host import Events
from ...shapes import FRAMES_PER_LATENT
from ...wan.latents import WAN22, denormalise
from ...wan.vae import BY_FILE_NAME, WanVae, open_tiny_vae

MAX_SHARE = 0.05
"""Largest share of a run's time for previews after the first one."""
FIRST_LATENTS = 2
"""Latent frames in the first preview. The second frame takes as long as each later one."""
PREVIEW_PIXELS = 384
"""Longest side of a preview, in pixels."""
QUALITY = 75
"""WebP quality. 33 frames take 20 to 100 kB."""
MAX_BYTES = 1_000_000
"""Size limit in bytes, because everybody who is connected gets the preview. A longer one has fewer
frames."""
FPS = 16
FPS_5B = 24

logger = logging.getLogger("wanstream.nodes")


@dataclass(frozen=True, kw_only=True)
class PreviewSettings:
    """Settings for moving previews. Raises the error of `check_frames`."""

    vae: Path
    """Tiny VAE file."""
    latent_scale: str = BY_FILE_NAME
    """One of `LATENT_SCALES`."""
    frames: int = 33
    """Most frames in a preview: 4n + 1, from the start of the video. The first preview has at most
    5."""
    every_s: float = 5.0
    """Fewest seconds between two previews."""

    def __post_init__(self) -> None:
        check_frames(self.frames)

    def open(self, device: torch.device) -> WanVae:
        """Open the VAE in the device's default dtype.

        Raises:
            RuntimeError: Pillow cannot write WebP.
            Exception: the errors of `open_tiny_vae`.
        """
        if not features.check("webp"):
            raise RuntimeError(
                "previews are WebP pictures, and the Pillow of this Python was built without WebP: "
                "install another one (`python -m pip install --force-reinstall --only-binary :all: "
                "pillow`), or remove Wan Moving Preview"
            )
        return open_tiny_vae(self.vae, auto_dtype(device), self.latent_scale)


def check_frames(frames: int) -> None:
    """Raise ValueError unless `frames` is 4n + 1."""
    if frames < 1 or frames % FRAMES_PER_LATENT != 1:
        nearest = max(0, round((frames - 1) / FRAMES_PER_LATENT)) * FRAMES_PER_LATENT + 1
        raise ValueError(
            f"frames is {frames}, it must be a multiple of {FRAMES_PER_LATENT} plus 1: use "
            f"{nearest}"
        )


def is_due(waited_s: float, cost_s: float, every_s: float) -> bool:
    """Return True if a preview of about `cost_s` may begin `waited_s` after the last one's end."""
    # Previews take MAX_SHARE if the pause is (1 / MAX_SHARE - 1) times as long as a preview.
    return waited_s >= max(every_s, cost_s * (1 / MAX_SHARE - 1))


class MovingPreviews(AbstractContextManager["MovingPreviews"]):
    """Previews for one run. The first one comes `every_s` after the start.

    Args:
        events: host events. Nothing is decoded while nobody is connected. The host's interrupt ends
            the run before a latent frame.
        clock: returns seconds.

    Raises:
        VaeInputError: the VAE does not fit `latents`.
        Exception: the errors of `PreviewSettings.open`.
    """

    def __init__(
        self,
        settings: PreviewSettings,
        latents: torch.Tensor,
        device: torch.device,
        events: Events,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._device = device
        self._events = events
        self._clock = clock
        self._vae = settings.open(device)
        # Now, before the experts are opened, and not at the first preview.
        self._vae.check_latents(latents)
        # The run's start counts as an end, so the first preview waits `every_s`.
        self._ended_at = clock()
        self._latents = min(latents.shape[2], (settings.frames - 1) // FRAMES_PER_LATENT + 1)
        self._cost_s = 0.0
        """Expected time for the next preview."""
        self._failed = False
        self.count = 0
        """Number of previews."""
        self.spent_s = 0.0
        """Seconds spent in all previews."""

    def update(self, denoised: torch.Tensor) -> bytes | None:
        """Return an animated WebP for normalised latents [B, C, T, h, w], showing the first video.

        Return None if no preview is due.

        A failing preview ends the previews with a message in the log. The run continues.

        Raises:
            BaseException: the host's interrupt.
        """
        began_at = self._clock()
        due = is_due(began_at - self._ended_at, self._cost_s, self._settings.every_s)
        if self._failed or not due or not self._events.has_viewers():
            return None
        latents = self._latents if self.count else FIRST_LATENTS
        try:
            image, per_latent_s = self._image(denoised, latents)
        except Exception as err:  # of any kind, because no preview is worth a run of hours
            if self._events.is_stop(err):
                raise
            self._end(err)
            return None
        self._ended_at = self._clock()
        cost_s = self._ended_at - began_at
        # The first preview has few frames, and the next one may have all.
        self._cost_s = max(cost_s, self._latents * per_latent_s)
        self.count += 1
        self.spent_s += cost_s
        return image

    def _end(self, err: Exception) -> None:
        self._failed = True
        self._vae.close()
        # Known errors come from the machine. Any other one may be a mistake in this code and needs
        # a traceback.
        known = isinstance(err, (MemoryError, OSError)) or (
            isinstance(err, RuntimeError) and is_out_of_memory(err)
        )
        report = logger.warning if known else logger.exception
        report("no more previews in this run, which goes on: %s: %s", type(err).__name__, err)
        # The traceback holds the tensors of the failed preview.
        forget(err)

    def _image(self, denoised: torch.Tensor, latents: int) -> tuple[bytes, float]:
        """Return a preview with up to `latents` latent frames, and the time per later frame.

        The first latent frame may also load the weights.
        """
        latents = min(latents, self._latents)
        # Sliced before the copy. Latents from workers are in RAM.
        raw = denormalise(denoised[:1, :, :latents].to(self._device, torch.float32))
        pictures: list[Image.Image] = []
        first_at = self._clock()
        for part in self._vae.stream(raw, device=self._device, check=self._events.raise_if_stopped):
            first_at = first_at if pictures else self._clock()
            pictures += [_small(Image.fromarray(frame.numpy())) for frame in part]
        image, shown = _limited(pictures, FPS_5B if self._vae.space == WAN22 else FPS)
        if shown < len(pictures):  # later previews do not decode frames beyond the limit
            self._latents = (shown - 1) // FRAMES_PER_LATENT + 1
        return image, (self._clock() - first_at) / max(1, latents - 1)

    def __exit__(self, *_: object) -> None:
        self._vae.close()
        if self.count:
            logger.info(
                "%d moving previews took %.2f s, %.3f s each",
                self.count,
                self.spent_s,
                self.spent_s / self.count,
            )


def _small(picture: Image.Image) -> Image.Image:
    # `thumbnail` changes the picture itself and keeps the aspect ratio.
    picture.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS), Image.Resampling.BOX)
    return picture


def _limited(pictures: list[Image.Image], fps: int) -> tuple[bytes, int]:
    """Return an animation with at most `MAX_BYTES`, and its number of pictures.

    It has all pictures, or the first 4n + 1 that fit.

    A single picture has at most `PREVIEW_PIXELS` squared pixels and always fits.
    """
    image = _animation(pictures, fps)
    while len(image) > MAX_BYTES and len(pictures) > 1:
        # By proportion: size grows about linearly with the number of pictures.
        fitting = len(pictures) * MAX_BYTES // len(image)
        pictures = pictures[: max(0, fitting - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1]
        image = _animation(pictures, fps)
    return image, len(pictures)


def _animation(pictures: list[Image.Image], fps: int) -> bytes:
    file = io.BytesIO()
    first, *others = pictures
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=others,
        # Milliseconds for one picture.
        duration=round(1000 / fps),
        # 0 repeats the animation forever.
        loop=0,
        quality=QUALITY,
        method=0,  # the fastest
    )
    return file.getvalue()
