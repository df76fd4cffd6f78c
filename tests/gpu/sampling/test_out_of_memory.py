"""Whole runs on the checked device with one failed allocation.

The latents are the same, at once or in the next run.
"""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.testing import make_lora, q4_k_m, save_expert_file, save_expert_gguf, save_lora
from wanstream.tests.support.accelerator import checked_accelerator
from wanstream.wan import ExpertPair, open_experts
from wanstream.wan.lora.file import open_lora

pytestmark = [pytest.mark.checked, pytest.mark.slow]

TRIED = 20
"""Failed allocations per test, evenly spaced."""


@pytest.mark.parametrize(
    "policy", [OffloadPolicy.resident(), OffloadPolicy.layerwise(1)], ids=["resident", "layerwise"]
)
@pytest.mark.parametrize("kind", ["raw", "GGUF with a LoRA"])
def test_any_allocation_may_fail(tmp_path, make_tiny_expert, make_request, kind, policy):
    model, path = make_tiny_expert(), tmp_path / ("expert" if kind == "raw" else "expert.gguf")
    if kind == "raw":
        save_expert_file(model, path, dtype=torch.float32)
    else:
        save_expert_gguf(model, path, types=q4_k_m)
    save_lora(make_lora(model, seed=2), tmp_path / "lora", dtype=torch.float32)
    request = make_request(steps=2, switch_step=1)

    def opened() -> ExpertPair:
        pair = open_experts(path, path, compute_dtype=torch.float32)
        if kind != "raw":
            pair.set_loras(*([(open_lora(tmp_path / "lora"), each)] for each in (1.0, 0.5)))
        return pair

    with checked_accelerator(0) as gpu, opened() as pair:
        expected = denoise(pair, request, policy=policy, device=gpu.device).latents
        allocations = gpu.need_fake("").devices[0].allocations
    assert allocations > 10 * TRIED
    retried = 0
    for number in range(1, allocations, allocations // TRIED):
        with checked_accelerator(number) as gpu, opened() as pair:
            gpu.need_fake("").devices[0].fail_at = number
            try:
                result = denoise(pair, request, policy=policy, device=gpu.device)
            except torch.OutOfMemoryError:  # before the first step, or without a smaller policy
                result = denoise(pair, request, policy=policy, device=gpu.device)
            else:
                retried += 1
            assert torch.equal(result.latents, expected), f"allocation {number}"
            del result
    # Nearly all allocations are those of a step.
    assert retried > TRIED // 2 or policy.kind == "layerwise"
