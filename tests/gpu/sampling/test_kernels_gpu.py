"""Compiled blocks and attention kernels on a GPU: one graph, the same video, no more memory."""

import pytest
import torch
from torch._dynamo.utils import counters

from wanstream.block_kernels import ATTENTIONS, INDUCTOR, Kernels, check_usable
from wanstream.block_kernels.attention import KernelsError
from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.rounding import difference
from wanstream.tests.support.sampling.runs import LAYERWISE, normal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CUDA = torch.device("cuda")
CLOSE = 2e-2
"""Largest relative difference in bf16, 8-bit attention (sage) included."""


@pytest.fixture
def pair(open_pair):
    return open_pair(heads=8, ffn_dim=4096, dtype=torch.bfloat16)


@pytest.fixture
def run(pair, make_request):
    request = make_request(noise=normal(1, 16, 5, 32, 48, seed=1))
    return lambda policy=LAYERWISE: denoise(pair, request, policy=policy, device=CUDA)


@pytest.mark.slow
def test_one_graph_serves_both_experts_and_every_policy(pair, run):
    torch._dynamo.reset()
    counters.clear()
    _ = run()
    plain = run()
    pair.kernels = Kernels(compiler=INDUCTOR)
    policies = (LAYERWISE, OffloadPolicy.resident(source="pinned"), LAYERWISE)
    compiled = [run(policy) for policy in policies]
    assert counters["stats"]["unique_graphs"] == 1
    for each in compiled:
        assert torch.equal(each.latents, compiled[0].latents)
        assert difference(each.latents, plain.latents) < CLOSE
    moved = [[step.bytes_moved for step in each.timeline.steps] for each in (plain, compiled[0])]
    assert moved[0] == moved[1]
    torch._dynamo.reset()


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "default"])
def test_another_kernel_of_attention_makes_the_same_video(attention, pair, run):
    try:
        check_usable(Kernels(attention=attention), CUDA, torch.bfloat16)
    except KernelsError as err:
        pytest.skip(str(err))
    plain = run().latents
    pair.kernels = Kernels(attention=attention)
    assert difference(run().latents, plain) < CLOSE
