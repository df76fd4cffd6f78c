"""Attaching to a model's own forward, and restoring the model exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from wanstream.offload import AbsentWeightError, OffloadEngine, attach_offload
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy, StateError
from wanstream.tests.support.accelerator import Accelerator

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def snapshot(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return every tensor's identity and address, and the hook counts."""
    tensors = {name: (id(p), p.data_ptr()) for name, p in module.named_parameters()}
    tensors |= {name: (id(b), b.data_ptr()) for name, b in module.named_buffers()}
    tensors |= {
        f"hooks of {name}": (len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in module.named_modules()
    }
    return tensors


@pytest.mark.parametrize(
    "policy",
    [OffloadPolicy.resident(), OffloadPolicy.layerwise(2), OffloadPolicy.block_swap(2, 1)],
    ids=str,
)
def test_own_forward_is_streamed_and_detached(
    make_stack: Callable[..., nn.ModuleList], policy: OffloadPolicy
) -> None:
    model = Model(make_stack(5))
    plain = copy.deepcopy(model)
    before = snapshot(model)
    hidden = torch.randn(2, 32)
    with attach_offload(model.blocks, policy=policy, device=CPU) as handle:
        assert torch.equal(model(hidden), plain(hidden))
        with handle.passes(2):
            assert torch.equal(model(hidden), plain(hidden))
            assert handle.running, "the run goes on for the second pass"
            assert torch.equal(model(hidden + 1), plain(hidden + 1))
        assert not handle.running
        assert torch.equal(model(hidden), plain(hidden))
    assert snapshot(model) == before
    assert torch.equal(model(hidden), plain(hidden))


def test_a_block_that_is_not_there_cannot_be_computed_with(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    stack = make_stack(3)
    with attach_offload(stack, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False):
        for mode in (True, False):
            with (
                torch.inference_mode(mode),
                pytest.raises(AbsentWeightError, match=r"up\.weight of block 0 of 'blocks'"),
            ):
                stack[0](torch.ones(1, 32))
            with torch.inference_mode(mode):
                assert stack.state_dict()["0.up.weight"].shape == (0,)


def test_a_forward_that_fails_does_not_disturb_the_next_one(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    model = Model(make_stack(4))
    plain = copy.deepcopy(model)
    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device=CPU):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 31))
        hidden = torch.ones(2, 32)
        assert torch.equal(model(hidden), plain(hidden))
        hook = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(hidden)
        hook.remove()
        assert torch.equal(model(hidden), plain(hidden))


def test_meta_weights_without_a_source_are_refused_and_nothing_is_touched() -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4, device="meta")])
    before = snapshot(blocks)
    with pytest.raises(ValueError, match="source"):
        attach_offload(blocks, policy=OffloadPolicy.layerwise(1), device=CPU)
    assert snapshot(blocks) == before


def test_too_many_blocks_to_swap_is_refused(make_stack: Callable[..., nn.ModuleList]) -> None:
    with pytest.raises(ValueError, match="4"):
        attach_offload(make_stack(4), policy=OffloadPolicy.block_swap(5), device=CPU)


def test_a_device_that_is_not_there_is_refused(make_stack: Callable[..., nn.ModuleList]) -> None:
    with pytest.raises(ValueError, match="cuda:99 does not exist"):
        attach_offload(make_stack(4), policy=OffloadPolicy.layerwise(), device="cuda:99")


def test_under_inference_mode_and_after_it(make_stack: Callable[..., nn.ModuleList]) -> None:
    model = Model(make_stack(4))
    plain = copy.deepcopy(model)
    hidden = torch.randn(2, 32)
    with torch.inference_mode():
        handle = attach_offload(model.blocks, policy=OffloadPolicy.block_swap(2, 1), device=CPU)
        assert torch.equal(model(hidden), plain(hidden))
    assert torch.equal(model(hidden), plain(hidden))
    handle.detach()
    handle.detach()


def on_device(gpu: Accelerator, stack: nn.ModuleList) -> OffloadEngine:
    stacks, policy = {"blocks": stack}, OffloadPolicy.layerwise(1)
    return OffloadEngine(stacks, policy=policy, device=gpu.device, source=ModuleSource(stacks))


def test_what_moved_to_another_device_comes_back(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList]
) -> None:
    stack = make_stack(3)
    before = snapshot(stack)
    with on_device(gpu, stack):
        assert stack[0].norm.weight.device == gpu.device
        assert stack[0].step.device == gpu.device
        assert stack[0].up.weight.device.type == "cpu", (
            "what streams is bound to buffers, not moved"
        )
    assert snapshot(stack) == before


def test_what_moved_in_inference_mode_is_an_ordinary_tensor(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList]
) -> None:
    stack = make_stack(1)
    with torch.inference_mode(), on_device(gpu, stack):
        moved = {
            name: tensor for name, tensor in stack.named_parameters() if tensor.device == gpu.device
        }
        assert "0.norm.weight" in moved
        assert [name for name, tensor in moved.items() if tensor.is_inference()] == []


@pytest.mark.parametrize("missing_in", ["source", "module"])
def test_a_source_that_does_not_fit_the_last_block_leaves_the_others_alone(
    make_stack: Callable[..., nn.ModuleList], missing_in: str
) -> None:
    stack, other = make_stack(3), make_stack(3)
    (other if missing_in == "source" else stack)[2].up = nn.Identity()
    if missing_in == "source":  # only a weight without data needs the source
        stack[2].up.to("meta")
    before = snapshot(stack)
    with pytest.raises(ValueError, match=r"block 2 of 'blocks'.*up\.weight"):
        attach_offload(
            stack,
            policy=OffloadPolicy.layerwise(1),
            device="cpu",
            source=ModuleSource({"blocks": list(other)}),
        )
    assert snapshot(stack) == before


def test_a_block_out_of_turn_after_a_failed_last_block_is_told(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    stack = make_stack(2)
    with attach_offload(stack, policy=OffloadPolicy.layerwise(1), device=CPU):
        stack[0](torch.ones(1, 32))
        with pytest.raises(RuntimeError, match=r"shape|size"):
            stack[1](torch.ones(1, 31))
        with pytest.raises(StateError):
            stack[1](torch.ones(1, 32))


def test_passes_while_a_run_is_going_on_are_refused_and_leave_no_trace(
    make_stack: Callable[..., nn.ModuleList],
) -> None:
    model = Model(make_stack(3))
    plain = copy.deepcopy(model)
    hidden = torch.ones(1, 32)
    with attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device=CPU) as handle:
        with handle.run(step_visits(["blocks"], handle.block_counts)):
            with pytest.raises(RuntimeError, match="already running"), handle.passes(2):
                pass
        assert torch.equal(model(hidden), plain(hidden))
