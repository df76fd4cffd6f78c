"""Runtime of AMD GPUs: ROCm builds of torch serve them as `torch.cuda`."""

from __future__ import annotations

import torch

from .cuda import CudaRuntime


class RocmRuntime(CudaRuntime):
    """See `DeviceRuntime`."""

    host_register = "hipHostRegister"

    @staticmethod
    def unavailable() -> str:
        return (
            f"torch {torch.__version__} is built for ROCm {torch.version.hip} and finds no AMD GPU: check that "
            "rocminfo lists it, that this user may open /dev/kfd, and HIP_VISIBLE_DEVICES, or use cpu"
        )

    def auto_dtype(self) -> torch.dtype:
        return torch.bfloat16  # torch has bf16 kernels for all GPUs that it supports with ROCm
