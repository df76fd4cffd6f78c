"""Runtime of NVIDIA GPUs and, through the same torch module, of AMD GPUs with ROCm."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import cast

import torch

from .runtime import DeviceMemory, DeviceRuntime, Event, PageLockError, Stream

FIRST_WITH_BF16, FIRST_WITH_FP16 = (8, 0), (5, 3)
"""Lowest compute capabilities of NVIDIA GPUs with fast bf16 and fp16."""

HOST_REGISTER_PORTABLE = 1  # locked for every device of the process


class CudaRuntime(DeviceRuntime):
    """See `DeviceRuntime`."""

    @staticmethod
    def count() -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @staticmethod
    def current_index() -> int:
        return torch.cuda.current_device()

    @staticmethod
    def is_initialized() -> bool:
        return bool(torch.cuda.is_initialized())

    def stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.device))

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", torch.cuda.stream(cast(torch.cuda.Stream, stream)))

    def event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=timing, blocking=blocking))

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.device))

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(free=int(free), total=int(total))

    def allocated_bytes(self, *, peak: bool = False) -> int:
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return int(read(self.device))

    def reserved_bytes(self, *, peak: bool = False) -> int:
        read = torch.cuda.max_memory_reserved if peak else torch.cuda.memory_reserved
        return int(read(self.device))

    def active_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["active_bytes.all.current"])

    def limit_memory(self, nbytes: int | None) -> None:
        # Cached memory counts against the limit.
        torch.cuda.empty_cache()  # noqa: TID251 - not within a run
        fraction = 1.0 if nbytes is None else nbytes / self.memory().total
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def lock_pages(self, memory: torch.Tensor) -> None:
        # `pin_memory` would copy the block instead, into a pool that rounds sizes up to powers of two: 1.53 times the
        # bytes of a Wan2.2 A14B block. On a device without a context, the driver would create one of about 0.5 GB.
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            result = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), HOST_REGISTER_PORTABLE)
            if result != cudart.cudaError.success:
                self._clear_last_error()
                raise PageLockError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")

    def unlock_pages(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            # Not raised: the pages are unlocked at the latest when they are unmapped.
            if cudart.cudaHostUnregister(memory.data_ptr()) != cudart.cudaError.success:
                self._clear_last_error()

    def auto_dtype(self) -> torch.dtype:
        if torch.version.hip is not None:
            return torch.bfloat16  # torch has bf16 kernels for all GPUs that it supports with ROCm
        capability = torch.cuda.get_device_capability(self.device)
        if capability >= FIRST_WITH_BF16:
            return torch.bfloat16
        return torch.float16 if capability >= FIRST_WITH_FP16 else torch.float32

    def _clear_last_error(self) -> None:
        # A failed call remains this thread's last CUDA error, and torch raises it at the next kernel launch, or, with
        # cudaMallocAsync, in the destructor of a tensor, which ends the process. Launch a kernel here whose result is
        # not needed.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)


class NvtxRanges:
    """Named time ranges that Nsight Systems shows. Any thread may call, and ranges may overlap.

    Raises:
        ValueError: torch has no CUDA.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise ValueError(
                f"NVTX ranges are requested (WANSTREAM_NVTX), and torch {torch.__version__} has no CUDA: unset it"
            )

    def start(self, name: str) -> int:
        """Start a range and return its number."""
        return int(torch.cuda.nvtx.range_start(name))

    def end(self, number: int) -> None:
        """End the range of that number."""
        torch.cuda.nvtx.range_end(number)
