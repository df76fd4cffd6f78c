"""Two stacks of small blocks streamed through an engine, and the plain stacks' results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from wanstream.offload import BlockPatch, OffloadEngine, attach_offload
from wanstream.offload.engine.run import EngineRun
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy

CPU = torch.device("cpu")
BLOCKS = 6
WIDTH = 32
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ("high", "low")
ONES = torch.ones(1, WIDTH)
LAYERWISE = OffloadPolicy.layerwise(1)
IN_RAM = OffloadPolicy.layerwise(1, source="pinned")

Stacks = Mapping[str, Sequence[nn.Module]]


class Model(nn.Module):
    """A model with its own forward through one stack."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return plainly({"": self.blocks}, [""], hidden)


def keys(expert: str, *blocks: int) -> set[BlockKey]:
    """Return the keys of some blocks of an expert."""
    return {BlockKey(expert, block) for block in blocks}


def attach(stacks: Stacks, policy: OffloadPolicy = LAYERWISE, **how: Any) -> OffloadEngine:
    """Attach an engine that follows no forward, to a CPU by default."""
    return attach_offload(stacks, policy=policy, follow_forward=False, **{"device": CPU, **how})


def plainly(stacks, steps=STEPS, value=ONES) -> torch.Tensor:
    """Return the result of whole stacks. An attached stack has no weights: call this before."""
    for name in steps:
        for block in stacks[name]:
            value = block(value)
    return value


def patched(stacks, patches: Mapping[BlockKey, BlockPatch]) -> dict[str, nn.ModuleList]:
    """Return a copy with the patches added to the weights."""
    stacks = copy.deepcopy(stacks)
    for key, block in patches.items():
        for name, weight in block.weights.items():
            matrix = stacks[key.expert][key.block].get_parameter(name)
            if weight.full is not None:
                matrix.copy_(matrix + weight.full.to(matrix.dtype))
            if weight.up is not None:
                up = weight.up.to(matrix.dtype)
                matrix.copy_(torch.addmm(matrix, up, weight.down.to(matrix.dtype)))
    return stacks


def raise_at(number: int | None, error: BaseException | None = None) -> Callable[[int], None]:
    """Return a callback that raises an error, by default an interrupt, in one visit."""

    def during(visit: int) -> None:
        if visit == number:
            raise error or KeyboardInterrupt

    return during


def stream(engine, stacks, steps=STEPS, value=ONES, *, during=lambda visit: None, recorder=None):
    """Stream whole steps with `during(number)` in each visit. Return the result and the run."""
    number = 0
    with engine.run(step_visits(steps, engine.block_counts), recorder) as run:
        for step, name in enumerate(steps):
            with nullcontext() if recorder is None else recorder.step(step, name):
                for index, block in enumerate(stacks[name]):
                    with run.visit(step, name, index):
                        during(number)
                        value = block(value)
                    number += 1
    return value, run


def fetched(run: EngineRun) -> list[BlockKey]:
    """Return the blocks that a run has fetched, in order."""
    return [fetch.block for fetch in run.fetched]
