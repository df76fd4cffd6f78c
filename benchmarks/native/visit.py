"""Cost of a native model block's visit with our hooks, against a plain call, and of LoRAs.

python benchmarks/native/visit.py

The hooks import ComfyUI: the measurement runs in ComfyUI's Python (`COMFYUI_PATH`,
`COMFYUI_PYTHON`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from comfyui_process import INSIDE, enter_comfyui, run_in_comfyui
from torch import nn

BLOCKS = 40
PASSES = 200
ROUNDS = 5


class Identity(nn.Module):
    """Block with as many streamed matrices as a Wan block, and no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(10))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Model(nn.Module):
    """Diffusion model with such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Identity() for _ in range(BLOCKS)).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@contextmanager
def hooked(policy: Any) -> Iterator[Any]:
    """Yield a function that computes several passes in a run, with a sampler run's hooks."""
    from wanstream.host.comfy.native.runs.hooks import NativeRuns
    from wanstream.host.comfy.native.streamed.weights import STACK
    from wanstream.offload import Lockstep, StackCalls, StreamSession, attach_offload
    from wanstream.telemetry import Recorder

    model = Model()
    device = torch.device("cpu")
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    with attach_offload(
        {STACK: list(blocks.values())}, policy=policy, device=device, follow_forward=False
    ) as engine:
        # These are all the fields of `NativeWeights` that the hooks read.
        weights = SimpleNamespace(
            blocks=blocks,
            stacks={STACK: blocks},
            block_counts=engine.block_counts,
            formats=engine.formats,
            loaded_engine=engine,
        )
        runs = NativeRuns(weights)
        runs.attach({STACK: model})
        recorder = Recorder(device)

        def passes(count: int) -> list[float]:
            session = StreamSession(
                StackCalls(runs.orders, [STACK] * count), lambda: engine, recorder=recorder
            )
            session.begin()
            # As a sampler's run does in the product.
            runs.current = SimpleNamespace(session=session, lockstep=Lockstep(session, device))
            seconds = [_timed(model, recorder, step) for step in range(count)]
            runs.current = None
            session.close()
            # A wrong prediction compiles a second program, and the figures would include the time.
            assert session.recompiled == 0
            return seconds

        yield passes


def _timed(model: Model, recorder: Any = None, step: int = 0) -> float:
    """Return the seconds per block in one pass."""
    hidden = torch.ones(1)
    with ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(recorder.step(step, "model"))
        began = time.perf_counter()
        model(hidden)
        return (time.perf_counter() - began) / BLOCKS


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds per block, for plain calls and for visits under two policies."""
    from wanstream.schema import OffloadPolicy

    plain = Model()
    found = {}
    kept = hooked(OffloadPolicy.resident())
    fetched = hooked(OffloadPolicy.layerwise(1))
    with torch.inference_mode(), kept as resident, fetched as streamed:
        # By turns: a change of the machine's speed then shows in all of them.
        rounds = [
            ([_timed(plain) for _ in range(PASSES)], resident(PASSES)[1:], streamed(PASSES)[1:])
            for _ in range(ROUNDS)
        ]
    names = ("plain call", "resident visit", "streamed visit")
    for name, seconds in zip(names, zip(*rounds, strict=True), strict=True):
        micro = [value * 1e6 for each in seconds for value in each]
        found[name] = {"median": round(statistics.median(micro), 2), "min": round(min(micro), 2)}
    return found


WIDTH = 1024
RANK = 32
TOKENS = 256
LORA_BLOCKS = 6
LORA_PASSES = 6


def measure_loras() -> dict[str, dict[str, float]]:
    """Return milliseconds per visit to a streamed block by dtype, without and with LoRAs.

    The block has four matrices, each with a LoRA.
    """
    import comfy.lora
    import comfy.model_patcher
    import comfy.ops
    import comfy.weight_adapter

    from wanstream.offload import BlockPatch, WeightPatch, attach_offload
    from wanstream.plan.programs import BlockKey
    from wanstream.schema import OffloadPolicy

    def seconds(dtype: torch.dtype, way: str) -> float:
        linear = comfy.ops.disable_weight_init.Linear
        blocks = nn.ModuleList(
            nn.Sequential(*(linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(4)))
            for _ in range(LORA_BLOCKS)
        ).requires_grad_(False)
        up, down = (torch.randn(shape) * 0.01 for shape in ((WIDTH, RANK), (RANK, WIDTH)))
        adapter = comfy.weight_adapter.LoRAAdapter(set(), (up, down, None, None, None, None))
        for layer in blocks.modules():
            if isinstance(layer, linear):
                layer.weight.normal_()
                if way == "in each layer":
                    patches = {"key": [(1.0, adapter, 1.0, None, None)]}
                    layer.weight_function = [comfy.model_patcher.LowVramPatch("key", patches)]
        policy = OffloadPolicy.layerwise(1)
        hidden = torch.ones(1, TOKENS, WIDTH, dtype=dtype)
        with attach_offload(blocks, policy=policy, device="cpu") as engine:
            if way == "on arrival":
                weights = {f"{index}.weight": WeightPatch(up=up, down=down) for index in range(4)}
                keys = [BlockKey("blocks", index) for index in range(LORA_BLOCKS)]
                engine.set_patches({key: BlockPatch(identity=key, weights=weights) for key in keys})
            times = []
            with engine.passes(LORA_PASSES):
                for _ in range(LORA_PASSES):
                    began = time.perf_counter()
                    for block in blocks:
                        block(hidden)
                    times.append((time.perf_counter() - began) / LORA_BLOCKS)
        # The first pass starts with a cold block.
        return statistics.median(times[1:])

    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            ways = ("none", "in each layer", "on arrival")
            rounds = [
                {way: seconds(dtype, way) for way in ways} for _ in range(3)
            ]  # by turns, as above
            found[name] = {
                way: round(1e3 * statistics.median(each[way] for each in rounds), 2) for way in ways
            }
    return found


def in_comfyui() -> None:
    """Measure in this process, and print the figures and versions."""
    versions = enter_comfyui()
    torch.set_num_threads(1)
    figures = {
        "microseconds_per_block": measure(),
        "milliseconds_per_visit_with_loras": measure_loras(),
    }
    print(json.dumps({"figures": figures, "versions": versions}))


def main() -> None:
    from wanstream.bench.results import versions
    from wanstream.benchmarks.record import record

    measured = run_in_comfyui(__file__)
    method = (
        f"{BLOCKS} blocks that return their input, with 10 matrices of 8 x 8 each, called by the "
        "model's forward: without hooks, with hooks and all blocks resident, with hooks and one "
        f"block fetched ahead from RAM; recorder on; {ROUNDS} rounds of {PASSES} passes each, by "
        "turns in one process, without the first pass of a run. With LoRAs: streamed blocks of 4 "
        f"matrices of {WIDTH} x {WIDTH}, {TOKENS} tokens, rank {RANK}, added by ComfyUI's function "
        "in each layer and pass, or by the engine when the block arrives in its buffer"
    )
    found = {**versions(libraries=()), **measured["versions"]}
    path = record("native-visit", method=method, figures=measured["figures"], versions=found)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    in_comfyui() if INSIDE in sys.argv else main()
