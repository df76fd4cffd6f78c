"""Kernel launches of decoding on the checked device, and the values of the shorter way."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.formats.decode import CHUNK_VALUES, FP8_DTYPES, decode_tensor
from wanstream.tests.support.accelerator import Accelerator


@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("by_row", [False, True], ids=["scalar", "per row"])
def test_fp8_takes_two_launches_and_no_memory(
    gpu: Accelerator, dtype: torch.dtype, computed: torch.dtype, by_row: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (64, 40), dtype=torch.uint8, generator=random).view(dtype)
    scale = torch.rand((64, 1) if by_row else (), generator=random) * 0.01
    into = torch.empty(stored.shape, dtype=computed, device=gpu.device)
    on_device = stored.to(gpu.device), scale.to(gpu.device)
    gpu.runtime.reset_peaks()
    before, launched = gpu.runtime.allocated_bytes(), 0 if gpu.machine is None else gpu.machine.launches
    decode_tensor(on_device[0], into, scale=on_device[1])
    assert gpu.runtime.allocated_bytes(peak=True) == before
    if gpu.machine is not None:
        assert gpu.machine.launches - launched == 2
    expected = (stored.float() * scale).to(computed)
    assert torch.equal(into.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_scaled_vector_is_decoded(gpu: Accelerator) -> None:
    stored = torch.arange(1, 7, dtype=torch.float32).to(torch.float8_e4m3fn)
    into = torch.empty(6, dtype=torch.bfloat16, device=gpu.device)
    decode_tensor(stored.to(gpu.device), into, scale=torch.tensor(0.5, device=gpu.device))
    assert torch.equal(into.cpu(), (stored.float() * 0.5).bfloat16())


def test_a_long_matrix_takes_no_more(gpu: Accelerator) -> None:
    rows = CHUNK_VALUES // 1024 + 5
    stored = torch.zeros(rows, 1024, dtype=torch.float8_e4m3fn, device=gpu.device)
    into = torch.empty(stored.shape, dtype=torch.bfloat16, device=gpu.device)
    launched = 0 if gpu.machine is None else gpu.machine.launches
    decode_tensor(stored, into, scale=torch.ones((), device=gpu.device))
    if gpu.machine is not None:
        assert gpu.machine.launches - launched == 3, "and one that makes the factor"
