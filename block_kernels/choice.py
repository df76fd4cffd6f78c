"""Choice of an implementation on a device: by installed packages, then by a test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..devices import is_broken_device, is_out_of_memory

if TYPE_CHECKING:
    from types import ModuleType

FIRST_CUDA = 13
"""Lowest CUDA version of torch with which ComfyUI lets comfy-kitchen use CUDA kernels."""

Results: TypeAlias = Iterable[tuple[str, torch.Tensor, torch.Tensor]]
"""Result name, result, and expected result on the CPU."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """Implementation, and the reasons against the better ones."""

    name: str | None
    """Name. None: no implementation works."""
    refusals: Mapping[str, str]

    @property
    def reasons(self) -> str:
        """Refusals in brackets after a space. Empty without refusals."""
        if not self.refusals:
            return ""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return f" ({reasons})"


def choose(tests: Mapping[str, Callable[[], str | None]]) -> KernelChoice:
    """Return the first implementation whose test returns None instead of a reason."""
    refusals: dict[str, str] = {}
    for name, test in tests.items():
        fault = test()
        if fault is None:
            return KernelChoice(name=name, refusals=refusals)
        refusals[name] = fault
    return KernelChoice(name=None, refusals=refusals)


@torch.inference_mode()
def fault_of(results: Callable[[], Results], largest: float) -> str | None:
    """Return a fault in the results, or None if relative errors are at most `largest`.

    Raises:
        RuntimeError: the device is broken or has no memory left. This is not a fault of the
            implementation.
    """
    try:
        for name, found, expected in results():
            values = expected.double()
            # Relative error: |found - expected| / |expected|, as L2 norms over all values.
            error = float((found.to("cpu", torch.float64) - values).norm() / values.norm())
            if not error <= largest:  # NaN too
                return f"its {name} is wrong (error {error:.2g} of {largest:g} allowed)"
    except Exception as err:  # compilers and drivers raise their own error types
        if is_broken_device(err) or (isinstance(err, RuntimeError) and is_out_of_memory(err)):
            raise
        return f"fails ({first_line(err)})"
    return None


def first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def kitchen_refusal(device: torch.device, *capabilities: str) -> str | None:
    """Return why comfy-kitchen has no active CUDA kernels with these capabilities on `device`.

    None if it has.
    """
    if device.type != "cuda":
        return "its kernels are for NVIDIA GPUs"
    if importlib.util.find_spec("comfy_kitchen") is None:
        return "not installed"
    # torch for ROCm calls devices cuda too, and has no CUDA version.
    if torch.version.cuda is None or int(torch.version.cuda.partition(".")[0]) < FIRST_CUDA:
        return (
            f"needs torch for CUDA {FIRST_CUDA} or later, and this one is for "
            f"{torch.version.cuda or 'no CUDA'}"
        )
    # Not before these checks, because the import loads compiled libraries.
    try:
        import comfy_kitchen
    except (ImportError, OSError) as err:
        return f"cannot be imported ({first_line(err)})"
    return backend_refusal(comfy_kitchen, *capabilities)


def backend_refusal(kitchen: ModuleType, *capabilities: str) -> str | None:
    """Return why comfy-kitchen's registry would not use CUDA kernels for these capabilities.

    None if it would.

    The registry is read and never changed.
    """
    backend = kitchen.list_backends().get("cuda")
    if backend is None:
        return "has no CUDA backend: update it"
    if not backend["available"]:
        return (
            "its CUDA backend is not available "
            f"({backend['unavailable_reason'] or 'no reason given'})"
        )
    if backend["disabled"]:
        return "its CUDA backend is disabled in this process"
    missing = set(capabilities) - set(backend["capabilities"])
    if missing:
        return f"its CUDA backend has no {' and '.join(sorted(missing))}: update it"
    return None
