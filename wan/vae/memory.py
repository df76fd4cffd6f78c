"""Memory that a VAE needs in addition to its weights, counted on the `meta` device."""

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
from .tiles import MIN_TILE_LATENT, decoded_frames

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")


class TensorMemoryTracker(TorchDispatchMode):
    """Context manager that counts the bytes of tensors that this thread creates inside it, while they are alive.

    Storages are counted, so views are free; tensors from before are free too. Use it outside inference mode, which
    hides the operations that a composite operation consists of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Maximum of `now`."""
        self.convolution_peak = 0
        """Maximum if a convolution's library also copies input and output into another memory layout."""
        self._uses: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_iter(result):
            if _is_tensor(tensor):
                self._add(tensor, inputs)
        self.peak = max(self.peak, self.now)
        reordered = _bytes(args[0]) + _bytes(result) if str(func) in CONVOLUTIONS else 0
        self.convolution_peak = max(self.convolution_peak, self.now + reordered)
        return result

    def _add(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._uses:
            if key in inputs:  # a view of a tensor from before
                return
            self._uses[key], self._sizes[key] = 0, storage.nbytes()
            self.now += storage.nbytes()
        # A storage is alive as long as any of its views.
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
"""Latent frames after which a further one does not raise the peak."""


def decode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes for each latent pixel that is decoded at once, in a video of `latent_frames` latent frames.

    Includes all tensors except the weights, and one copy of a convolution's input and output: oneDNN and cuDNN copy
    both into another memory layout.
    """
    return _count_bytes(_key(config), min(latent_frames, STEADY_AFTER), dtype, _decode)


def encode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the same for encoding a video of `latent_frames` latent frames, without the video itself."""
    return _count_bytes(_key(config), min(latent_frames, STEADY_AFTER), dtype, _encode)


def _key(config: Mapping[str, Any]) -> str:
    # A string, because the cache of `_count_bytes` needs hashable arguments.
    return json.dumps({name: value for name, value in config.items() if not name.startswith("_")}, sort_keys=True)


def _decode(vae: AutoencoderKLWan, latent_frames: int) -> TensorMemoryTracker:
    latents = torch.empty(1, vae.config.z_dim, latent_frames, MIN_TILE_LATENT, MIN_TILE_LATENT, dtype=vae.dtype)
    tracker = TensorMemoryTracker()
    with tracker:
        for frames in decoded_frames(vae, latents):
            del frames
    return tracker


def _encode(vae: AutoencoderKLWan, latent_frames: int) -> TensorMemoryTracker:
    side = MIN_TILE_LATENT * vae.spatial_compression_ratio
    video = torch.empty(1, 3, FRAMES_PER_LATENT * (latent_frames - 1) + 1, side, side, dtype=vae.dtype)
    tracker = TensorMemoryTracker()
    with tracker:
        vae.encode(video)
    return tracker


@functools.cache
def _count_bytes(
    config: str, latent_frames: int, dtype: torch.dtype, work: Callable[[AutoencoderKLWan, int], TensorMemoryTracker]
) -> int:
    from diffusers import AutoencoderKLWan

    # Outside inference mode, which hides operations and their intermediate tensors from the tracker.
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLWan.from_config(json.loads(config)).eval()
        set_parameters(vae, {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()})
        tracker = work(vae, latent_frames)
    # The smallest tile is representative: tensors are proportional to the area, except for attention scores, which
    # `meta` materialises because it has no fused kernel; in a small tile they are negligible.
    return -(-tracker.convolution_peak // MIN_TILE_LATENT**2)
