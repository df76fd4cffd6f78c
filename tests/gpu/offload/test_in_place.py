"""Modules in RAM on a device with streams: page-locked, copied in place, and unlocked again."""

from __future__ import annotations

import copy
import gc
import mmap
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from wanstream.offload import LockedTensors, attach_offload, map_memory
from wanstream.offload.engine.attach import ONLY_STACK
from wanstream.offload.host_memory.in_place import whole_pages
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.streaming import LAYERWISE, attach, plainly, raise_at, stream

WIDTH = 37
BLOCKS = 4
DEEP = OffloadPolicy.layerwise(3)
POLICIES = [DEEP, OffloadPolicy.block_swap(2, 1), OffloadPolicy.layerwise(1, source="pinned")]


def linears(stack: nn.ModuleList) -> list[nn.Linear]:
    return [linear for block in stack for linear in (block.up, block.down)]


def frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def as_they_are(stack: nn.ModuleList, folder: Path) -> None:
    """Neighbouring matrices with odd sizes on the heap."""


def tied(stack: nn.ModuleList, folder: Path) -> None:
    stack[2].up.weight = stack[0].up.weight


def views(stack: nn.ModuleList, folder: Path) -> None:
    """All matrices in one storage, from an odd address on, two of them on the same bytes."""
    matrices = linears(stack)
    storage = torch.empty(1 + sum(linear.weight.nbytes for linear in matrices), dtype=torch.uint8)
    at = 4 - storage.data_ptr() % 4
    for linear in matrices[:-1]:
        size = linear.weight.nbytes
        part = storage[at : at + size].view(torch.float32).view_as(linear.weight)
        linear.weight = frozen(part.copy_(linear.weight))
        at += size
    matrices[-1].weight = frozen(matrices[1].weight.view(-1).view_as(matrices[-1].weight))


def transposed(stack: nn.ModuleList, folder: Path) -> None:
    for block in stack:
        block.up.weight = frozen(block.up.weight.t().contiguous().t())


def mapped(stack: nn.ModuleList, folder: Path) -> None:
    path = folder / "stack.safetensors"
    save_file({name: each.contiguous() for name, each in stack.state_dict().items()}, path)
    stack.load_state_dict(load_file(path), assign=True)
    stack.requires_grad_(False)


KINDS = [as_they_are, tied, views, transposed, mapped]
IN_SLOTS = {transposed, mapped}
"""Kinds to be read into page-locked slots."""


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in whole pages without other tensors."""
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    whole = whole_pages(memory)
    return memory[whole.start : whole.stop]


def run(gpu, stack, engine, hidden, *, stop_at=None) -> torch.Tensor:
    interrupt = raise_at(stop_at)

    def during(visit: int) -> None:
        gpu.delay(int(visit % 3 == 0))
        interrupt(visit)

    with torch.inference_mode():
        return stream(engine, {ONLY_STACK: stack}, [ONLY_STACK] * 2, hidden, during=during)[0]


CASES = [*zip(KINDS, [*POLICIES, *POLICIES[:2]], strict=True)]


@pytest.mark.parametrize(("kind", "policy"), CASES, ids=[kind.__name__ for kind in KINDS])
def test_copies_are_from_locked_memory(gpu, make_stack, tmp_path, kind, policy):
    stack = make_stack(BLOCKS, width=WIDTH)
    hidden = torch.randn(3, WIDTH)
    kind(stack, tmp_path)
    expected = plainly({"": stack}, [""] * 2, hidden)
    on_device = hidden.to(gpu.device)
    weights = [linear.weight for linear in linears(stack)]
    with attach({ONLY_STACK: stack}, policy, device=gpu.device) as engine:
        if gpu.machine is not None:
            gpu.machine.pageable_copies.clear()  # the small tensors stay on the device
        for _ in range(2):
            assert torch.allclose(run(gpu, stack, engine, on_device).cpu(), expected, atol=1e-4)
            with pytest.raises(KeyboardInterrupt):
                run(gpu, stack, engine, on_device, stop_at=1)
        assert (engine.host_bytes > 0) == (kind in IN_SLOTS)
        assert all(gpu.is_locked(inside(weight)) for weight in weights if kind not in IN_SLOTS)
        if gpu.machine is not None:
            assert not gpu.machine.pageable_copies
    assert engine.pinned_bytes == 0
    assert not any(gpu.is_locked(inside(weight)) for weight in weights)


@pytest.mark.parametrize("left", ["detached", "device failed", "dropped"])
def test_memory_is_unlocked_after_an_error(gpu, make_stack, monkeypatch, left):
    machine = gpu.need_fake("it counts locks")
    stack = make_stack(BLOCKS, width=WIDTH)
    hidden = torch.randn(3, WIDTH, device=gpu.device)
    engine = attach({ONLY_STACK: stack}, device=gpu.device)
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
    else:
        del engine, stack  # while copies are under way
        gc.collect()
    assert not machine.locked


def test_nothing_is_locked_if_attaching_fails(gpu, make_stack):
    machine = gpu.need_fake("it counts locks")
    machine.devices[0].fail_at = machine.devices[0].allocations + 3
    with pytest.raises(torch.OutOfMemoryError):
        attach_offload(list(make_stack(BLOCKS)), policy=LAYERWISE, device=gpu.device)
    assert not machine.locked


def test_blocks_beyond_the_lock_limit_are_copied(gpu, make_stack, caplog):
    machine = gpu.need_fake("it has a limit on page locks")
    machine.refuse_locks_beyond = 3 * mmap.PAGESIZE * WIDTH // 4
    stack = make_stack(BLOCKS, width=2 * WIDTH)
    hidden = torch.randn(3, 2 * WIDTH)
    expected = plainly({"": stack}, [""] * 2, hidden)
    with attach({ONLY_STACK: stack}, device=gpu.device) as engine:
        found = run(gpu, stack, engine, hidden.to(gpu.device)).cpu()
        assert torch.allclose(found, expected, atol=1e-4)
        assert 0 < engine.pinned_bytes <= machine.refuse_locks_beyond
    assert [record.message.count("were refused") for record in caplog.records] == [1]


@pytest.mark.parametrize("ends", ["released", "deleted", "refused"])
def test_tensors_that_are_copied_once_are_locked_until_then(gpu, ends, caplog):
    torch.ones(1, device=gpu.device)
    if ends == "refused":
        gpu.need_fake("it has a limit on page locks").refuse_locks_beyond = 0
    tensors = [torch.randn(300, 7), torch.zeros(0), torch.randn(5000).half()]
    tensors.append(torch.arange(11, dtype=torch.uint8))
    locked = LockedTensors(tensors, gpu.runtime)
    places = [inside(tensor) for tensor in tensors if len(inside(tensor))]
    assert len(places) == 2
    assert [gpu.is_locked(place) for place in places] == [ends != "refused"] * 2
    for tensor in tensors:
        assert locked.copy(tensor).cpu().equal(tensor)
    if ends == "released":
        locked.release()
    del locked
    gc.collect()
    assert not any(map(gpu.is_locked, places))
    assert not caplog.records, "a single unlocked copy is worth no warning"


@pytest.mark.parametrize(("kind", "at"), [("blocks", 64), ("once", 0), ("once", 4000)])
def test_tensors_in_the_same_pages_can_be_copied_meanwhile(gpu, make_stack, kind, at):
    """A driver refuses to copy partly locked memory."""
    stack = make_stack(BLOCKS, width=WIDTH)
    storage = map_memory(64 * mmap.PAGESIZE)
    weights = []
    others = []
    for linear in linears(stack):
        end = at + linear.weight.nbytes
        part = storage[at:end].view(torch.float32).view_as(linear.weight)
        linear.weight = frozen(part.copy_(linear.weight))
        weights.append(linear.weight)
        others.append(storage[end : end + 5000])
        at = end + 5000
    with ExitStack() as locks:
        if kind == "blocks":
            engine = locks.enter_context(attach({ONLY_STACK: stack}, DEEP, device=gpu.device))
            run(gpu, stack, engine, torch.randn(3, WIDTH, device=gpu.device))
        else:
            locks.callback(LockedTensors(weights, gpu.runtime).release)
        assert any(gpu.is_locked(inside(weight)) for weight in weights)
        for other in others:
            assert other.to(gpu.device).cpu().equal(other)


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_two_devices_stay_locked_until_both_are_done(gpu, make_stack, first):
    devices = [gpu.device, gpu.other]
    stack = make_stack(BLOCKS, width=WIDTH)
    second = 1 - first
    weights = [linear.weight for linear in linears(stack)]
    stacks = [copy.deepcopy(stack, {id(weight): weight for weight in weights}) for _ in devices]
    engines = [attach({ONLY_STACK: stacks[at]}, device=devices[at]) for at in (0, 1)]
    hidden = torch.randn(3, WIDTH)
    values = dict[int, torch.Tensor]()
    on_devices = [hidden.to(device) for device in devices]
    if gpu.machine is not None:
        gpu.machine.pageable_copies.clear()
    for at in (first, second, first, second):
        values[at] = run(gpu, stacks[at], engines[at], on_devices[at])
    engines[first].detach()
    assert all(gpu.is_locked(inside(weight)) for weight in weights)
    again = run(gpu, stacks[second], engines[second], on_devices[second])
    engines[second].detach()
    assert not any(gpu.is_locked(inside(weight)) for weight in weights)
    for value in values.values():
        assert torch.equal(again.cpu(), value.cpu())
    if gpu.machine is not None:
        assert not gpu.machine.pageable_copies
