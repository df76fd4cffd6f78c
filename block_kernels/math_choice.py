"""Choice of a block's row-wise functions on a device."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..devices import is_out_of_memory
from ..offload.formats import one_pass_unavailable
from ..schema.refs import KernelSet
from .attention import KernelsError
from .block_math import EXACT, BlockMath, Codes, Gate, Norm, TorchMath
from .choice import Results, choose, fault_of, first_line, kitchen_refusal

TEST_TOKENS = 5
TEST_HEAD = 128
LARGEST_ERROR: Mapping[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""Relative error of a test result: about two units in the last place."""
LARGEST_CODES_ERROR = 0.05
"""Relative error of quantised tokens. fp8 has 3 mantissa bits."""
INSTALL: Mapping[str, str] = {
    "triton": "install triton (on Windows triton-windows) and a C compiler",
    "comfy-kitchen": "install comfy-kitchen",
}

logger = logging.getLogger("wanstream.kernels")


@functools.cache
def choose_math(name: KernelSet, device: torch.device, dtype: torch.dtype, width: int) -> BlockMath:
    """Return the functions `name` for tokens with `dtype` and `width` on `device`.

    "auto" takes triton on a GPU if its test passes, else torch. comfy-kitchen is chosen by name
    only: a step with 8 blocks and 7,800 tokens takes 0.099 s with it, 0.092 s with torch and 0.081
    s with triton (H100). The choice is made and logged once per process. The test compiles all
    kernels for blocks with this width, except the GELU at the feed-forward width.

    Raises:
        KernelsError: the functions were chosen by name and do not work there.
    """
    # On a CPU Triton interprets its kernels, for tests.
    auto = ("torch", "exact") if device.type == "cpu" else ("triton", "torch", "exact")
    made: dict[str, BlockMath] = {}

    def test(name: str) -> str | None:
        try:
            math = made[name] = _make(name, device)
            if math is EXACT:
                return None
            return math_fault(math, device, dtype, width)
        except KernelsError as err:
            return str(err)

    names = {"auto": auto}.get(name, (name,))
    choice = choose({each: partial(test, each) for each in names})
    if choice.name is None:
        remedy = f"{INSTALL[name]}, or choose 'auto'" if name in INSTALL else "choose 'auto'"
        raise KernelsError(
            f"blocks cannot compute with {name} functions on {device}: {choice.refusals[name]}; "
            f"{remedy}"
        )
    level = logging.WARNING if choice.refusals else logging.INFO
    words = f"{choice.name} functions{choice.reasons}"
    logger.log(level, "blocks compute with %s on %s", words, device)
    return made[choice.name]


def _make(name: str, device: torch.device) -> BlockMath:
    """Return the functions with this name. Raises KernelsError if they are not available."""
    if name == "triton":
        return _triton_math(device)
    if name == "comfy-kitchen":
        return _kitchen_math(device)
    return {"torch": TorchMath(), "exact": EXACT}[name]


def _triton_math(device: torch.device) -> BlockMath:
    if device.type == "cpu":
        # The interpreter, for tests.
        reason = None if os.environ.get("TRITON_INTERPRET") == "1" else "its kernels are for GPUs"
    else:
        reason = one_pass_unavailable(device)
    if reason is not None:
        raise KernelsError(reason)
    from .triton_math import TritonMath

    return TritonMath()


def _kitchen_math(device: torch.device) -> BlockMath:
    if device.type != "cpu":
        reason = kitchen_refusal(device, "adaln", "apply_rope1")
        if reason is not None:
            raise KernelsError(reason)
    elif importlib.util.find_spec("comfy_kitchen") is None:
        raise KernelsError("not installed")
    import comfy_kitchen  # noqa: F401  (registers the operations)

    from .kitchen_math import KitchenMath

    return KitchenMath()


def math_fault(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return a fault in the results of `math` on `device`, compared with exact ones.

    None if they are right.

    From then on, `math` quantises only if the codes are right.
    """
    try:
        fault = fault_of(partial(_results, math, device, dtype, width), LARGEST_ERROR[dtype])
        if fault is None and math.quantises:
            # Not on cards without fp8 units: no kernel multiplies codes there either.
            codes = partial(_quantised, math, device, dtype, width)
            math.quantises = fault_of(codes, LARGEST_CODES_ERROR) is None
    except RuntimeError as err:
        # A compiler that tries out several kernels may need more memory than other functions.
        if not is_out_of_memory(err):
            raise
        return f"fails ({first_line(err)})"
    return fault


def _results(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> Results:
    """Yield each function's result for the same random tokens. Some tokens are large."""
    exact = _computed(EXACT, torch.device("cpu"), dtype, width)
    for name, found in _computed(math, device, dtype, width).items():
        yield name, found, exact[name]


def _computed(
    math: BlockMath, device: torch.device, dtype: torch.dtype, width: int
) -> dict[str, torch.Tensor]:
    tokens, update = (_tokens(seed, width).to(device, dtype) for seed in (0, 1))
    shift, scale, gate = (
        0.1 * _tokens(seed, width)[:, :2].transpose(0, 1).to(device) for seed in (2, 3, 4)
    )
    rms = nn.RMSNorm(width, eps=1e-6, device=device, dtype=dtype).requires_grad_(False)
    # Weights other than 1: a kernel without them fails the test.
    rms.weight.copy_(scale[0, 0])
    angles = _tokens(5, TEST_HEAD).view(1, TEST_TOKENS, 1, TEST_HEAD).to(device)
    # The second row comes first, so a kernel with wrong row numbers fails the test.
    rows = Norm(scale, shift, 1e-6, True, spans=((0, 2, 1), (2, TEST_TOKENS, 0)))
    modulated = rows.of_row(0)
    first = Gate(gate[:1])
    gated = torch.empty_like(tokens)
    added = torch.empty_like(tokens)
    found = {
        "norm": math.norm(tokens, modulated),
        "norm of several rows": math.norm(tokens, rows),
        # Clones, here and below: these functions may overwrite their arguments.
        "RMS norm": math.rms_norm(tokens.clone(), rms),
        "rotary embedding": math.rotate(
            tokens.clone(), rms, math.rotation(angles.cos(), angles.sin())
        ),
        "gated sum": math.add(tokens, update.clone(), first, out=torch.empty_like(tokens)),
        "norm of a gated sum": math.normed(
            tokens, modulated._replace(modulated=False), update, first, gated
        ),
        "norm of a sum": math.normed(tokens, modulated, update, None, added),
    }
    return {**found, "gated sum before a norm": gated, "sum before a norm": added}  # type: ignore[dict-item]


def _quantised(math: BlockMath, device: torch.device, dtype: torch.dtype, width: int) -> Results:
    tokens, update = (_tokens(seed, width).to(device, dtype) for seed in (0, 1))
    row = 0.1 * _tokens(2, width)[:, :1].to(device)
    norm = Norm(row, row, 1e-6, True)
    sums = torch.empty_like(tokens)
    expected = {
        "quantised tokens": tokens,
        "quantised GELU": F.gelu(tokens.float(), approximate="tanh"),
        "quantised norm": math.normed(tokens, norm),
        "quantised norm of a sum": math.normed(tokens, norm, update, None, sums),
        "quantised norm of a gated sum": math.normed(
            tokens, norm, update, Gate(row), torch.empty_like(tokens)
        ),
    }
    found = (
        math.quantise(tokens),
        math.quantise(tokens, gelu=True),
        math.normed(tokens, norm, codes=True),
        math.normed(tokens, norm, update, None, sums, codes=True),
        math.normed(tokens, norm, update, Gate(row), sums, codes=True),
    )
    for (name, values), codes in zip(expected.items(), found, strict=True):
        assert isinstance(values, torch.Tensor)
        assert isinstance(codes, Codes)
        yield name, codes.codes.float() * codes.scales, values[0].float().cpu()


def _tokens(seed: int, width: int) -> torch.Tensor:
    """Return random tokens [1, TEST_TOKENS, width] on the CPU.

    Some columns are 50 times as large, as in models.
    """
    tokens = torch.randn(1, TEST_TOKENS, width, generator=torch.Generator().manual_seed(seed))
    tokens[..., ::97] *= 50
    return tokens
