"""Offload policy nodes: layerwise prefetch, block swap, automatic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..host import io, search_aliases
from ..plan import AutoOffload, Budgets
from ..schema import OffloadPolicy, SourceKind
from . import sockets
from .inputs import limits

ALL_BLOCKS = 80
"""Number of blocks in both A14B experts together."""

MOST_BLOCKS = 200
"""More blocks than any native model has."""

# Saved workflows contain the names on the left.
_SOURCES: dict[str, SourceKind] = {"disk": "file", "RAM": "pinned"}
_FIXED = {"layerwise": "WanStreamLayerwise", "block_swap": "WanStreamBlockSwap"}
"""Node types by the kind of their policy. No node keeps both experts resident."""

STREAM_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "prefetch_blocks",
        default=1,
        **limits(0, 8),
        tooltip="Blocks fetched ahead of the computing one. Each costs one more buffer (0.70 GB in "
        "bf16). 1 hides the copies if a block computes longer than its copy takes, more helps "
        "with a busy disk, 0 waits for every block.",
    ),
    io.Combo.Input(
        "weights_source",
        options=list(_SOURCES),
        default="disk",
        tooltip="disk: blocks are read from disk in every step; costs no RAM and needs an SSD (1.5 "
        "GB/s at 832x480x81 on an RTX 4090, simulated). RAM: read once, then kept; costs 28 GB of "
        "RAM per expert in bf16, 14 GB in fp8.",
    ),
    io.Int.Input(
        "ram_blocks",
        default=ALL_BLOCKS,
        **limits(0, ALL_BLOCKS),
        optional=True,
        tooltip="With weights_source RAM: blocks of both experts (of 80) that are kept there. Each "
        "costs 0.70 GB of RAM in bf16, 0.35 GB in fp8; the others are read from disk in every "
        "step of their expert. Wan Auto Offload takes a budget in GB instead.",
    ),
    io.Int.Input(
        "chunk_tokens",
        default=0,
        **limits(0, 1_000_000, step=1024),
        optional=True,
        tooltip="Tokens per chunk of feed-forward and norms; 0: all. 8192 saves 3.9 GB at "
        "1280x720x81 (75600 tokens), and costs a little time in every block. Last digits may "
        "differ.",
    ),
)
"""Inputs on both nodes with a fixed policy."""


def _policy(
    policy: OffloadPolicy, weights_source: str, ram_blocks: int, chunk_tokens: int
) -> io.NodeOutput:
    """Return `policy` with the inputs shared by both nodes.

    `ram_blocks` counts only if the source is RAM.
    """
    source = _SOURCES[weights_source]
    # The widget's largest value means no limit, also for models with more than 80 blocks.
    limit = ram_blocks if source == "pinned" and ram_blocks < ALL_BLOCKS else None
    return io.NodeOutput(
        # The widget has no empty value, so 0 stands for None.
        replace(policy, source=source, ram_blocks=limit, chunk_tokens=chunk_tokens or None)
    )


class WanStreamLayerwise(io.ComfyNode):
    """Policy that streams every block."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLayerwise",
            display_name="Wan Layerwise Prefetch",
            category="WanStream/offload",
            **search_aliases("low vram, vram, offload, layerwise, stream weights"),
            description="Smallest device memory: every block is fetched in every step, ahead of "
            "its use, and none stays.",
            inputs=[*STREAM_INPUTS],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(
        cls,
        prefetch_blocks: int,
        weights_source: str,
        # ComfyUI passes only inputs in the workflow, so older workflows need these defaults.
        ram_blocks: int = ALL_BLOCKS,
        chunk_tokens: int = 0,
    ) -> io.NodeOutput:
        return _policy(
            OffloadPolicy.layerwise(prefetch_blocks), weights_source, ram_blocks, chunk_tokens
        )


class WanStreamBlockSwap(io.ComfyNode):
    """Policy that streams some blocks in each expert and keeps the rest resident while it runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBlockSwap",
            display_name="Wan Block Swap",
            category="WanStream/offload",
            **search_aliases("blockswap, blocks to swap, low vram, vram, offload"),
            description="Spends device memory to save bus time: only blocks_to_swap blocks of an "
            "expert are fetched per step.",
            inputs=[
                io.Int.Input(
                    "blocks_to_swap",
                    default=20,
                    **limits(0, MOST_BLOCKS),
                    tooltip="Blocks of each expert (of 40) that are fetched in every step. Each "
                    "block fewer costs 0.70 GB of device memory in bf16 and saves its copy per "
                    "step. 40 keeps none, 0 keeps a whole expert: 28 GB. Native models have "
                    "other numbers of blocks: Flux 57, Qwen-Image 60.",
                ),
                *STREAM_INPUTS,
            ],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(
        cls,
        blocks_to_swap: int,
        prefetch_blocks: int,
        weights_source: str,
        ram_blocks: int = ALL_BLOCKS,
        chunk_tokens: int = 0,
    ) -> io.NodeOutput:
        policy = OffloadPolicy.block_swap(blocks_to_swap, prefetch_blocks)
        return _policy(policy, weights_source, ram_blocks, chunk_tokens)


GB = 1e9


class WanStreamAutoOffload(io.ComfyNode):
    """Policy predicted to be the fastest within two memory budgets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamAutoOffload",
            display_name="Wan Auto Offload",
            category="WanStream/offload",
            **search_aliases("low vram, vram, automatic, offload, out of memory, oom, cpu"),
            description="Simulates the run on this machine with every policy that fits, chooses "
            "the fastest, and corrects the choice once after the first step. The first run "
            "ever measures the machine, which takes some seconds.",
            inputs=[
                io.Float.Input(
                    "vram_budget_gb",
                    default=0.0,
                    **limits(0.0, 1000.0, step=0.5),
                    tooltip="Device memory in GB for weights and activations together. 0: the free "
                    "memory, less the reserve of the host. Less memory means more copies per "
                    "step, which cost time only if the bus or the disk is slower than the "
                    "computing.",
                ),
                io.Float.Input(
                    "ram_budget_gb",
                    default=0.0,
                    **limits(0.0, 1000.0, step=0.5),
                    tooltip="RAM in GB for blocks that are not read from disk in every step. 0: up "
                    "to half of all RAM, if it is free. The other blocks are read from the "
                    "file in every step, which costs disk time.",
                ),
            ],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(cls, vram_budget_gb: float, ram_budget_gb: float) -> io.NodeOutput:
        budgets = Budgets(vram_bytes=_bytes(vram_budget_gb), ram_bytes=_bytes(ram_budget_gb))
        return io.NodeOutput(AutoOffload(budgets=budgets))


def policy_node(policy: OffloadPolicy | AutoOffload) -> dict[str, Any] | None:
    """Return type and widget values of the node that makes `policy`, or None if none does."""
    if isinstance(policy, AutoOffload):
        budgets = policy.budgets
        gigabytes = {
            # 0 in the widget stands for None.
            "vram_budget_gb": (budgets.vram_bytes or 0) / GB,
            "ram_budget_gb": (budgets.ram_bytes or 0) / GB,
        }
        return {"type": "WanStreamAutoOffload", "values": gigabytes}
    if policy.kind not in _FIXED:
        return None
    sources = {source: name for name, source in _SOURCES.items()}
    values: dict[str, Any] = {
        "prefetch_blocks": policy.prefetch_blocks,
        "weights_source": sources[policy.source],
        "chunk_tokens": policy.chunk_tokens or 0,
    }
    if policy.source == "pinned":
        values["ram_blocks"] = ALL_BLOCKS if policy.ram_blocks is None else policy.ram_blocks
    if policy.kind == "block_swap":
        values["blocks_to_swap"] = policy.blocks_to_swap
    return {"type": _FIXED[policy.kind], "values": values}


def _bytes(gigabytes: float) -> int | None:
    """Return a budget in bytes, or None for 0: the planner then uses the free memory."""
    return round(gigabytes * GB) if gigabytes else None
