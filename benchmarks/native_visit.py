"""Cost of one visit of a native model's block by our hooks, compared with a plain call of the block; and of LoRAs.

python benchmarks/native_visit.py

The hooks import ComfyUI: the measurement runs in ComfyUI's Python (`COMFYUI_PATH`, `COMFYUI_PYTHON`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

BLOCKS, PASSES, ROUNDS = 40, 200, 5
ROOT = Path(__file__).parent.parent
INSIDE = "--in-comfyui"


class Identity(nn.Module):
    """Block with as many streamed matrices as a Wan block, and no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(10))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Model(nn.Module):
    """Diffusion model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Identity() for _ in range(BLOCKS)).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@contextmanager
def hooked(policy: Any) -> Iterator[Any]:
    """Yield a function that computes a number of passes in a run, with the hooks of a sampler's run."""
    from wanstream.host.comfy.native.hooks import NativeRuns
    from wanstream.host.comfy.native.weights import STACK
    from wanstream.offload import ForwardCourse, Lockstep, attach_offload
    from wanstream.telemetry import Recorder

    model, device = Model(), torch.device("cpu")
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    with attach_offload({STACK: list(blocks.values())}, policy=policy, device=device, follow_forward=False) as engine:
        runs = NativeRuns(SimpleNamespace(blocks=blocks, loaded_engine=engine))
        runs.attach(model)
        recorder = Recorder(device)

        def passes(count: int) -> list[float]:
            course = ForwardCourse(engine, runs.orders)
            course.begin(count, recorder)
            runs.current = SimpleNamespace(course=course, lockstep=Lockstep(course, device))
            seconds = [_timed(model, recorder, step) for step in range(count)]
            runs.current = None
            course.close()
            assert course.recompiled == 0
            return seconds

        yield passes


def _timed(model: Model, recorder: Any = None, step: int = 0) -> float:
    """Return the seconds per block of one pass."""
    hidden = torch.ones(1)
    with ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(recorder.step(step, "model"))
        began = time.perf_counter()
        model(hidden)
        return (time.perf_counter() - began) / BLOCKS


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds per block, of plain calls and of visits under two policies."""
    from wanstream.schema import OffloadPolicy

    plain, found = Model(), {}
    kept, fetched = hooked(OffloadPolicy.resident()), hooked(OffloadPolicy.layerwise(1))
    with torch.inference_mode(), kept as resident, fetched as streamed:
        # By turns: a change of the machine's speed then shows in all of them.
        rounds = [
            ([_timed(plain) for _ in range(PASSES)], resident(PASSES)[1:], streamed(PASSES)[1:]) for _ in range(ROUNDS)
        ]
    names = ("plain call", "resident visit", "streamed visit")
    for name, seconds in zip(names, zip(*rounds, strict=True), strict=True):
        micro = [value * 1e6 for each in seconds for value in each]
        found[name] = {"median": round(statistics.median(micro), 2), "min": round(min(micro), 2)}
    return found


WIDTH, RANK, TOKENS, LORA_BLOCKS, LORA_PASSES = 1024, 32, 256, 6, 6


def measure_loras() -> dict[str, dict[str, float]]:
    """Return milliseconds per visit of a streamed block of four matrices without and with a LoRA on each, by dtype."""
    import comfy.lora
    import comfy.model_patcher
    import comfy.ops
    import comfy.weight_adapter

    from wanstream.offload import BlockPatch, WeightPatch, attach_offload
    from wanstream.plan import BlockKey
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
        policy, hidden = OffloadPolicy.layerwise(1), torch.ones(1, TOKENS, WIDTH, dtype=dtype)
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
        return statistics.median(times[1:])

    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            ways = ("none", "in each layer", "on arrival")
            rounds = [{way: seconds(dtype, way) for way in ways} for _ in range(3)]  # by turns, as above
            found[name] = {way: round(1e3 * statistics.median(each[way] for each in rounds), 2) for way in ways}
    return found


def in_comfyui() -> None:
    """Measure in this process, and print the figures and versions."""
    sys.argv, sys.path[:0] = ["main.py", "--cpu"], ["."]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfyui_version

    import nodes  # noqa: F401 - in the order in which ComfyUI imports

    spec = spec_from_file_location("wanstream", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["wanstream"] = pack = module_from_spec(spec)
    spec.loader.exec_module(pack)
    torch.set_num_threads(1)
    figures = {"microseconds_per_block": measure(), "milliseconds_per_visit_with_loras": measure_loras()}
    versions = {"torch": str(torch.__version__), "comfyui": comfyui_version.__version__}
    print(json.dumps({"figures": figures, "versions": versions}))


def main() -> None:
    from record import record

    from wanstream.bench.results import versions
    from wanstream.tools.comfyui import find_comfyui

    comfyui = find_comfyui()
    command = [str(comfyui.python), str(Path(__file__).resolve()), INSIDE]
    done = subprocess.run(
        command, cwd=comfyui.path, env=comfyui.environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    method = (
        f"{BLOCKS} blocks that return their input, with 10 matrices of 8 x 8 each, called by the model's forward: "
        "without hooks, with hooks and all blocks resident, with hooks and one block fetched ahead from RAM; recorder "
        f"on; {ROUNDS} rounds of {PASSES} passes each, by turns in one process, without the first pass of a run. With "
        f"LoRAs: streamed blocks of 4 matrices of {WIDTH} x {WIDTH}, {TOKENS} tokens, rank {RANK}, added by ComfyUI's "
        "function in each layer and pass, or by the engine when the block arrives in its buffer"
    )
    found = {**versions(libraries=()), **measured["versions"]}
    path = record("native-visit", method=method, figures=measured["figures"], versions=found)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    in_comfyui() if INSIDE in sys.argv else main()
