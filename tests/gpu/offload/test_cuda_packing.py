"""GGUF groups on a GPU: bit-equal to the CPU, and decoding never blocks the calling thread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from wanstream.block_kernels import Kernels
from wanstream.offload.formats.decode import decode_tensor
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import q4_k_m, random_groups, save_expert_gguf
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts


def groups_of(name: str, count: int) -> torch.Tensor:
    return torch.from_numpy(
        random_groups(GGMLQuantizationType[name], count, np.random.default_rng(0), scale=0.01)
    )


@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_values_are_those_of_the_cpu(gpu, name, computed):
    packing, groups = QUANT_FORMATS[name], groups_of(name, 40_000)
    on_cpu = torch.empty(len(groups), packing.values, dtype=computed)
    decode_tensor(groups, on_cpu, packing=packing)
    on_gpu = torch.empty(len(groups), packing.values, dtype=computed, device=gpu.device)
    decode_tensor(groups.to(gpu.device), on_gpu, packing=packing)
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_decoding_waits_for_nothing(gpu, name):
    """The stream is still busy with earlier work when the last chunk has been issued."""
    packing, groups = QUANT_FORMATS[name], groups_of(name, 40_000).to(gpu.device)
    values = torch.empty(len(groups), packing.values, dtype=torch.bfloat16, device=gpu.device)
    decode_tensor(groups, values, packing=packing)  # kernels are loaded on their first use
    gpu.runtime.current_stream().synchronize()
    gpu.delay(500)
    before = gpu.runtime.event()
    before.record(gpu.runtime.current_stream())
    decode_tensor(groups, values, packing=packing)
    assert not before.query()


@pytest.mark.parametrize("source", ["file", "pinned"])
def test_a_streamed_gguf_expert_equals_the_plain_model(gpu, make_tiny_expert, tmp_path, source):
    generator = torch.Generator().manual_seed(0)
    lane = Lane(
        latents=torch.randn(1, 16, 2, 4, 6, generator=generator).to(gpu.device),
        text=torch.randn(1, 5, 4096, generator=generator).to(gpu.device),
    )
    path, timestep = tmp_path / "expert.gguf", torch.tensor([990.0]).to(gpu.device)
    model = save_expert_gguf(make_tiny_expert(), path, types=q4_k_m).to(gpu.device)
    with torch.inference_mode(), open_experts(path, path, compute_dtype=torch.float32) as pair:
        pair.kernels = Kernels(math="exact")
        expected = model(lane.latents, timestep, lane.text, return_dict=False)[0]
        engine = pair.engine(OffloadPolicy.layerwise(1, source=source), gpu.device)
        for _ in range(2):
            with engine.run(step_visits(["low"], engine.block_counts)) as run:
                [velocity] = forward_lanes(
                    engine.models["low"], [lane], timestep, lambda i: run.visit(0, "low", i)
                )
            assert torch.equal(velocity, expected)
