"""Safety copy of a latent: a failure after the last step does not waste hours of sampling."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...devices import is_out_of_memory
from ...host import LATENT_FOLDER, Files, Host
from ...wan.latents import write_latent
from ...wan.vae import DecodeOutOfMemoryError, VaeMemoryError

logger = logging.getLogger("wanstream.nodes")


class VideoNotSavedError(OSError):
    """The video could not be saved. The message names the file with the latent."""

    def __str__(self) -> str:
        return str(self.strerror)


class VideoRefusedError(ValueError):
    """The video cannot be made with these inputs. The message names the file with the latent."""


class VideoFailedError(RuntimeError):
    """An unexpected error ended the video. The message names the file with the latent."""


@contextmanager
def keep_latent_until_done(
    host: Host, samples: torch.Tensor | None, *, after_cancel: bool = True
) -> Iterator[None]:
    """Keep `samples` in a file until the `with` block has ended without an error.

    The file is in `LATENT_FOLDER` below the output folder, or in the temp folder if there is no
    room. The name does not depend on any input. The file stays after an error, a Cancel or the end
    of the process, and both the log and the error name it. If both folders are full, the block runs
    without a copy, with a warning in the log.

    Args:
        host: has the folders.
        samples: raw VAE latent [B, C, T, h, w], or None for no copy.
        after_cancel: False removes the file after a Cancel, for a block that can run again without
            the latent.

    Raises:
        VideoNotSavedError: for an OSError in the block.
        DecodeOutOfMemoryError: for an out-of-memory error in the block.
        VideoRefusedError: for a ValueError in the block.
        VideoFailedError: for any other error in the block.
    """
    if samples is None:
        yield
        return
    with _removed_if_empty(host.files.folders().output / LATENT_FOLDER):
        kept = _write_copy(host.files, samples)
        if kept is None:
            yield
            return
        try:
            yield
        # The interrupt in ComfyUI 0.33.0 is not an Exception, nor is KeyboardInterrupt.
        except BaseException as err:
            if host.events.is_stop(err) and not after_cancel:
                kept.unlink(missing_ok=True)
                raise
            logger.warning("the video was not made; its latent is kept in %s", kept)
            if host.events.is_stop(err) or not isinstance(err, Exception):
                raise
            raise _with_place(err, kept) from err
        try:
            # The user may have moved the file meanwhile.
            kept.unlink(missing_ok=True)
        except OSError as err:  # not raised: the video is complete
            logger.warning("the video was made; its latent could not be removed: %s", err)


def _with_place(err: Exception, kept: Path) -> Exception:
    """Return an error of the same kind whose message names the file."""
    place = (
        f"The latent is kept in {kept}: remove the cause, load it with Wan Load Latent and decode "
        "it again"
    )
    # Before ValueError, because VaeMemoryError is one.
    if isinstance(err, VaeMemoryError) or (isinstance(err, RuntimeError) and is_out_of_memory(err)):
        return DecodeOutOfMemoryError(f"{err}. {place}")
    if isinstance(err, OSError):
        return VideoNotSavedError(err.errno, f"{err.strerror or err}. {place}")
    if isinstance(err, ValueError):
        return VideoRefusedError(f"{err}. {place}")
    return VideoFailedError(f"{type(err).__name__}: {err}. {place}")


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove `folder` after the block, also after an error, if new and empty.

    New means it did not exist before.
    """
    existed = folder.exists()
    try:
        yield
    finally:
        if not existed:
            # rmdir fails if the folder contains anything, and if the block has not created it.
            with suppress(OSError):
                folder.rmdir()


def _write_copy(files: Files, samples: torch.Tensor) -> Path | None:
    """Write the copy and return the path, or None if neither folder has room."""
    try:
        path = files.output_file(f"{LATENT_FOLDER}/WanStream", "latent").path
        write_latent(path, samples)
        return path
    except OSError as err:
        reason = str(err)
    try:
        # The temp folder may be on another disk with room.
        path = files.temp_folder() / f"WanStream_{uuid.uuid4().hex}.latent"
        write_latent(path, samples)
    except OSError as err:
        logger.warning(
            "the latent could not be saved before the video is made: %s; %s", reason, err
        )
        return None
    return path
