"""Stream the blocks of a model from its file through three buffers.

    python docs/examples/minimal_streaming.py [DEVICE]

The model is a stack of equal blocks, as in a diffusion transformer. Its matrices stay in a
safetensors file. The engine reads them block by block, while the block before computes. The results
are those of the model in memory, bit by bit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.bench import run_table
from wanstream.offload import attach_offload
from wanstream.offload.formats import FileTensor, read_header, streamed_names
from wanstream.offload.sources import FileSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.schema.text import format_size
from wanstream.telemetry import Recorder

WIDTH = 256
BLOCKS = 8
STEPS = 3
STACK = "model"  # name of the stack of blocks; Wan2.2 has two, "high" and "low"


class Block(nn.Module):
    """Residual block: its two matrices stream, its norm stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + change


def make_model() -> nn.Sequential:
    """Return a model whose weights are all in memory."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).requires_grad_(False)


def open_blocks(path: Path) -> tuple[nn.Sequential, FileSource]:
    """Return the model with its matrices on the meta device, without memory, and their source."""
    # 1. Everything that does not stream is loaded: biases and norms, less than a percent of a real
    # model.
    model = make_model()
    header = read_header(path)
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    for index, block in enumerate(model):
        # 2. The header has the place of every tensor in the file. No weight is read here.
        names = streamed_names(block)
        blocks[BlockKey(STACK, index)] = {name: header.tensors[f"{index}.{name}"] for name in names}
        for name in names:
            linear = block.get_submodule(name.removesuffix(".weight"))
            linear.weight = nn.Parameter(block.get_parameter(name).to("meta"), requires_grad=False)
    return model, FileSource(blocks, computed_dtypes=torch.float32)


def follow_forward(path: Path, hidden: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Stream during the model's own forward: hooks on the blocks call the engine."""
    model, source = open_blocks(path)
    # One buffer computes, two are filled ahead. Leaving the context restores the blocks.
    outputs = []
    with attach_offload(
        {STACK: [*model]}, policy=OffloadPolicy.layerwise(2), device=device, source=source
    ) as engine:
        # One run of several passes: the first blocks of a pass are fetched while the last ones of
        # the pass before it compute.
        with engine.passes(STEPS):
            for _ in range(STEPS):
                hidden = model(hidden)
                outputs.append(hidden)
        print(
            f"{len(engine.buffers)} buffers for {BLOCKS} blocks: {format_size(engine.loaded_bytes)}"
        )
    return outputs


def name_visits(path: Path, hidden: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Stream in a loop of our own, as the sampler does: all visits are known before the run."""
    model, source = open_blocks(path)
    policy = OffloadPolicy.block_swap(BLOCKS - 2)  # two blocks keep their buffers
    recorder = Recorder(hidden.device)
    outputs = []
    with attach_offload(
        {STACK: [*model]}, policy=policy, device=device, source=source, follow_forward=False
    ) as engine:
        visits = step_visits([STACK] * STEPS, engine.block_counts)
        # The transfer program: the order of the bus, with the buffer of each block.
        for fetch in engine.programs(visits).device.fetches[:4]:
            print(
                f"fetch block {fetch.block.block} into buffer {fetch.buffer}, for visit "
                f"{fetch.needed_by}"
            )
        with engine.run(visits, recorder=recorder) as run:
            for step in range(STEPS):
                with recorder.step(step, STACK):
                    for index, block in enumerate(model):
                        with run.visit(step, STACK, index):  # the block has its weights inside
                            hidden = block(hidden)
                outputs.append(hidden)
    print(run_table(recorder.timeline()).text())
    return outputs


def main(device: str = "cpu") -> None:
    plain = make_model().to(device)
    hidden = start = torch.randn(16, WIDTH, device=device)
    expected = []
    for _ in range(STEPS):
        hidden = plain(hidden)
        expected.append(hidden)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(plain.state_dict(), path)
        for stream in (follow_forward, name_visits):
            found = stream(path, start, device)
            assert all(map(torch.equal, found, expected)), stream.__name__
            print(f"{stream.__name__}: equal to the model in memory, bit by bit")


if __name__ == "__main__":
    main(*sys.argv[1:2])
