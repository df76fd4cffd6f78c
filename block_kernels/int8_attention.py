"""Self-attention in int8 by comfy-kitchen's `int8_attention`.

It rotates q and k, and quantises q, k, v and softmax.

diffusers' dispatcher takes only backends in its enumeration, so blocks call this function instead.
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
"""Attention for q, k and v [B, H, S, D] with any strides except in the last dimension."""

TEST_TOKENS = (257, 1100)
"""Sequence lengths in the test. The kernel's tiles and rotation change between them, and both end
in a partial tile."""
TEST_HEADS = (2, 128)
LARGEST_ERROR = 0.05
"""Relative error in a test: quantising q, k, v and softmax costs 0.02."""


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

    With a `parallel_config`, Ulysses workers exchange tokens for heads as in diffusers' own
    backends.
    """
    assert attn_mask is None, "self-attention of Wan has no mask"
    if parallel_config is None:
        return _attend(kernel, query, key, value)
    # Private in diffusers. The dispatcher exchanges tokens for listed backends only.
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    # The template passes options that the kernel does not have.
    def forward_op(ctx: object, *qkv_and_options: Any, **_: object) -> torch.Tensor:
        return _attend(kernel, *qkv_and_options[:3])

    attended: torch.Tensor = _templated_context_parallel_attention(
        query, key, value, forward_op=forward_op, backward_op=None, _parallel_config=parallel_config
    )
    return attended


@functools.cache
def int8_attention_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why comfy-kitchen's kernel cannot be used on `device` in `dtype`, or None if it can.

    `int8_attention` belongs to no backend, but calls compiled code from the CUDA backend. Where
    that backend is disabled, it must not be called either. The kernel is tested once per process.
    """
    reason = kitchen_refusal(device)
    if reason is not None:
        return reason
    kitchen = importlib.import_module("comfy_kitchen")
    if not hasattr(kitchen, "int8_attention") or not hasattr(
        kitchen, "int8_attention_is_available"
    ):
        return "it has no int8_attention: update it"
    if not kitchen.int8_attention_is_available(device):
        return "its int8_attention needs a GPU of compute capability 7.5 or later"
    return fault_of(partial(_test_results, kitchen.int8_attention, device, dtype), LARGEST_ERROR)


def _test_results(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Results:
    generator = torch.Generator().manual_seed(0)
    for tokens in TEST_TOKENS:
        qkv = [torch.randn(1, tokens, *TEST_HEADS, generator=generator).to(dtype) for _ in range(3)]
        # In fp64, from values already rounded to `dtype`: the error is the kernel's alone.
        expected = _attend(
            torch.nn.functional.scaled_dot_product_attention, *(tensor.double() for tensor in qkv)
        )
        yield "attention", _attend(kernel, *(tensor.to(device) for tensor in qkv)), expected


def _attend(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return attention [B, S, H, D].

    The kernel reads transposed views, so nothing is copied.
    """
    return kernel(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)
