"""Run of a diffusion model from a file: blocks, sizes and costs from the header."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..plan import BlockCosts, Machine, RunCosts, StepCosts
from ..plan.programs import BlockSize
from ..schema import SMALLEST_BLOCK, SMALLEST_LAYER
from ..schema.text import format_size

if TYPE_CHECKING:
    from ..offload.formats import FileTensor

STACK = "model"
CHECKPOINT_PREFIX = "model.diffusion_model."
"""Prefix for the diffusion model in a file with a text encoder and a VAE."""
PIXELS_PER_TOKEN, FRAMES_PER_TOKEN = 16, 4
"""Pixels along each side, and frames, per token in most models."""
COMPUTED_BYTES = 2
"""Bytes per bf16 value."""
LARGE_STACK = 1_000_000
"""Least bytes for a parameter to stream if it has more dimensions than a matrix."""
LIVE_STATES = 6
"""Hidden states of all tokens alive in a block next to the feed-forward."""


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """Matrices in one block of a file."""

    sizes: BlockSize
    decodes: bool
    """True for a block decoded on arrival (GGUF)."""
    parameters: int
    int8_parameters: int
    width: int
    """Values per token."""
    hidden: int
    """Values per token in the widest matrix."""


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """Blocks of a diffusion model in a file, and the bytes of all other tensors."""

    path: Path
    blocks: tuple[FileBlock, ...]
    outside_bytes: int

    def describe(self) -> str:
        """Describe the file in one line."""
        in_blocks = sum(block.sizes.file for block in self.blocks)
        sizes = Counter(block.sizes.file for block in self.blocks)
        groups = ", ".join(f"{count} of {format_size(size)}" for size, count in sizes.items())
        total = in_blocks + self.outside_bytes
        return (
            f"{self.path.name}: {format_size(total)}, {in_blocks / total:.1%} in blocks that "
            f"stream ({groups})"
        )


def read_model_file(path: Path) -> ModelFile:
    """Return a diffusion model's blocks from the file header.

    Blocks are the children of the outermost lists, by the numbers in tensor names. Raises
    CheckpointFileError: the file cannot be read, or has no blocks.
    """
    # Here, because planning without a file needs no torch.
    from ..offload.formats import CheckpointFileError, read_gguf_header, read_header

    header = read_gguf_header(path) if path.suffix == ".gguf" else read_header(path)
    tensors = header.tensors
    of_model = [name for name in tensors if name.startswith(CHECKPOINT_PREFIX)]
    # A whole checkpoint also has a text encoder and a VAE, with lists of blocks.
    if of_model:
        tensors = {name: tensors[name] for name in of_model}
    lists: dict[str, list[FileTensor]] = {}
    layers = []
    for name, tensor in tensors.items():
        place = _list_place(name)
        # Vectors and small convolutions stay outside the blocks.
        if len(tensor.shape) < 2 or (len(tensor.shape) > 2 and tensor.nbytes < LARGE_STACK):
            continue
        if place is not None:
            lists.setdefault(place, []).append(tensor)
        elif len(tensor.shape) == 2 and COMPUTED_BYTES * math.prod(tensor.shape) >= SMALLEST_LAYER:
            layers.append([tensor])
    blocks = [
        _block(matrices)
        for matrices in lists.values()
        if sum(matrix.nbytes for matrix in matrices) >= SMALLEST_BLOCK
    ]
    # Single layers stream only next to blocks.
    if blocks:
        blocks += map(_block, layers)
    else:
        raise CheckpointFileError(
            path, f"has no list of blocks from {format_size(SMALLEST_BLOCK)} on to stream"
        )
    total = sum(tensor.nbytes for tensor in tensors.values())
    in_blocks = sum(block.sizes.file for block in blocks)
    return ModelFile(path=path, blocks=tuple(blocks), outside_bytes=total - in_blocks)


def _list_place(name: str) -> str | None:
    """Return the place of a tensor's block in the outermost list; None outside the lists.

    A numbered layer has tensors directly after its number. It is part of a sequence and not a
    block.
    """
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: at + 1]) if len(parts) - at > 2 else None


def _block(matrices: Sequence[FileTensor]) -> FileBlock:
    stored = sum(matrix.nbytes for matrix in matrices)
    computed = 0
    parameters = Counter[str]()
    for matrix in matrices:
        values = math.prod(matrix.shape)
        # The dtype is compared as text, so this module need not import torch.
        dtype = str(matrix.dtype)
        if dtype == "torch.uint8" and matrix.packing is None:
            values *= 2  # 4 bits each
        parameters[dtype] += values
        if matrix.packing is not None or matrix.dtype.itemsize > COMPUTED_BYTES:
            computed += values * COMPUTED_BYTES
        else:
            computed += matrix.nbytes
    # Most matrices read the hidden state, so the most frequent width is its size.
    # Linear weights are (out features, in features).
    widths = Counter(matrix.shape[1] for matrix in matrices)
    return FileBlock(
        # File and RAM bytes are equal, because nothing is quantised on the way.
        sizes=BlockSize(stored, stored, computed),
        decodes=any(matrix.packing is not None for matrix in matrices),
        parameters=parameters.total(),
        int8_parameters=parameters["torch.int8"],
        width=widths.most_common(1)[0][0],
        hidden=max(matrix.shape[0] for matrix in matrices),
    )


@dataclass(frozen=True, kw_only=True)
class FileRun:
    """`RunModel` for a model file: some steps with `lanes` lanes and `tokens` tokens each.

    Operations are counted from the matrices and one attention over all tokens in each block.
    """

    model: ModelFile
    tokens: int
    lanes: int
    steps: tuple[int, ...]
    """Step numbers."""

    @property
    def blocks(self) -> BlockCosts:
        """Block bytes."""
        sizes = [block.sizes for block in self.model.blocks]
        return BlockCosts(
            stacks=(STACK,),
            blocks=len(sizes),
            file_bytes=max(size.file for size in sizes),
            stored_bytes=max(size.stored for size in sizes),
            computed_bytes=max(size.computed for size in sizes),
            decoded_bytes=max(
                (block.sizes.stored for block in self.model.blocks if block.decodes), default=0
            ),
            outside_bytes=self.model.outside_bytes,
            sizes=tuple(sizes),
        )

    @property
    def chunks(self) -> Sequence[int]:
        """Return no numbers: chunks are for the feed-forwards of some models only."""
        return ()

    def costs(self, machine: Machine, chunk_tokens: int | None = None) -> RunCosts:
        """Return the costs on `machine`; see `RunModel`."""
        blocks = self.blocks
        operations = [self._operations(block, machine) for block in self.model.blocks]
        visit_s = self.lanes * max(operations) / machine.flops_per_s
        shares = tuple(each / max(operations) for each in operations)
        step = StepCosts(expert=STACK, visit_s=visit_s)
        widest = max(LIVE_STATES * block.width + 2 * block.hidden for block in self.model.blocks)
        return RunCosts(
            blocks=blocks,
            steps=(step,) * len(self.steps),
            hardware=replace(blocks.hardware(machine, {STACK: visit_s}), visit_shares=shares),
            has_bus=machine.has_bus,
            working_bytes=self.lanes * self.tokens * widest * COMPUTED_BYTES,
            at_once=f"{self.tokens} tokens",
            arithmetic=self.describe_arithmetic(machine),
        )

    def _operations(self, block: FileBlock, machine: Machine) -> float:
        """Return the operations for one lane, in the time of operations in the compute dtype."""
        others = block.parameters - block.int8_parameters
        linear = others + block.int8_parameters / machine.block.linear_speedup("int8")
        # Attention multiplies queries by keys, and scores by values.
        return 2 * linear * self.tokens + 4 * self.tokens**2 * block.width

    def of_steps(self, steps: Sequence[int]) -> FileRun:
        """Return the run with these steps alone; see `RunModel`."""
        return replace(self, steps=tuple(self.steps[step] for step in steps))

    def calibrated(self, machine: Machine, visit_s: float, chunk_tokens: int | None) -> Machine:
        """Return `machine` with the rate from a measured visit; see `RunModel`."""
        hardware = self.costs(machine, chunk_tokens).hardware
        expected_s = hardware.visit_s[STACK] * sum(hardware.visit_shares) / len(self.model.blocks)
        return machine.with_figures(flops_per_s=machine.flops_per_s * expected_s / visit_s)

    def describe_arithmetic(self, machine: Machine) -> str:
        """Describe the size of the model's inputs, and the dtype of products."""
        dtype = "bf16"
        if any(block.int8_parameters for block in self.model.blocks):
            speedup = machine.block.linear_speedup("int8")
            dtype = f"int8 at {speedup:.1f} x the rate of bf16"
        return f"{self.lanes} x {self.tokens} tokens, multiplied in {dtype}"


def tokens_of(size: str) -> int | None:
    """Return the tokens in `WIDTHxHEIGHT` or `WIDTHxHEIGHTxFRAMES`; None for another text."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", size.strip().lower())
    if found is None:
        return None
    width, height, frames = (int(each or 1) for each in found.groups())
    if not width * height * frames:
        return None
    across, down = (math.ceil(side / PIXELS_PER_TOKEN) for side in (width, height))
    # As in Wan's VAE, the first frame has its own tokens, and every 4 further frames share theirs.
    return across * down * (math.ceil((frames - 1) / FRAMES_PER_TOKEN) + 1)
