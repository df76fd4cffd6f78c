"""fp8 storage on a GPU: decoded rows are bit-equal to the CPU, from the file and from RAM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from wanstream.block_kernels import Kernels
from wanstream.offload.formats.decode import decode_tensor
from wanstream.offload.formats.quantise import FP8, quantise_rows, work_memory
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts


@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_decoded_to_the_bits_of_the_cpu(gpu: Accelerator, computed: torch.dtype) -> None:
    values = torch.randn(700, 5120).bfloat16()
    stored, scales = torch.empty(values.shape, dtype=FP8), torch.empty(700, 1)
    quantise_rows(values, stored, scales, work_memory(5120))
    on_cpu, on_gpu = (
        torch.empty(values.shape, dtype=computed, device=device) for device in ("cpu", gpu.device)
    )
    decode_tensor(stored, on_cpu, scale=scales)
    decode_tensor(stored.to(gpu.device), on_gpu, scale=scales.to(gpu.device))
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("source", ["file", "pinned"])
def test_a_streamed_pair_is_the_model_whose_rows_were_quantised(
    gpu: Accelerator,
    make_tiny_expert: Callable[..., nn.Module],
    tiny_expert_file: Callable[..., Path],
    source: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    lane = Lane(
        latents=torch.randn(1, 16, 2, 4, 6, generator=generator).to(gpu.device),
        text=torch.randn(1, 5, 4096, generator=generator).to(gpu.device),
    )
    model, timestep, path = (
        make_tiny_expert(),
        torch.tensor([990.0]).to(gpu.device),
        tiny_expert_file(),
    )
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 448.0
                module.weight.data = (module.weight / scale).to(FP8).float() * scale
    model.to(
        gpu.device
    )  # after quantising on the CPU: a GPU divides by a number by multiplying with its reciprocal
    policy = OffloadPolicy.layerwise(1, source=source)
    with (
        torch.inference_mode(),
        open_experts(path, path, compute_dtype=torch.float32, storage="fp8") as pair,
    ):
        pair.kernels = Kernels(math="exact")
        expected = model(lane.latents, timestep, lane.text, return_dict=False)[0]
        engine = pair.engine(policy, gpu.device)
        for _ in range(2):
            with engine.run(step_visits(["low"], engine.block_counts)) as run:
                [velocity] = forward_lanes(
                    engine.models["low"], [lane], timestep, lambda i: run.visit(0, "low", i)
                )
            assert torch.equal(velocity, expected)
        assert pair.loaded_bytes <= pair.device_bytes(policy)
