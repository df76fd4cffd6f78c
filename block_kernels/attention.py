"""Block compute kernels: attention backend and compiler.

Attention goes through diffusers' dispatcher. It supports the packages below. Self-attention in
int8 does not (see `int8_attention`). Kernels that the dispatcher would download from a hub are not
offered, because they would run code that the user did not install.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from ..devices import runtime_for
from ..schema.refs import Attention, KernelSet
from .int8_attention import int8_attention_refusal, int8_dispatch

INDUCTOR = "inductor"
"""torch's own compiler, with Triton kernels for a GPU and C++ for a CPU."""

CXX = ("c++", "g++", "clang++", "cl")
"""Compilers that inductor may call on a CPU."""

INT8_ATTENTION: Attention = "int8"
"""Attention choice unknown to diffusers' dispatcher, and backend name in attention processors."""


class KernelsError(ValueError):
    """A chosen kernel or compiler is not installed, or does not support this device or dtype."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One choice of attention."""

    backend: str | None
    """Value of diffusers' `AttentionBackendName`. None: diffusers' default."""
    package: str = ""
    """Package to install. Empty: none."""
    cuda_only: bool = False
    """True if it supports CUDA devices only."""
    half_only: bool = False
    """True if it supports bf16 and fp16 only."""
    working_bytes: int = 0
    """Working bytes per value of the result, in addition to the result. 0: none that matter."""
    own_module: str = ""
    """Module that computes self-attention in place of the dispatcher. The dispatcher computes the
    rest with `backend`."""


ATTENTIONS: Mapping[Attention, AttentionKernel] = {
    "default": AttentionKernel(backend=None),
    "sdpa": AttentionKernel(backend="native"),
    "cudnn": AttentionKernel(backend="_native_cudnn", cuda_only=True, half_only=True),
    "flash": AttentionKernel(
        backend="flash", package="flash-attn 2.6.3 or later", cuda_only=True, half_only=True
    ),
    "flash 3": AttentionKernel(
        backend="_flash_3",
        package="flash-attn 3 (flash_attn_interface), built from its source",
        cuda_only=True,
        half_only=True,
    ),
    "sage": AttentionKernel(
        backend="sage", package="sageattention 2.1.1 or later", cuda_only=True, half_only=True
    ),
    INT8_ATTENTION: AttentionKernel(
        backend="native",
        package="comfy-kitchen",
        cuda_only=True,
        working_bytes=3,  # q, k and v in int8
        own_module="comfy_kitchen",
    ),
    "xformers": AttentionKernel(
        backend="xformers", package="xformers 0.0.29 or later", cuda_only=True
    ),
}
"""Kernels by the name that users choose. diffusers and the packages check for these devices and
dtypes."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions, attention backend and compiler for the blocks of both experts."""

    math: KernelSet = "auto"
    attention: Attention = "default"
    compiler: str | None = None
    """`torch.compile` backend. None: the blocks are not compiled."""


def attention_function(attention: Attention) -> Callable[..., torch.Tensor]:
    """Return the self-attention function, with the arguments of diffusers' dispatcher."""
    if attention == INT8_ATTENTION:
        return int8_dispatch()
    # Imported late: ComfyUI imports this module at startup, and diffusers takes seconds.
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    return cast("Callable[..., torch.Tensor]", dispatch_attention_fn)


def check_installed(kernels: Kernels) -> None:
    """Check that this process can import the attention backend.

    Raises:
        KernelsError: the backend is unknown or its package is not installed.
    """
    if kernels.attention not in ATTENTIONS:
        raise KernelsError(
            f"attention is {kernels.attention!r}: choose one of {_builtin_choices()}"
        )
    kernel = ATTENTIONS[kernels.attention]
    if kernel.backend is None:
        return
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _check_attention_backend_requirements,
    )

    try:
        _check_attention_backend_requirements(AttentionBackendName(kernel.backend))
        # `find_spec` does not import the package. An import would load compiled libraries.
        if kernel.own_module and importlib.util.find_spec(kernel.own_module) is None:
            raise ImportError(kernel.own_module)
    # diffusers raises RuntimeError for a missing or an old package.
    except (RuntimeError, ImportError) as err:
        raise KernelsError(
            f"attention {kernels.attention!r} needs {kernel.package}, which cannot be imported "
            "here: install it for the Python that runs this (on every worker too), or choose one "
            f"of {_builtin_choices()}"
        ) from err


def check_usable(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Check that blocks can be computed with `kernels` on `device` in `dtype`.

    Raises:
        KernelsError: a kernel or compiler is not installed, or does not support the device or
            dtype.
    """
    check_installed(kernels)
    kernel = ATTENTIONS[kernels.attention]
    if kernel.cuda_only and device.type != "cuda":
        raise KernelsError(
            f"attention {kernels.attention!r} computes on CUDA devices only, and this is {device}: "
            "choose 'sdpa'"
        )
    if kernel.half_only and dtype not in (torch.bfloat16, torch.float16):
        raise KernelsError(
            f"attention {kernels.attention!r} computes in bf16 and fp16 only, and the blocks "
            f"compute in {str(dtype).removeprefix('torch.')}: choose another compute dtype, or "
            "'sdpa'"
        )
    reason = int8_attention_refusal(device, dtype) if kernels.attention == INT8_ATTENTION else None
    if reason is not None:
        raise KernelsError(
            f"attention {INT8_ATTENTION!r} needs comfy-kitchen's kernel, which cannot be used on "
            f"{device}: {reason}; or choose 'sdpa'"
        )
    if kernels.compiler == INDUCTOR:
        _check_inductor(device)


def _check_inductor(device: torch.device) -> None:
    if runtime_for(device) is not None and importlib.util.find_spec("triton") is None:
        raise KernelsError(
            f"blocks are compiled for {device} with Triton, which is not installed: install triton "
            "(on Windows triton-windows), or switch compile off"
        )
    if device.type == "cpu" and not any(shutil.which(name) for name in CXX):
        raise KernelsError(
            f"blocks are compiled for a CPU with a C++ compiler, and none of {', '.join(CXX)} is "
            "on the path: install one, or switch compile off"
        )


def _builtin_choices() -> str:
    """Names of kernels that need no package."""
    return ", ".join(repr(name) for name, kernel in ATTENTIONS.items() if not kernel.package)
