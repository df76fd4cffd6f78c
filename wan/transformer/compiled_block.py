"""Compiled forwards of Wan blocks; one graph serves the blocks of both experts.

The compiled function takes the block as an argument, so its weights are inputs of the graph: another block, expert,
buffer, LoRA or run needs no new graph. A new graph is compiled for another dtype, attention kernel or number of tokens,
and for per-frame timesteps. The graph for the second number of tokens serves any number.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .block_patching import PatchedForwards
from .per_frame_timestep import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

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


@functools.cache
def get_compiler(name: str) -> BlockCompiler:
    """Return the compiler of that name: one per process, because torch caches graphs by the identity of the backend."""
    return BlockCompiler(name)


class CompiledBlocks(PatchedForwards):
    """Blocks whose forward is compiled by `compiler`; see `PatchedForwards`."""

    def __init__(self, blocks: Iterable[WanTransformerBlock], compiler: BlockCompiler) -> None:
        # The function of the class is compiled, not the bound method of each block: only so do blocks share graphs.
        compiled = functools.cache(partial(torch.compile, backend=compiler))
        super().__init__(
            blocks,
            lambda block: partial(_forward, compiled(type(block).forward), compiled(_forward_by_token), block),
            name="compiled",
        )


def _forward(
    compiled: Callable[..., torch.Tensor],
    compiled_by_token: Callable[..., torch.Tensor],
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | tuple[torch.Tensor, ...],
    temb: torch.Tensor | FrameModulation,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """See `WanTransformerBlock.forward`; with NAG, `encoder_hidden_states` are two texts."""
    texts = (encoder_hidden_states,) if isinstance(encoder_hidden_states, torch.Tensor) else encoder_hidden_states
    # Prompts differ in length: without the mark, the second prompt would compile another graph.
    for text in texts:
        torch._dynamo.maybe_mark_dynamic(text, TEXT_LENGTH_DIM)
    # The first block gets its tokens from a convolution, in a transposed layout that would need another graph.
    tokens = hidden_states.contiguous()
    if not isinstance(temb, FrameModulation):
        return compiled(block, tokens, encoder_hidden_states, temb, rotary_emb)
    torch._dynamo.maybe_mark_dynamic(temb.rows, ROWS_DIM)
    original = type(block).forward
    return compiled_by_token(original, block, tokens, encoder_hidden_states, temb.rows, temb.row_of_token, rotary_emb)


def _forward_by_token(
    original: Callable[..., torch.Tensor],
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | tuple[torch.Tensor, ...],
    rows: torch.Tensor,
    row_of_token: torch.Tensor,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Call the block class' `original` forward with rows [R, 6, D] and the row index of each token [S].

    Only for compilers: these fuse the lookup into its use, whereas eager code would copy six rows for each token.
    """
    return original(block, hidden_states, encoder_hidden_states, rows[row_of_token].unsqueeze(0), rotary_emb)
