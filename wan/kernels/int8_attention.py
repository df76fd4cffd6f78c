"""Self-attention in int8 by comfy-kitchen's `int8_attention`, which rotates q and k and quantises q, k, v and softmax.

diffusers' dispatcher takes no backend that is not in its enumeration, so blocks call this function in its place.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .choice import Results, fault_of, kitchen_refusal

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of q, k and v [B, H, S, D] with any strides except for the last dimension."""

TEST_TOKENS = (257, 1100)
"""Sequence lengths of the test: the kernel's tiles and its rotation change between them, and both end in a part."""
TEST_HEADS = (2, 128)
LARGEST_ERROR = 0.05
"""Relative error of a test: quantising its q, k, v and softmax costs 0.02."""


@functools.cache  # one function for all blocks, so that they share a compiled graph
def int8_dispatch() -> Callable[..., torch.Tensor]:
    """Return attention by comfy-kitchen's kernel, with the arguments of diffusers' dispatcher."""
    return partial(dispatch_int8, importlib.import_module("comfy_kitchen").int8_attention)


def dispatch_int8(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    parallel_config: Any,
    **_: object,
) -> torch.Tensor:
    """Return attention [B, S, H, D] by `kernel`, with the arguments of diffusers' dispatcher.

    With a `parallel_config`, Ulysses workers exchange tokens for heads as in diffusers' own backends.
    """
    assert attn_mask is None, "self-attention of Wan has no mask"
    if parallel_config is None:
        return _attend(kernel, query, key, value)
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    attended: torch.Tensor = _templated_context_parallel_attention(
        query, key, value, forward_op=partial(_forward_op, kernel), backward_op=None, _parallel_config=parallel_config
    )
    return attended


@functools.cache
def int8_attention_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why comfy-kitchen's kernel cannot be used on `device` in `dtype`; None if it can.

    `int8_attention` is in none of its backends, but it calls the compiled code of the CUDA backend: where that one is
    disabled, this must not be called either. The kernel is tested once per process.
    """
    reason = kitchen_refusal(device)
    if reason is not None:
        return reason
    kitchen = importlib.import_module("comfy_kitchen")
    if not hasattr(kitchen, "int8_attention") or not hasattr(kitchen, "int8_attention_is_available"):
        return "it has no int8_attention: update it"
    if not kitchen.int8_attention_is_available(device):
        return "its int8_attention needs a GPU of compute capability 7.5 or later"
    return fault_of(partial(_test_results, kitchen.int8_attention, device, dtype), LARGEST_ERROR)


def _test_results(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Results:
    generator = torch.Generator().manual_seed(0)
    for tokens in TEST_TOKENS:
        qkv = [torch.randn(1, tokens, *TEST_HEADS, generator=generator).to(dtype) for _ in range(3)]
        expected = _attend(torch.nn.functional.scaled_dot_product_attention, *(tensor.double() for tensor in qkv))
        yield "attention", _attend(kernel, *(tensor.to(device) for tensor in qkv)), expected


def _attend(kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention [B, S, H, D]; the kernel reads transposed views, so that nothing is copied."""
    return kernel(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)


def _forward_op(
    kernel: Kernel, ctx: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Compute attention with the arguments of diffusers' forward operations."""
    return _attend(kernel, query, key, value)
