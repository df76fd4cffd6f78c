"""Decoding in one pass: which Triton kernel to use, its test on a device, and its launch.

A kernel reads stored bytes once and writes the compute dtype once, in one launch and without work
memory. It is used on a device if random bytes decode there to the same bits as in the eager
decoder.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from ...devices import dtype_name, is_broken_device, is_out_of_memory, made_current
from .packing import UNIT, Constants, EightBit, Microscaled, Packing, QuantFormat
from .rotation import rotation_factor, signs

logger = logging.getLogger("wanstream.kernels")

FAMILIES = ("cuda", "xpu")
"""Device types with Triton. ROCm devices are "cuda", too."""

UNITS_AT_ONCE = 256
"""Units per kernel program."""

WARPS = 4

ALIGNMENT = 16
"""Alignment of stored bytes and values. Any other would need a second compilation, with narrower
loads and stores."""

CODES = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}

ROTATED_GROUPS = (64, 256)
"""Group sizes, in columns, for which a rotation kernel exists."""

FIRST_ARCH = 80
"""Lowest compute capability at which Triton multiplies in tensor cores, without the point."""

Eager = Callable[
    [torch.Tensor, torch.Tensor, "Packing | None", "torch.Tensor | None", Constants], None
]
"""Decodes stored bytes into values with torch's operations, given their packing and scale."""


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """Stored form of a tensor in any shape."""

    dtype: torch.dtype
    packing: Packing | None = None
    scaled: bool = False
    """The values have a factor outside the stored bytes."""

    @property
    def name(self) -> str:
        return dtype_name(self.dtype) if self.packing is None else self.packing.name

    @property
    def has_kernel(self) -> bool:
        """True if a kernel decodes this form."""
        if isinstance(self.packing, EightBit):
            if self.packing.group:
                return self.packing.group in ROTATED_GROUPS and self.packing.dtype == torch.int8
            return self.packing.by_row or not self.packing.block
        if isinstance(self.packing, Microscaled):
            return self.scaled == (self.packing.bits == 4)
        return self.packing is not None or self.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)

    def units_per_scale(self, shape: tuple[int, ...], *, by_row: bool) -> int | None:
        """Return how many neighbouring units share one scale. None if a unit has two.

        Args:
            shape: shape of the values.
            by_row: the factor outside the stored bytes has a number per row.
        """
        values = math.prod(shape)
        if isinstance(self.packing, EightBit) and self.packing.by_row:
            values = self.packing.block or shape[-1]
        elif by_row:
            values //= shape[0]
        return None if values % UNIT else values // UNIT


def decode_in_one_pass(
    stored: torch.Tensor,
    into: torch.Tensor,
    packing: Packing | None,
    scale: torch.Tensor | None,
    constants: Constants,
    *,
    eager: Eager,
) -> bool:
    """Decode a tensor as `eager` does, if a kernel can. Return True if it did."""
    if into.device.type not in FAMILIES or stored.device != into.device:
        return False
    form = StoredForm(dtype=stored.dtype, packing=packing, scaled=scale is not None)
    if not form.has_kernel:
        return False
    if form.units_per_scale(tuple(into.shape), by_row=_is_by_row(scale)) is None:
        return False
    if not into.numel() or stored.data_ptr() % ALIGNMENT or into.data_ptr() % ALIGNMENT:
        return False
    if refusal(form, into.dtype, into.device, eager) is not None:
        return False
    with made_current(into.device):
        launch(stored, into, packing, scale, constants)
    return True


def unavailable(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot decode on `device`. None if they can."""
    if device.type in FAMILIES:
        return _unusable()
    return f"Triton has no kernels for {device.type}"


@functools.cache
def _unusable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton

        if not isinstance(_kernels().codes_kernel, triton.runtime.JITFunction):
            return "the environment variable TRITON_INTERPRET is set"
        triton.runtime.driver.active.get_current_target()
    except Exception as err:  # noqa: BLE001 - whatever a compiler or driver raises, torch decodes as well
        return f"Triton cannot be used ({_line(err)})"
    return None


@functools.cache
def refusal(form: StoredForm, dtype: torch.dtype, device: torch.device, eager: Eager) -> str | None:
    """Return why the kernel for `form` is not used on `device`, and log it.

    None if it gives the same bits as `eager`. The first call compiles the kernel, which takes up to
    a second.

    Raises:
        RuntimeError: the device is broken or out of memory.
    """
    reason = unavailable(device)
    if reason is not None:
        return reason
    is_rotated = isinstance(form.packing, EightBit) and form.packing.group
    try:
        with made_current(device):
            if is_rotated and not _has_tensor_cores():
                needed = f"an NVIDIA GPU of compute capability {FIRST_ARCH / 10} or later"
                return f"{form.name} needs {needed}"
            reason = _fault(form, dtype, device, eager)
    except Exception as err:
        # Errors are not cached, unlike a reason: the next call tests the kernel again.
        if isinstance(err, RuntimeError) and (is_out_of_memory(err) or is_broken_device(err)):
            raise
        reason = f"it fails with {_line(err)}"
    if reason is not None:
        text = "%s is decoded on %s by torch's operations, not in one pass: %s"
        logger.warning(text, form.name, device, reason)
    return reason


def _fault(form: StoredForm, dtype: torch.dtype, device: torch.device, eager: Eager) -> str | None:
    """Return what is wrong with the kernel for `form` on random bytes.

    Most codes for NaN and infinity are among the bytes.
    """
    stored, shape, scale = sample(form)
    stored = stored.to(device)
    scale = None if scale is None else scale.to(device)
    expected, found = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    eager(stored, expected, form.packing, scale, {})
    launch(stored, found, form.packing, scale, {})
    wrong = int((~same_bits(found, expected)).sum())
    if wrong:
        return f"{wrong:,} of {found.numel():,} values of the test differ"
    return None


def sample(form: StoredForm) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor | None]:
    """Return random stored bytes, the shape of the values, and the scale.

    Row counts are odd, and tiles end early.
    """
    random = torch.Generator().manual_seed(0)
    packing = form.packing
    if isinstance(packing, QuantFormat):
        shape = 67, packing.values
    elif isinstance(packing, Microscaled):
        shape = 133, 288
    else:
        shape = 37, 192 if packing is None else 3 * (packing.block or packing.group or 64)
    count = math.prod(shape) if packing is None else packing.bytes_of(shape)
    stored = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
    view_shape = shape if packing is None else packing.view_shape(shape)
    factor = None
    if form.scaled:
        factor = torch.rand((shape[0], 1) if packing is None else (), generator=random) * 0.01
    return stored.view(form.dtype).view(view_shape), shape, factor


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return where two tensors have the same bits. All bit patterns of NaN count as the same."""
    bits = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    return (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())


def launch(
    stored: torch.Tensor,
    into: torch.Tensor,
    packing: Packing | None,
    scale: torch.Tensor | None,
    constants: Constants,
) -> None:
    """Launch a form's kernel on the current stream and device."""
    kernels = _kernels()
    units = into.numel() // UNIT
    shape = tuple(into.shape)
    # Contraction would round a product and a difference once, where the eager decoders round twice.
    options: dict[str, object] = {"BY_BITS": kernels.INTERPRETED, "enable_fp_fusion": False}
    if isinstance(packing, EightBit) and packing.group:
        _launch_rotated(stored, into, packing, constants, options)
        return
    grid = (-(-units // UNITS_AT_ONCE),)
    options |= {"UNITS": UNITS_AT_ONCE, "num_warps": WARPS}
    if isinstance(packing, QuantFormat):
        options |= {"FORMAT": packing.name, "NBYTES": packing.nbytes}
        options["UNITS_PER_GROUP"] = packing.values // UNIT
        kernels.groups_kernel[grid](stored, into, units, **options)
    elif isinstance(packing, Microscaled):
        options |= {"FOUR_BITS": packing.bits == 4, "HIGH_FIRST": packing.high_first}
        columns = shape[-1] // UNIT, packing.scale_shape(shape)[1]
        kernels.microscaled_kernel[grid](stored, scale, into, units, *columns, **options)
    else:
        form = StoredForm(dtype=stored.dtype, packing=packing)
        per_scale = form.units_per_scale(shape, by_row=_is_by_row(scale))
        codes, scale = (stored, scale) if packing is None else packing.split(stored, shape)
        options |= {"CODES": CODES[codes.dtype], "SCALED": scale is not None}
        kernels.codes_kernel[grid](
            codes.view(torch.uint8), scale, into, units, per_scale, **options
        )


def _launch_rotated(
    stored: torch.Tensor,
    into: torch.Tensor,
    packing: EightBit,
    constants: Constants,
    options: dict[str, object],
) -> None:
    size = packing.group
    shape = tuple(into.shape)
    key = packing, torch.float16
    if key not in constants:
        # Pageable memory on purpose, as in `kronecker_factors`.
        constants[key] = (signs(size).to(stored.device, non_blocking=True).half(),)
    codes, scales = packing.split(stored, shape)
    groups = into.numel() // size
    per_scale = shape[1] // size if packing.by_row else groups
    at_once = 128
    columns = min(128, size)
    options |= {"GROUP": size, "FACTOR": rotation_factor(size), "GROUPS": at_once}
    options |= {"COLUMNS": columns, "DEPTH": 64, "num_warps": 8}
    _kernels().rotated_kernel[-(-groups // at_once) * (size // columns),](
        codes.view(torch.uint8), scales, *constants[key], into, groups, per_scale, **options
    )


def _is_by_row(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.numel() > 1


def _has_tensor_cores() -> bool:
    """Return True if Triton multiplies in tensor cores on the current device."""
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_ARCH)


def _kernels() -> ModuleType:
    from . import triton_kernels  # only where Triton is

    return triton_kernels


def _line(error: BaseException) -> str:
    """Return an error's kind and last line. A compiler puts the source before it."""
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {lines[-1]}"
    return type(error).__name__
