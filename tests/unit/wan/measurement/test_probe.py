"""Block benchmark: a real block, with as many tokens as the time limit allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wanstream.devices import auto_dtype
from wanstream.shapes import ExpertShape
from wanstream.wan.measurement.probe import block_pass, probe_block, random_block

CPU = torch.device("cpu")
TINY = ExpertShape(width=256, ffn_width=512, blocks=2)
EACH = pytest.mark.parametrize("shape", [TINY, replace(TINY, image_width=1280)], ids=str)


@EACH
def test_sample_block_has_the_shape_and_finite_results(shape):
    block = random_block(shape, CPU)
    matrices = [p for p in block.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == shape.streamed_parameters
    every = sum(p.numel() for p in block.parameters())
    assert every == shape.streamed_parameters + shape.small_parameters
    assert {p.dtype for p in matrices} == {auto_dtype(CPU)}
    assert block.scale_shift_table.dtype == torch.float32
    seen: list[torch.Tensor] = []
    block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block_pass(block, shape, 100, CPU)()
    assert seen[0].shape == (1, 100, 256)
    assert torch.isfinite(seen[0]).all()
    assert seen[0].float().std() > 0.1


@EACH
def test_operations_are_those_that_torch_counts(shape):
    meta = torch.device("meta")
    counted = FlopCounterMode(display=False)
    once = block_pass(random_block(shape, meta), shape, 300, meta)
    with counted:
        once()
    assert counted.get_total_flops() == shape.block_flops(300)


@pytest.mark.parametrize(("given", "limit", "tokens"), [(700, 60, 700), (9, 60, 9), (9999, 0, 256)])
def test_time_limits_the_tokens(given, limit, tokens):
    rate = probe_block(TINY, given, CPU, most_s=limit)
    assert rate.tokens == tokens
    assert 1e6 < rate.flops_per_s < 1e16


def test_on_a_gpu(gpu):
    gpu.need_kernels("rates of a GPU")
    rate = probe_block(ExpertShape(), 8192, gpu.device)
    assert rate.tokens == 8192
    assert 1e12 < rate.flops_per_s < 1e16
