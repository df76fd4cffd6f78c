"""Runtimes for NVIDIA GPUs, and for AMD GPUs in ROCm builds of torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import ClassVar, cast

import torch

from .oom import is_broken_device
from .runtime import DeviceRuntime, Event, PageLockError

FIRST_WITH_BF16, FIRST_WITH_FP16 = (8, 0), (5, 3)
"""Lowest compute capabilities with fast bf16 and fp16 on NVIDIA GPUs."""

HOST_REGISTER_PORTABLE = 1  # locked for every device of the process


class CudaRuntime(DeviceRuntime):
    """See `DeviceRuntime`."""

    family = "cuda"
    host_register: ClassVar[str] = "cudaHostRegister"
    """Driver function that locks pages, for messages."""

    @staticmethod
    def unavailable() -> str:
        built = torch.version.cuda
        if built is None:
            return f"torch {torch.__version__} is built without CUDA: install torch for CUDA"
        driver = driver_version()
        if driver is None:
            return f"torch is built for CUDA {built}, and there is no NVIDIA driver: install one"
        # Within a major version, a driver runs builds for later minor versions.
        if driver[0] < int(built.partition(".")[0]):
            return (
                f"torch is built for CUDA {built}, and the NVIDIA driver supports CUDA up to "
                f"{driver[0]}.{driver[1]}: update the driver, install torch for that CUDA"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "is not set" if visible is None else f"is {visible!r}"
        return (
            f"the NVIDIA driver (CUDA up to {driver[0]}.{driver[1]}) gives torch no GPU, and "
            f"CUDA_VISIBLE_DEVICES {shown}: check that nvidia-smi lists one"
        )

    def event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=timing, blocking=blocking))

    def lock_pages(self, memory: torch.Tensor) -> None:
        # `pin_memory` would copy the block instead, into a pool that rounds sizes up to powers of
        # two: 1.53 times the bytes of a Wan2.2 A14B block. On a device without a context, the
        # driver would create one of about 0.5 GB.
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            result = cudart.cudaHostRegister(
                memory.data_ptr(), memory.numel(), HOST_REGISTER_PORTABLE
            )
            if result != cudart.cudaError.success:
                self._clear_last_error()
                self._check_context()  # the result may be the error of an earlier kernel or copy
                raise PageLockError(f"{self.host_register}: {cudart.cudaGetErrorString(result)}")

    def _unlock(self, memory: torch.Tensor) -> bool:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            # CUDA accepts only the exact address given to cudaHostRegister.
            if cudart.cudaHostUnregister(memory.data_ptr()) == cudart.cudaError.success:
                return True
            self._clear_last_error()
            return False

    def auto_dtype(self) -> torch.dtype:
        capability = torch.cuda.get_device_capability(self.device)
        if capability >= FIRST_WITH_BF16:
            return torch.bfloat16
        if capability >= FIRST_WITH_FP16:
            return torch.float16
        return torch.float32

    def _clear_last_error(self) -> None:
        # A failed call remains this thread's last CUDA error, and torch raises it at the next
        # kernel launch, or, with cudaMallocAsync, in a tensor destructor, which ends the process.
        # Hence a kernel launch here, with an unused result.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)

    def _check_context(self) -> None:
        """Raise the error that has broken the context, if any."""
        try:
            torch.ones(1, device=self.device)
        except RuntimeError as err:
            if is_broken_device(err):
                raise


def driver_version() -> tuple[int, int] | None:
    """Return the highest CUDA version supported by the NVIDIA driver. None without a driver.

    This call does not initialise the driver, so the process can still be forked afterwards.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    # The driver returns 12040 for CUDA 12.4.
    return version.value // 1000, version.value % 1000 // 10


class NvtxRanges:
    """Named time ranges shown by Nsight Systems. Any thread may call, and ranges may overlap.

    Raises:
        ValueError: torch has no CUDA.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise ValueError(
                f"NVTX ranges are requested (WANSTREAM_NVTX), and torch {torch.__version__} has no "
                "CUDA: unset it"
            )

    def start(self, name: str) -> int:
        """Start a range and return its number."""
        # Ranges from `range_push` must end in reverse order, and on the same thread.
        return int(torch.cuda.nvtx.range_start(name))

    def end(self, number: int) -> None:
        """End the range with that number."""
        torch.cuda.nvtx.range_end(number)


class RocmRuntime(CudaRuntime):
    """Runtime for AMD GPUs: ROCm builds of torch serve them as `torch.cuda`.

    See `DeviceRuntime`.
    """

    host_register = "hipHostRegister"

    @staticmethod
    def unavailable() -> str:
        return (
            f"torch {torch.__version__} is built for ROCm {torch.version.hip} and finds no AMD "
            "GPU: check that rocminfo lists it, that this user may open /dev/kfd, and "
            "HIP_VISIBLE_DEVICES"
        )

    def auto_dtype(self) -> torch.dtype:
        return torch.bfloat16  # torch has bf16 kernels for all GPUs that it supports with ROCm
