"""Owns the safety copy of a latent: no end of a decode, and no full disk, must cost hours of sampling."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors.torch
import torch

from ..plan.vae_room import VaeRoomError
from ..wan.smaller_tiles import NoRoomToDecodeError

LOG = logging.getLogger("wanstream.nodes")


class VideoNotSavedError(OSError):
    """The video could not be saved; the message says where its latent is."""


@contextmanager
def keep_latent_on_failure(
    samples: torch.Tensor | None, path: Path, *, spare_folder: Callable[[], Path] | None = None
) -> Iterator[None]:
    """Hold `samples` in the file `path` until the block ends well; where it has no room, in `spare_folder()`.

    `samples` is a raw VAE latent [B, C, T, h, w]; None does nothing. The file is written first, while there is room
    for it, and is what ComfyUI's LoadLatent reads. When the block raises an `OSError`, the file stays and the error
    becomes a `VideoNotSavedError` that names it; any other end of the block removes it. Raises `OSError` when there
    is no room for the latent at all.
    """
    if samples is None:
        yield
        return
    path = _write_somewhere(path, samples, spare_folder)
    keep = False
    try:
        yield
    except OSError as err:
        keep = True
        raise VideoNotSavedError(
            err.errno, f"{err.strerror}. The latent is kept in {path}: make room on the disk and decode it again"
        ) from err
    finally:
        if not keep:
            path.unlink()


@contextmanager
def keep_latent_until_done(
    samples: torch.Tensor, place: Callable[[], Path], *, spare_folder: Callable[[], Path]
) -> Iterator[None]:
    """Hold `samples` in the file `place()`, or else in `spare_folder()`, until the block ends well.

    However else it ends, the file stays: an error, a Cancel, the end of the process. The log says where it is, and so
    does a VaeRoomError, which becomes a NoRoomToDecodeError. Where neither place has room, the block runs without one,
    because it may not need any; the log says so.
    """
    kept = _write_early(samples, place, spare_folder)
    if kept is None:
        yield
        return
    done = False
    try:
        yield
        done = True
    except VaeRoomError as err:
        raise NoRoomToDecodeError(f"{err}. The latent is kept in {kept}") from err
    finally:
        if done:
            kept.unlink(missing_ok=True)
        else:
            LOG.warning("the video was not decoded; its latent is kept in %s", kept)


@contextmanager
def gone_if_empty(folder: Path) -> Iterator[None]:
    """However the block ends: if `folder` was not there before it and is empty after it, it is removed."""
    there = folder.exists()
    try:
        yield
    finally:
        if not there:
            # It refuses while anything lies in the folder, and where the block made none.
            with suppress(OSError):
                folder.rmdir()


def _write_early(samples: torch.Tensor, place: Callable[[], Path], spare_folder: Callable[[], Path]) -> Path | None:
    """Where the latent lies now; None where there is no room for it."""
    try:
        path = place()
        write_latent(path, samples)
        return path
    except OSError as err:
        said = str(err)
    try:
        path = spare_folder() / f"WanStream_{uuid.uuid4().hex}.latent"
        write_latent(path, samples)
    except OSError as err:
        LOG.warning("the latent could not be saved before it is decoded: %s; %s", said, err)
        return None
    return path


def _write_somewhere(path: Path, samples: torch.Tensor, spare_folder: Callable[[], Path] | None) -> Path:
    try:
        write_latent(path, samples)
    except OSError:
        if spare_folder is None:
            raise
        path = spare_folder() / path.name
        write_latent(path, samples)
    return path


def write_latent(path: Path, samples: torch.Tensor) -> None:
    """Write `samples` as a `.latent` file; raises `OSError` and leaves nothing behind when there is no room for it."""
    # The empty tensor is ComfyUI's mark for values that need no scaling when they are loaded.
    tensors = {"latent_tensor": samples.contiguous().cpu(), "latent_format_version_0": torch.empty(0)}
    try:
        path.write_bytes(safetensors.torch.save(tensors))
    except OSError:
        path.unlink(missing_ok=True)
        raise
