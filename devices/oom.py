"""Device errors: out of memory, a broken context, and errors that surface late."""

from __future__ import annotations

import os
import traceback

import torch

CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""

LIBRARY_OOM_MESSAGES = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Message parts in RuntimeErrors from allocations outside torch's CUDA allocator: in libraries such
as cuBLAS, and in RAM."""


LATE_MESSAGES = ("CUDA error: ", "HIP error: ")
"""Prefixes for device RuntimeErrors before torch 2.8, and for library errors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if `error` means out of memory.

    The device is still usable, and a retry may use less.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # torch.AcceleratorError (torch 2.8 and later) has the device error number.
    if getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY:
        return True
    return any(words in str(error) for words in LIBRARY_OOM_MESSAGES)


def is_broken_device(error: BaseException | None) -> bool:
    """Return True if `error` or a cause is a device error that may fail every later call.

    Such an error breaks the CUDA context for the rest of the process. False before torch 2.8, where
    it is a plain RuntimeError.
    """
    # Without the class, the empty tuple makes `isinstance` False.
    kind = getattr(torch, "AcceleratorError", ())
    while error is not None:
        if isinstance(error, kind):
            assert isinstance(error, RuntimeError), error
            return not is_out_of_memory(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class LateDeviceError(RuntimeError):
    """Kernel or copy error raised by a later call. The cause is torch's error."""


def raise_late(error: BaseException | None, place: str) -> None:
    """Raise `LateDeviceError` if `error` may belong to earlier device work.

    Return for all other errors.

    A device works behind the host, so the failed call is not the one that raises. Running out of
    memory is found at the call itself.

    Args:
        error: an error handled now. None for none.
        place: block and step at which it surfaced.
    """
    if (
        not isinstance(error, RuntimeError)
        or isinstance(error, LateDeviceError)
        or is_out_of_memory(error)
    ):
        return
    if not isinstance(error, getattr(torch, "AcceleratorError", ())) and not str(error).startswith(
        LATE_MESSAGES
    ):
        return
    said = str(error).partition("\n")[0].rstrip(".")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise LateDeviceError(f"{said}, at {place}") from error
    meaning = (
        "An earlier kernel or copy caused it. After such an error, the device is usable by a new "
        "process only."
    )
    if "_STATUS_" in said:  # from cuBLAS, cuDNN and others
        meaning = (
            "A library reports it: it refuses this call, is short of memory, or an earlier kernel "
            "or copy failed."
        )
    raise LateDeviceError(
        f"{said}, surfaced at {place}: start again with CUDA_LAUNCH_BLOCKING=1 to find its "
        f"cause\n{meaning}"
    ) from error


def forget(error: BaseException) -> str:
    """Release all tensors kept alive by the tracebacks of `error`, and return the message.

    A traceback keeps every frame between the failure and the handler alive, with all tensors in
    local variables. A retry with less memory would fail while they exist.
    """
    # torch's message continues with statistics, and advice on fragmentation.
    message = str(error).split(" Of the allocated memory")[0].strip() or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return message
