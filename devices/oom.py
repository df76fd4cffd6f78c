"""What a device says when it has no memory left: torch's allocator in its own words, its libraries in theirs."""

from __future__ import annotations

import traceback

import torch

CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""

LIBRARY_OOM_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""What stands in the RuntimeErrors of allocations that are not those of torch on a GPU, such as cuBLAS' when it first
starts, and of RAM where a limit is set."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether `error` says that device memory ran out; nothing is broken then, and less memory may be enough."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # torch.AcceleratorError, which came with torch 2.8, has the device's own number.
    if getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY:
        return True
    return any(words in str(error) for words in LIBRARY_OOM_MESSAGES)


def forget(error: BaseException) -> str:
    """What `error` says. Afterwards nothing that it came through holds a tensor any more.

    A traceback keeps every frame between the failure and its handler alive, with all that was computed there.
    """
    said = str(error).split(" Of the allocated memory")[0].strip() or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return said
