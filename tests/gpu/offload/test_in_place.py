"""Modules in RAM on a device with streams: page-locked, copied in place, and unlocked again."""

from __future__ import annotations

import copy
import gc
import mmap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from wanstream.offload import LockedTensors, OffloadEngine, attach_offload, map_memory
from wanstream.offload.engine.attach import ONLY_STACK
from wanstream.offload.host_memory.in_place import whole_pages
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator

WIDTH, BLOCKS = 37, 4
LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = [
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(2, 1),
    OffloadPolicy.layerwise(1, source="pinned"),
]


def as_they_are(stack: nn.ModuleList, folder: Path) -> None:
    """Neighbouring matrices with odd sizes on the heap."""


def tied(stack: nn.ModuleList, folder: Path) -> None:
    stack[2].up.weight = stack[0].up.weight


def views(stack: nn.ModuleList, folder: Path) -> None:
    """All matrices in one storage, from an odd address on, two of them on the same bytes."""
    matrices = [linear for block in stack for linear in (block.up, block.down)]
    storage = torch.empty(
        1 + sum(4 * linear.weight.numel() for linear in matrices), dtype=torch.uint8
    )
    at = 4 - storage.data_ptr() % 4
    for linear in matrices[:-1]:
        part = (
            storage[at : at + 4 * linear.weight.numel()].view(torch.float32).view_as(linear.weight)
        )
        linear.weight = nn.Parameter(part.copy_(linear.weight), requires_grad=False)
        at += 4 * part.numel()
    first, last = matrices[1], matrices[-1]
    last.weight = nn.Parameter(first.weight.view(-1).view_as(last.weight), requires_grad=False)


def transposed(stack: nn.ModuleList, folder: Path) -> None:
    for block in stack:
        block.up.weight = nn.Parameter(block.up.weight.t().contiguous().t(), requires_grad=False)


def mapped(stack: nn.ModuleList, folder: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in stack.state_dict().items()},
        folder / "stack.safetensors",
    )
    stack.load_state_dict(load_file(folder / "stack.safetensors"), assign=True)
    stack.requires_grad_(False)


KINDS = {
    "heap": as_they_are,
    "tied": tied,
    "views": views,
    "transposed": transposed,
    "mapped": mapped,
}
IN_SLOTS = {"transposed", "mapped"}
"""Kinds to be read into page-locked slots."""


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in whole pages without other tensors."""
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    whole = whole_pages(memory)
    return memory[whole.start : whole.stop]


def run(
    gpu: Accelerator,
    stack: nn.ModuleList,
    engine: OffloadEngine,
    hidden: torch.Tensor,
    *,
    stop_at: int | None = None,
) -> torch.Tensor:
    with (
        torch.inference_mode(),
        engine.run(step_visits([ONLY_STACK] * 2, engine.block_counts)) as active,
    ):
        for number, visit in enumerate(active.program.visits):
            with active.visit(*visit):
                gpu.delay(int(number % 3 == 0))
                hidden = stack[visit.block](hidden)
                if number == stop_at:
                    raise KeyboardInterrupt
    return hidden


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_copy_is_from_locked_memory_which_is_unlocked_on_detach(
    gpu: Accelerator,
    make_stack: Callable[..., nn.ModuleList],
    tmp_path: Path,
    kind: str,
    policy: OffloadPolicy,
) -> None:
    stack = make_stack(BLOCKS, width=WIDTH)
    KINDS[kind](stack, tmp_path)
    hidden = torch.randn(3, WIDTH)
    on_device, on_cpu = hidden.to(gpu.device), hidden
    with torch.inference_mode():
        for block in [*stack, *stack]:
            on_cpu = block(on_cpu)
    weights = [linear.weight for block in stack for linear in (block.up, block.down)]
    with attach_offload(
        list(stack), policy=policy, device=gpu.device, follow_forward=False
    ) as engine:
        if gpu.machine is not None:
            gpu.machine.pageable_copies.clear()  # the small tensors stay on the device
        for _ in range(2):
            assert torch.allclose(run(gpu, stack, engine, on_device).cpu(), on_cpu, atol=1e-4)
            with pytest.raises(KeyboardInterrupt):
                run(gpu, stack, engine, on_device, stop_at=1)
        assert (engine.host_bytes > 0) == (kind in IN_SLOTS)
        assert all(gpu.is_locked(inside(weight)) for weight in weights if kind not in IN_SLOTS)
        if gpu.machine is not None:
            assert not gpu.machine.pageable_copies
    assert engine.pinned_bytes == 0
    assert not any(gpu.is_locked(inside(weight)) for weight in weights)


@pytest.mark.parametrize("left", ["detached", "device failed", "dropped", "not attached"])
def test_memory_is_unlocked_after_an_error(
    gpu: Accelerator,
    make_stack: Callable[..., nn.ModuleList],
    monkeypatch: pytest.MonkeyPatch,
    left: str,
) -> None:
    machine = gpu.need_fake("it counts locks")
    stack = make_stack(BLOCKS, width=WIDTH)
    hidden = torch.randn(3, WIDTH, device=gpu.device)
    if left == "not attached":
        machine.devices[0].fail_at = machine.devices[0].allocations + 3
        with pytest.raises(torch.OutOfMemoryError):
            attach_offload(list(stack), policy=LAYERWISE, device=gpu.device)
        assert not machine.locked
        return
    engine = attach_offload(list(stack), policy=LAYERWISE, device=gpu.device, follow_forward=False)
    with pytest.raises(KeyboardInterrupt):
        run(gpu, stack, engine, hidden, stop_at=2)
    assert machine.locked
    if left == "detached":
        engine.detach()
    elif left == "device failed":
        engine.backend.settle()

        def fail() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(engine.backend, "settle", fail)
        with pytest.raises(RuntimeError, match="launch failure"):
            engine.detach()
        engine.detach()
        assert engine.loaded_bytes == engine.host_bytes == 0
        assert stack[0].up.weight.numel(), "the block is restored"
    else:
        del engine, stack  # while copies are under way
        gc.collect()
    assert not machine.locked


def test_beyond_the_limit_blocks_are_copied_unlocked_with_one_warning(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList], caplog: pytest.LogCaptureFixture
) -> None:
    machine = gpu.need_fake("it has a limit on page locks")
    machine.refuse_locks_beyond = 3 * mmap.PAGESIZE * WIDTH // 4
    stack = make_stack(BLOCKS, width=2 * WIDTH)
    hidden = torch.randn(3, 2 * WIDTH)
    expected = hidden
    for block in [*stack, *stack]:
        expected = block(expected)
    with attach_offload(
        list(stack), policy=LAYERWISE, device=gpu.device, follow_forward=False
    ) as engine:
        assert torch.allclose(
            run(gpu, stack, engine, hidden.to(gpu.device)).cpu(), expected, atol=1e-4
        )
        assert 0 < engine.pinned_bytes <= machine.refuse_locks_beyond
    assert [record.message.count("were refused") for record in caplog.records] == [1]


def test_tensors_that_are_copied_once_are_copied_unlocked_without_a_warning(
    gpu: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.need_fake("it has a limit on page locks").refuse_locks_beyond = 0
    tensors = [torch.randn(5000), torch.randn(300)]
    locked = LockedTensors(tensors, gpu.runtime)
    assert all(locked.copy(tensor).cpu().equal(tensor) for tensor in tensors)
    assert not caplog.records


def test_two_engines_share_the_pages_of_tied_weights(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList]
) -> None:
    first, second = make_stack(2, seed=1, width=WIDTH), make_stack(2, seed=2, width=WIDTH)
    second[1].up.weight = first[0].up.weight
    tied = inside(first[0].up.weight)
    hidden = torch.randn(3, WIDTH, device=gpu.device)
    engines = [
        attach_offload(list(stack), policy=LAYERWISE, device=gpu.device, follow_forward=False)
        for stack in (first, second)
    ]
    for engine, stack in zip(engines, (first, second), strict=True):
        run(gpu, stack, engine, hidden)
    engines[0].detach()
    assert gpu.is_locked(tied)
    run(gpu, second, engines[1], hidden)
    engines[1].detach()
    assert not gpu.is_locked(tied)


@pytest.mark.parametrize("ends", ["released", "deleted"])
def test_tensors_that_are_copied_once_are_locked_until_then(gpu: Accelerator, ends: str) -> None:
    torch.ones(1, device=gpu.device)
    tensors = [
        torch.randn(300, 7),
        torch.zeros(0),
        torch.arange(11, dtype=torch.uint8),
        torch.randn(5000).half(),
    ]
    locked = LockedTensors(tensors, gpu.runtime)
    places = [inside(tensor) for tensor in tensors if len(inside(tensor))]
    assert len(places) == 2
    assert all(map(gpu.is_locked, places))
    for tensor in tensors:
        assert locked.copy(tensor).cpu().equal(tensor)
    if ends == "released":
        locked.release()
    del locked
    gc.collect()
    assert not any(map(gpu.is_locked, places))


@pytest.mark.parametrize("at", [0, 64, 4000])
@pytest.mark.parametrize("kind", ["blocks", "once"])
def test_tensors_in_the_same_pages_can_be_copied_meanwhile(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList], kind: str, at: int
) -> None:
    """A driver refuses to copy partly locked memory."""
    stack, storage = make_stack(BLOCKS, width=WIDTH), map_memory(64 * mmap.PAGESIZE)
    weights, others = [], []
    for linear in (each for block in stack for each in (block.up, block.down)):
        nbytes = linear.weight.nbytes
        part = storage[at : at + nbytes].view(torch.float32).view_as(linear.weight)
        linear.weight = nn.Parameter(part.copy_(linear.weight), requires_grad=False)
        weights.append(linear.weight)
        others.append(storage[at + nbytes : at + nbytes + 5000])
        at += nbytes + 5000
    with ExitStack() as locks:
        if kind == "blocks":
            engine = attach_offload(
                list(stack), policy=POLICIES[0], device=gpu.device, follow_forward=False
            )
            run(gpu, stack, locks.enter_context(engine), torch.randn(3, WIDTH, device=gpu.device))
        else:
            locks.callback(LockedTensors(weights, gpu.runtime).release)
        assert any(gpu.is_locked(inside(weight)) for weight in weights)
        for other in others:
            assert other.to(gpu.device).cpu().equal(other)


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_that_two_devices_copy_stay_locked_until_both_are_done(
    gpu: Accelerator, make_stack: Callable[..., nn.ModuleList], first: int
) -> None:
    devices = [gpu.device, gpu.other]
    stack = make_stack(BLOCKS, width=WIDTH)
    weights = [linear.weight for block in stack for linear in (block.up, block.down)]
    stacks = [copy.deepcopy(stack, {id(weight): weight for weight in weights}) for _ in devices]
    hidden, values = torch.randn(3, WIDTH), dict[torch.device, torch.Tensor]()
    engines = [
        attach_offload(list(each), policy=LAYERWISE, device=device, follow_forward=False)
        for each, device in zip(stacks, devices, strict=True)
    ]
    on_devices = [hidden.to(device) for device in devices]
    if gpu.machine is not None:
        gpu.machine.pageable_copies.clear()
    for at in (first, 1 - first, first, 1 - first):
        values[devices[at]] = run(gpu, stacks[at], engines[at], on_devices[at])
    engines[first].detach()
    assert all(gpu.is_locked(inside(weight)) for weight in weights)
    again = run(gpu, stacks[1 - first], engines[1 - first], on_devices[1 - first])
    engines[1 - first].detach()
    assert not any(gpu.is_locked(inside(weight)) for weight in weights)
    assert torch.equal(again.cpu(), values[gpu.device].cpu())
    assert torch.equal(again.cpu(), values[gpu.other].cpu())
    if gpu.machine is not None:
        assert not gpu.machine.pageable_copies
