"""Runtime for Intel GPUs."""

from __future__ import annotations

import torch

from .runtime import DeviceMemory, DeviceRuntime, NoPageLockError


class XpuRuntime(DeviceRuntime):
    """See `DeviceRuntime`.

    XPU events have no `blocking`: a waiting host thread may spin on a core.
    """

    family = "xpu"

    @staticmethod
    def unavailable() -> str:
        if getattr(torch.version, "xpu", None) is None:
            return f"torch {torch.__version__} is built without XPU: install torch for XPU"
        return "the driver reports no Intel GPU: update it, check ONEAPI_DEVICE_SELECTOR"

    def memory(self) -> DeviceMemory:
        try:
            return super().memory()
        except RuntimeError:  # some drivers report no free memory: count what is reserved here
            total = int(torch.xpu.get_device_properties(self.device).total_memory)
            return DeviceMemory(free=total - self.reserved_bytes(), total=total)

    def lock_pages(self, memory: torch.Tensor) -> None:
        raise NoPageLockError("torch.xpu cannot page-lock memory in place")

    def _unlock(self, memory: torch.Tensor) -> bool:
        raise AssertionError("no memory can have been locked")

    def auto_dtype(self) -> torch.dtype:
        # `torch.xpu.is_bf16_supported` is True for emulation too.
        properties = torch.xpu.get_device_properties(self.device)
        if getattr(properties, "has_bfloat16_conversions", False):
            return torch.bfloat16
        return torch.float16
