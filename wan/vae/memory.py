"""Memory that a VAE needs next to its weights, counted on the `meta` device."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...schema import FRAMES_PER_LATENT
from ..checkpoint.meta_model import set_parameters
from .tiles import LEAST_LATENT, decoded_frames

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")


class TensorMemoryTracker(TorchDispatchMode):
    """Between entering and leaving, what torch makes on this thread is counted from its making to its end.

    Storages are counted, so views cost nothing. Tensors from before cost nothing either. Inference mode keeps what
    operations are made of from sight: count outside it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most that were alive at once."""
        self.convolution_peak = 0
        """The most with what a convolution's library may hold meanwhile: input and output in an order of its own."""
        self._uses: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_iter(made):
            if _is_tensor(tensor):
                self._note(tensor, given)
        self.peak = max(self.peak, self.now)
        reordered = _bytes(args[0]) + _bytes(made) if str(func) in CONVOLUTIONS else 0
        self.convolution_peak = max(self.convolution_peak, self.now + reordered)
        return made

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._uses:
            if key in given:  # a view of what was there before
                return
            self._uses[key], self._sizes[key] = 0, storage.nbytes()
            self.now += storage.nbytes()
        self._uses[key] += 1
        weakref.finalize(tensor, self._drop, key)

    def _drop(self, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.now -= self._sizes.pop(key)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


STEADY_AFTER = 3
"""Latent frames after which every further one takes the same."""


def decode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes for each latent pixel that is decoded at once in `dtype`, in a video of so many latent frames.

    Counted are all tensors beside the weights, and one copy of what a convolution reads and writes: its library may
    order both anew (oneDNN and cuDNN do).
    """
    return _counted(_key(config), min(latent_frames, STEADY_AFTER), dtype, _decode)


def encode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """The same of encoding a video of so many latent frames, beside the video itself."""
    return _counted(_key(config), min(latent_frames, STEADY_AFTER), dtype, _encode)


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in config.items() if not name.startswith("_")}, sort_keys=True)


def _decode(vae: AutoencoderKLWan, latent_frames: int) -> TensorMemoryTracker:
    latents = torch.empty(1, vae.config.z_dim, latent_frames, LEAST_LATENT, LEAST_LATENT, dtype=vae.dtype)
    counted = TensorMemoryTracker()
    with counted:
        for frames in decoded_frames(vae, latents):
            del frames
    return counted


def _encode(vae: AutoencoderKLWan, latent_frames: int) -> TensorMemoryTracker:
    side = LEAST_LATENT * vae.spatial_compression_ratio
    video = torch.empty(1, 3, FRAMES_PER_LATENT * (latent_frames - 1) + 1, side, side, dtype=vae.dtype)
    counted = TensorMemoryTracker()
    with counted:
        vae.encode(video)
    return counted


@functools.cache
def _counted(
    config: str, latent_frames: int, dtype: torch.dtype, work: Callable[[AutoencoderKLWan, int], TensorMemoryTracker]
) -> int:
    from diffusers import AutoencoderKLWan

    # Inference mode shows fewer operations, and so less of what they make on their way.
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLWan.from_config(json.loads(config)).eval()
        set_parameters(vae, {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()})
        counted = work(vae, latent_frames)
    return -(-counted.convolution_peak // LEAST_LATENT**2)
