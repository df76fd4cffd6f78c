"""Compiled Wan block forwards. One graph serves the blocks of both experts.

The compiled function takes the block as an argument, so the weights are graph inputs. Another
block, expert, buffer, LoRA or run needs no new graph. Another dtype, attention kernel or token
count, and per-frame timesteps, need one. The graph for the second token count serves any count.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .nag import Texts
from .per_frame_timestep import FrameModulation

ROWS_DIM = 0
"""Variable dimension of the modulation rows [R, 6, D]: one row per distinct frame timestep."""
TEXT_LENGTH_DIM = 1
"""Variable dimension of the text [1, L, D], with the prompt length."""

logger = logging.getLogger("wanstream.kernels")


class BlockCompiler:
    """`torch.compile` backend that counts graphs. Get it from `get_compiler`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0
        """Number of block graphs compiled by this process so far."""

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
    ) -> Callable[..., Any]:
        compile_graph = torch._dynamo.lookup_backend(self.name)
        start = time.perf_counter()
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        self.graphs += 1
        logger.info(
            "%s compiled the blocks in %.1f s (graph %d)",
            self.name,
            time.perf_counter() - start,
            self.graphs,
        )
        return compiled

    def run(
        self,
        function: Callable[..., torch.Tensor],
        block: nn.Module,
        tokens: torch.Tensor,
        text: torch.Tensor | Texts,
        temb: torch.Tensor | FrameModulation,
        rotation: torch.Tensor,
    ) -> torch.Tensor:
        """Return `function(block, tokens, text, rows, row_of_token, rotation)`, compiled.

        Tokens must be contiguous.

        `temb` is split into its rows [R, 6, D] and the row of each token [S], None for one row.
        """
        # Prompts differ in length: without the mark, the second prompt would compile another graph.
        for each in (text,) if isinstance(text, torch.Tensor) else text:
            # `mark_dynamic` would raise an error where a graph specialises on the length.
            torch._dynamo.maybe_mark_dynamic(each, TEXT_LENGTH_DIM)
        compiled = _compiled(self, function)
        if not isinstance(temb, FrameModulation):
            return compiled(block, tokens, text, temb, None, rotation)
        torch._dynamo.maybe_mark_dynamic(temb.rows, ROWS_DIM)
        return compiled(block, tokens, text, temb.rows, temb.row_of_token, rotation)


@functools.cache
def _compiled(
    compiler: BlockCompiler, function: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    # A function with the block as an argument: with a method per block, blocks share no graphs.
    return torch.compile(function, backend=compiler)


@functools.cache
def get_compiler(name: str) -> BlockCompiler:
    """Return the process's compiler with this name. torch caches graphs by backend identity."""
    return BlockCompiler(name)
