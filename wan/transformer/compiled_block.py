"""Compiled forwards of Wan blocks; one graph serves the blocks of both experts.

The compiled function takes the block as an argument, so its weights are inputs of the graph: another block, expert,
buffer, LoRA or run needs no new graph. A new graph is compiled for another dtype, attention kernel or number of tokens,
and for per-frame timesteps. The graph for the second number of tokens serves any number.
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
"""Dimension of the modulation rows [R, 6, D] that varies: one row for each distinct timestep of the frames."""
TEXT_LENGTH_DIM = 1
"""Dimension of the text [1, L, D] that varies with the prompt."""

logger = logging.getLogger("wanstream.kernels")


class BlockCompiler:
    """Backend of `torch.compile` that counts its graphs; get it from `get_compiler`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0
        """Block graphs that this process has compiled so far."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compile_graph = torch._dynamo.lookup_backend(self.name)
        start = time.perf_counter()
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        self.graphs += 1
        logger.info("%s compiled the blocks in %.1f s (graph %d)", self.name, time.perf_counter() - start, self.graphs)
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
        """Return `function(block, tokens, text, rows, row_of_token, rotation)`, compiled; tokens must be contiguous.

        `temb` is split into its rows [R, 6, D] and the row of each token [S], None for one row.
        """
        # Prompts differ in length: without the mark, the second prompt would compile another graph.
        for each in (text,) if isinstance(text, torch.Tensor) else text:
            torch._dynamo.maybe_mark_dynamic(each, TEXT_LENGTH_DIM)
        compiled = _compiled(self, function)
        if not isinstance(temb, FrameModulation):
            return compiled(block, tokens, text, temb, None, rotation)
        torch._dynamo.maybe_mark_dynamic(temb.rows, ROWS_DIM)
        return compiled(block, tokens, text, temb.rows, temb.row_of_token, rotation)


@functools.cache
def _compiled(compiler: BlockCompiler, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # A function of the block, not a method of each one: only so do blocks share graphs.
    return torch.compile(function, backend=compiler)


@functools.cache
def get_compiler(name: str) -> BlockCompiler:
    """Return the compiler of that name: one per process, because torch caches graphs by the identity of the backend."""
    return BlockCompiler(name)
