"""Which of diffusers' attention backends a mesh needs: a ring puts partial results together by their log-sum-exp."""

from __future__ import annotations

import torch

from ..plan.mesh import MeshError

WITH_LSE = frozenset({"flash", "flash_hub", "_flash_3_hub", "_native_cudnn", "_native_flash"})
"""Backends of diffusers 0.37 to 0.39 that return the log-sum-exp beside the result."""
RING_BACKEND = "_native_flash"
"""PyTorch's own; it needs CUDA, and bf16 or fp16."""
HALF = (torch.bfloat16, torch.float16)


def backend_for(
    set_backend: str | None, *, ring: int, ulysses: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The backend of a self-attention that has `set_backend` (None: diffusers' default), or the one that it needs
    instead.

    Raises MeshError where attention of that dtype on that device cannot be shared in that way.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    name = _AttentionBackendRegistry.get_active_backend()[0] if set_backend is None else set_backend
    name = str(AttentionBackendName(name).value)
    sharing = _AttentionBackendRegistry._supports_context_parallel
    if ring == 1:
        if name not in sharing:
            raise MeshError(
                f"ulysses {ulysses}: the attention backend {name!r} cannot be shared by workers; choose one of "
                f"{', '.join(sorted(sharing))}"
            )
        return set_backend
    if name in WITH_LSE and name in sharing:
        return set_backend
    if name == AttentionBackendName.NATIVE.value and device.type == "cuda" and dtype in HALF:
        return RING_BACKEND
    raise MeshError(
        f"ring {ring}: the attention backend {name!r} gives no log-sum-exp on {device.type} in {_word(dtype)}, which a "
        f"ring needs; use ulysses {ring * ulysses} instead, or bf16 on a GPU"
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
