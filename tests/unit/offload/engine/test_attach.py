"""Attaching to a model's own forward, and restoring the model exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wanstream.offload import AbsentWeightError, attach_offload
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy, StateError
from wanstream.tests.support.offload.streaming import CPU, LAYERWISE, ONES, WIDTH, Model, attach


@pytest.fixture
def model(make_stack) -> Model:
    return Model(make_stack(5))


def snapshot(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return every tensor's identity and address, and the hook counts."""
    tensors = {name: (id(p), p.data_ptr()) for name, p in module.named_parameters()}
    tensors |= {name: (id(b), b.data_ptr()) for name, b in module.named_buffers()}
    return tensors | {
        f"hooks of {name}": (len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in module.named_modules()
    }


POLICIES = [OffloadPolicy.resident(), OffloadPolicy.layerwise(2), OffloadPolicy.block_swap(2, 1)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_own_forward_is_streamed_and_detached(model, policy):
    hidden = torch.randn(2, WIDTH)
    before = snapshot(model)
    expected = model(hidden)
    next_one = model(hidden + 1)
    with attach_offload(model.blocks, policy=policy, device=CPU) as engine:
        assert torch.equal(model(hidden), expected)
        with engine.passes(2):
            assert torch.equal(model(hidden), expected)
            assert engine.running, "the run goes on for the second pass"
            assert torch.equal(model(hidden + 1), next_one)
        assert not engine.running
        with engine.run(step_visits(["blocks"], engine.block_counts)):
            with pytest.raises(RuntimeError, match="already running"), engine.passes(2):
                pass
        with torch.inference_mode():
            assert torch.equal(model(hidden), expected)
        assert torch.equal(model(hidden), expected)
    assert snapshot(model) == before
    engine.detach()
    assert torch.equal(model(hidden), expected)


def test_an_absent_block_cannot_be_computed_with(make_stack):
    stack = make_stack(3)
    with attach({"blocks": stack}):
        for mode in (True, False):
            with torch.inference_mode(mode):
                with pytest.raises(AbsentWeightError, match=r"up\.weight of block 0 of 'blocks'"):
                    stack[0](ONES)
                assert stack.state_dict()["0.up.weight"].shape == (0,)


def test_a_failed_forward_does_not_disturb_the_next_one(model):
    hidden = torch.ones(2, WIDTH)
    expected = model(hidden)
    with attach_offload(model.blocks, policy=LAYERWISE, device=CPU):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, WIDTH - 1))
        assert torch.equal(model(hidden), expected)
        hook = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(hidden)
        hook.remove()
        assert torch.equal(model(hidden), expected)


def test_a_block_out_of_turn_after_a_failed_last_one_raises(make_stack):
    stack = make_stack(2)
    with attach_offload(stack, policy=LAYERWISE, device=CPU):
        stack[0](ONES)
        with pytest.raises(RuntimeError, match=r"shape|size"):
            stack[1](torch.ones(1, WIDTH - 1))
        with pytest.raises(StateError):
            stack[1](ONES)


def test_refusals_touch_nothing(model):
    before = snapshot(model)
    absent = (LAYERWISE, "cuda:99", "cuda:99 does not exist")
    for policy, device, words in ((OffloadPolicy.block_swap(6), CPU, "5"), absent):
        with pytest.raises(ValueError, match=words):
            attach_offload(model.blocks, policy=policy, device=device)
    assert snapshot(model) == before
    empty = nn.ModuleList([nn.Linear(4, 4, device="meta")])
    with pytest.raises(ValueError, match="source"):
        attach_offload(empty, policy=LAYERWISE, device=CPU)


@pytest.mark.parametrize("missing_in", ["source", "module"])
def test_a_source_that_does_not_fit_leaves_all_blocks_alone(make_stack, missing_in):
    stack = make_stack(3)
    other = make_stack(3)
    (other if missing_in == "source" else stack)[2].up = nn.Identity()
    if missing_in == "source":  # only a weight without data needs the source
        stack[2].up.to("meta")
    before = snapshot(stack)
    with pytest.raises(ValueError, match=r"block 2 of 'blocks'.*up\.weight"):
        attach({"blocks": stack}, source=ModuleSource({"blocks": list(other)}))
    assert snapshot(stack) == before
