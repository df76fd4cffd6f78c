"""Triton kernels over rows of tokens.

They compute residual, norm, activation, rotary embedding and quantisation in one pass. Import this
module only where Triton is installed. A program computes one row in fp32, and reads and writes each
value once. It rounds where a model in the tokens' dtype does: after the residual, the norm and the
activation.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows(
    x_ptr,
    update_ptr,
    gate_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scales_ptr,
    width,
    eps,
    modulated: tl.constexpr,
    gelu: tl.constexpr,
    block: tl.constexpr,
):
    """Compute one row. Parts with None pointers are left out.

    Without a bias the norm is an RMS norm.
    """
    first = tl.program_id(0).to(tl.int64) * width  # offsets may exceed 2^31
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + first + at, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if update_ptr is not None:
        update = tl.load(update_ptr + first + at, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            update *= tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = (x + update).to(dtype)
        tl.store(state_ptr + first + at, x, mask=inside)
        x = x.to(tl.float32)
    if bias_ptr is not None:
        # The variance of differences: a mean of squares loses digits if the mean is large.
        # Values outside the row must stay 0. Otherwise the variance would count them.
        x = tl.where(inside, x - tl.sum(x) / width, 0.0)
    if weight_ptr is not None:
        x *= tl.rsqrt(tl.sum(x * x) / width + eps)
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if modulated:
            weight += 1.0
        x *= weight
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if gelu:
        # x / 2 (1 + tanh(z)) = x / (1 + exp(-2 z))
        # 1.5957691216057308 is 2 sqrt(2 / pi).
        x /= 1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))
    if out_ptr is not None:
        x = x.to(dtype)
        if scales_ptr is not None:
            x = x.to(tl.float32)
            # The smallest normal number, so that a row of zeros has a scale above 0.
            scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, 1.1754943508222875e-38)
            tl.store(scales_ptr + tl.program_id(0), scale)
            # Not clamped: the largest value is 448, and the conversion rounds values just above to
            # it.
            x = (x * (1.0 / scale)).to(tl.float8e4nv)
        tl.store(out_ptr + first + at, x, mask=inside)


@triton.jit
def rotated_rows(
    x_ptr, weight_ptr, rotation_ptr, out_ptr, width, eps, pairs: tl.constexpr, block: tl.constexpr
):
    """Compute the RMS norm of one row and rotate pairs of neighbours.

    A head has `pairs` of them.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x.to(dtype).to(tl.float32), (block // 2, 2)))
    # All heads of a token share the rotation: pair i takes entry i % pairs.
    turn = rotation_ptr + 2 * (row * pairs + tl.arange(0, block // 2) % pairs)
    cosine = tl.load(turn)
    sine = tl.load(turn + 1)
    rotated = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    tl.store(out_ptr + row * width + at, tl.reshape(rotated, (block,)).to(dtype), mask=inside)
