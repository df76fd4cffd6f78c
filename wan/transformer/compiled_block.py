"""Wan blocks whose forward is compiled, all of them as one: a graph that was made for a block serves every other.

The function that is compiled takes the block as an argument, and its weights are inputs of the graph. So no other
block, expert, buffer, LoRA or run needs another graph; tokens of another number, another dtype or another kernel of
attention do, and so do frames with timesteps of their own. The second number of tokens gets a graph that serves any.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .block_patching import BlockForwards
from .per_frame_block import forward_by_token
from .per_frame_timestep import FrameModulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

ROWS = 0
"""The dim of the rows [R, 6, D] of lanes whose frames have timesteps of their own: one for each timestep."""
TEXT_LENGTH = 1
"""The dim of the text [1, L, D] that is another one in every prompt, and in both lanes of one."""

logger = logging.getLogger("wanstream.kernels")


class BlockCompiler:
    """A backend of `torch.compile` that counts its graphs; get it from `compiler_named`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0
        """Graphs that this process has compiled for blocks so far."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compile_graph = torch._dynamo.lookup_backend(self.name)
        began = time.perf_counter()
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        self.graphs += 1
        logger.info(
            "blocks were compiled by %s in %.1f s (graph %d)", self.name, time.perf_counter() - began, self.graphs
        )
        return compiled


@functools.cache
def compiler_named(name: str) -> BlockCompiler:
    """The compiler of that name: one per process, as torch finds graphs again by who has compiled them."""
    return BlockCompiler(name)


class CompiledBlocks(BlockForwards):
    """Blocks that compute by graphs which `compiler` makes, from their making until `detach`; see `BlockForwards`."""

    def __init__(self, blocks: Iterable[WanTransformerBlock], compiler: BlockCompiler) -> None:
        compiled = functools.cache(partial(torch.compile, backend=compiler))
        super().__init__(
            blocks,
            lambda block: partial(_forward, compiled(type(block).forward), compiled(forward_by_token), block),
            first="compile blocks",
            last="the block is no more compiled",
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
    """See the block's own. Where texts are held against each other, they are two."""
    texts = (encoder_hidden_states,) if isinstance(encoder_hidden_states, torch.Tensor) else encoder_hidden_states
    for text in texts:
        torch._dynamo.maybe_mark_dynamic(text, TEXT_LENGTH)
    # The first block gets its tokens from a convolution, width before tokens: to a graph that is another input.
    tokens = hidden_states.contiguous()
    if not isinstance(temb, FrameModulation):
        return compiled(block, tokens, encoder_hidden_states, temb, rotary_emb)
    torch._dynamo.maybe_mark_dynamic(temb.rows, ROWS)
    own, of_token = type(block).forward, temb.row_of_token
    return compiled_by_token(own, block, tokens, encoder_hidden_states, temb.rows, of_token, rotary_emb)
