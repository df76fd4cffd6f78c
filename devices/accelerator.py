"""Runtime of device families with streams whose module of torch has the functions that CUDA and XPU have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch

from .runtime import DeviceMemory, DeviceRuntime, Event, Stream
from .shared_pages import LockedPages


class AcceleratorRuntime(DeviceRuntime):
    """See `DeviceRuntime`.

    Calls the module of the family, not `torch.accelerator`: that one has memory figures only from torch 2.9 on, and its
    events ignore `blocking`.
    """

    family: ClassVar[str]
    """Device type, and the name of torch's module."""

    def __init__(self, device: torch.device, pages: LockedPages | None = None) -> None:
        super().__init__(device, pages)
        self._torch = self._module()

    @classmethod
    def _module(cls) -> Any:
        return torch.get_device_module(cls.family)

    @classmethod
    def count(cls) -> int:
        module = cls._module()
        return int(module.device_count()) if module.is_available() else 0

    @classmethod
    def current_index(cls) -> int:
        return int(cls._module().current_device())

    @classmethod
    def is_initialized(cls) -> bool:
        return bool(cls._module().is_initialized())

    def stream(self) -> Stream:
        return cast(Stream, self._torch.Stream(self.device))

    def current_stream(self) -> Stream:
        return cast(Stream, self._torch.current_stream(self.device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._torch.stream(stream))

    def event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        return cast(Event, self._torch.Event(enable_timing=timing))

    def enter_thread(self) -> None:
        self._torch.set_device(self.device)

    def name(self) -> str:
        return str(self._torch.get_device_name(self.device))

    def memory(self) -> DeviceMemory:
        free, total = self._torch.mem_get_info(self.device)
        return DeviceMemory(free=int(free), total=int(total))

    def allocated_bytes(self, *, peak: bool = False) -> int:
        read = self._torch.max_memory_allocated if peak else self._torch.memory_allocated
        return int(read(self.device))

    def reserved_bytes(self, *, peak: bool = False) -> int:
        read = self._torch.max_memory_reserved if peak else self._torch.memory_reserved
        return int(read(self.device))

    def active_bytes(self) -> int:
        return int(self._torch.memory_stats(self.device)["active_bytes.all.current"])

    def limit_memory(self, nbytes: int | None) -> None:
        self._torch.empty_cache()  # cached memory counts against the limit
        fraction = 1.0 if nbytes is None else nbytes / self.memory().total
        self._torch.set_per_process_memory_fraction(fraction, self.device)

    def is_locked(self, memory: torch.Tensor) -> bool:
        return bool(memory.is_pinned())

    def reset_peaks(self) -> None:
        self._torch.reset_peak_memory_stats(self.device)
