"""Owns the safety copy of a latent: no failure after the last step, and no full disk, must cost hours of sampling."""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors.torch
import torch

from ...devices import is_out_of_memory
from ...host import current_host
from ...wan import NoRoomToDecodeError, VaeRoomError

logger = logging.getLogger("wanstream.nodes")

LATENT_FOLDER = "latents"
"""Of the copies, below the output folder; ComfyUI's SaveLatent puts its own there."""


class VideoNotSavedError(OSError):
    """The video could not be saved; the message says where its latent is."""

    def __str__(self) -> str:
        return str(self.strerror)


class VideoRefusedError(ValueError):
    """The video cannot be made as it was asked for; the message says where its latent is."""


class VideoFailedError(RuntimeError):
    """Making the video failed by a fault and not by a refusal; the message says where its latent is."""


@contextmanager
def keep_latent_until_done(samples: torch.Tensor | None, *, after_cancel: bool = True) -> Iterator[None]:
    """Hold `samples` in a file until the block ends well.

    `samples` is a raw VAE latent [B, C, T, h, w]; None does nothing. The file has a name of its own, which no input can
    make impossible: in `LATENT_FOLDER` of the output folder, or in the temp folder where that has no room. However else
    the block ends, the file stays: an error, a Cancel, the end of the process. The log says where it is, and so does
    the error, which becomes a VideoNotSavedError (from an OSError), NoRoomToDecodeError (too little memory),
    VideoRefusedError (from a ValueError) or VideoFailedError. Where neither place has room, the block runs without a
    copy, because it may not need any; the log says so.

    With `after_cancel` False a Cancel removes the file: for a block that can be run again without the latent.
    """
    if samples is None:
        yield
        return
    with _gone_if_empty(current_host().output_folder() / LATENT_FOLDER):
        kept = _write_somewhere(samples)
        if kept is None:
            yield
            return
        try:
            yield
        except BaseException as err:
            if current_host().is_stop(err) and not after_cancel:
                kept.unlink(missing_ok=True)
                raise
            logger.warning("the video was not made; its latent is kept in %s", kept)
            if current_host().is_stop(err) or not isinstance(err, Exception):
                raise
            raise _with_place(err, kept) from err
        try:
            kept.unlink(missing_ok=True)
        except OSError as err:  # the video is there, and that is what counts
            logger.warning("the video was made; its latent could not be removed: %s", err)


def _with_place(err: Exception, kept: Path) -> Exception:
    """An error of the same kind that names the file."""
    place = f"The latent is kept in {kept}: remove the cause, load it with LoadLatent and decode it again"
    if isinstance(err, VaeRoomError) or (isinstance(err, RuntimeError) and is_out_of_memory(err)):
        return NoRoomToDecodeError(f"{err}. {place}")
    if isinstance(err, OSError):
        return VideoNotSavedError(err.errno, f"{err.strerror or err}. {place}")
    if isinstance(err, ValueError):
        return VideoRefusedError(f"{err}. {place}")
    return VideoFailedError(f"{type(err).__name__}: {err}. {place}")


@contextmanager
def _gone_if_empty(folder: Path) -> Iterator[None]:
    """However the block ends: if `folder` was not there before it and is empty after it, it is removed."""
    there = folder.exists()
    try:
        yield
    finally:
        if not there:
            # It refuses while anything lies in the folder, and where the block made none.
            with suppress(OSError):
                folder.rmdir()


def _write_somewhere(samples: torch.Tensor) -> Path | None:
    """The path of the copy; None where there is no room for it."""
    try:
        path = current_host().output_file(f"{LATENT_FOLDER}/WanStream", "latent").path
        write_latent(path, samples)
        return path
    except OSError as err:
        reason = str(err)
    try:
        path = current_host().temp_folder() / f"WanStream_{uuid.uuid4().hex}.latent"
        write_latent(path, samples)
    except OSError as err:
        logger.warning("the latent could not be saved before the video is made: %s; %s", reason, err)
        return None
    return path


def write_latent(path: Path, samples: torch.Tensor) -> None:
    """Write `samples` as a `.latent` file; raises `OSError` and leaves nothing behind when there is no room for it.

    The file is put together in RAM: too little of that is an `OSError` as well.
    """
    try:
        # The empty tensor is ComfyUI's mark for values that need no scaling when they are loaded.
        tensors = {"latent_tensor": samples.contiguous().cpu(), "latent_format_version_0": torch.empty(0)}
        path.write_bytes(safetensors.torch.save(tensors))
    except (MemoryError, RuntimeError) as err:
        if isinstance(err, RuntimeError) and not is_out_of_memory(err):
            raise
        path.unlink(missing_ok=True)
        size = samples.numel() * samples.element_size() / 1e6
        raise OSError(errno.ENOMEM, f"there is too little memory for a copy of {size:.1f} MB: {err}") from err
    except OSError:
        path.unlink(missing_ok=True)
        raise
