"""What computes the blocks: whose kernel their attention, and which compiler the rest, if any.

Attention goes through diffusers' dispatcher, which knows the packages. The kernels that it would download are not
offered: they are code that nobody chose on this machine.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...schema import Attention

INDUCTOR = "inductor"
"""torch's own compiler, which writes Triton kernels for a GPU and C++ for a CPU."""

CXX = ("c++", "g++", "clang++", "cl")
"""What inductor may call on a CPU."""


class KernelsError(ValueError):
    """Something that the blocks were to be computed with is not there, or does not serve this device or dtype."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One choice of attention."""

    backend: str | None
    """The value of diffusers' `AttentionBackendName`; None: what diffusers uses by default."""
    package: str = ""
    """What is to be installed; empty: nothing."""
    on_gpu: bool = False
    """Whether it computes on CUDA devices only."""
    in_half: bool = False
    """Whether it computes in bf16 and fp16 only."""


ATTENTIONS: Mapping[Attention, AttentionKernel] = {
    "default": AttentionKernel(backend=None),
    "sdpa": AttentionKernel(backend="native"),
    "cudnn": AttentionKernel(backend="_native_cudnn", on_gpu=True, in_half=True),
    "flash": AttentionKernel(backend="flash", package="flash-attn 2.6.3 or later", on_gpu=True, in_half=True),
    "flash 3": AttentionKernel(
        backend="_flash_3",
        package="flash-attn 3 (flash_attn_interface), built from its source",
        on_gpu=True,
        in_half=True,
    ),
    "sage": AttentionKernel(backend="sage", package="sageattention 2.1.1 or later", on_gpu=True, in_half=True),
    "xformers": AttentionKernel(backend="xformers", package="xformers 0.0.29 or later", on_gpu=True),
}
"""By the name that users know them by. Which device and dtype each serves: its checks in diffusers, and its package."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes the blocks of both experts."""

    attention: Attention = "default"
    compiler: str | None = None
    """A backend of `torch.compile`; None: the blocks are not compiled."""


def check_installed(kernels: Kernels) -> None:
    """Raise KernelsError unless this process can use the attention that is asked for on some device."""
    if kernels.attention not in ATTENTIONS:
        raise KernelsError(f"attention is {kernels.attention!r}; {_others()} can be chosen")
    kernel = ATTENTIONS[kernels.attention]
    if kernel.backend is None:
        return
    from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements

    try:
        _check_attention_backend_requirements(AttentionBackendName(kernel.backend))
    except RuntimeError as err:
        raise KernelsError(
            f"attention {kernels.attention!r} needs {kernel.package}, which cannot be imported here: install it for "
            f"the Python that runs this (on every worker, if there are some), or choose one of {_others()}"
        ) from err


def check_usable(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Raise KernelsError unless blocks can be computed so on `device` in `dtype`."""
    check_installed(kernels)
    kernel = ATTENTIONS[kernels.attention]
    if kernel.on_gpu and device.type != "cuda":
        raise KernelsError(
            f"attention {kernels.attention!r} computes on CUDA devices only, and this is {device}: choose 'sdpa'"
        )
    if kernel.in_half and dtype not in (torch.bfloat16, torch.float16):
        raise KernelsError(
            f"attention {kernels.attention!r} computes in bf16 and fp16 only, and the blocks in "
            f"{str(dtype).removeprefix('torch.')}: choose another compute dtype, or 'sdpa'"
        )
    if kernels.compiler == INDUCTOR:
        _check_inductor(device)


def _check_inductor(device: torch.device) -> None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise KernelsError(
            f"blocks are compiled for {device} with Triton, which is not installed: install triton (on Windows "
            "triton-windows), or switch compile off"
        )
    if device.type == "cpu" and not any(shutil.which(name) for name in CXX):
        raise KernelsError(
            f"blocks are compiled for a CPU with a C++ compiler, and none of {', '.join(CXX)} is on the path: install "
            "one, or switch compile off"
        )


def _others() -> str:
    """The choices that need no package."""
    return ", ".join(repr(name) for name, kernel in ATTENTIONS.items() if not kernel.package)
