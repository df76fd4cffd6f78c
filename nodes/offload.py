"""Choosing how much device memory the experts may take."""

from __future__ import annotations

from ..host import io
from ..plan import OffloadPolicy
from ..plan.residency import SourceKind
from . import sockets

_SOURCES: dict[str, SourceKind] = {"file": "file", "pinned RAM": "pinned"}


def _prefetch_blocks() -> io.Int.Input:
    return io.Int.Input(
        "prefetch_blocks",
        default=1,
        min=0,
        max=8,
        tooltip="Blocks fetched ahead of the one that computes. Each costs one more buffer (0.70 GB in bf16). 1 "
        "hides the copies wherever a block computes longer than its copy takes, more evens out a busy disk, "
        "0 waits for every block.",
    )


def _weights_from() -> io.Combo.Input:
    return io.Combo.Input(
        "weights_from",
        options=list(_SOURCES),
        default="file",
        tooltip="file: blocks are read from disk in every step; costs no RAM and wants an SSD (2.5 GB/s at "
        "832x480x81 on an RTX 4090). pinned RAM: read once, then kept; costs 28 GB of RAM per expert in "
        "bf16, 14 GB in fp8.",
    )


class WanStreamLayerwise(io.ComfyNode):
    """Streams every block."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLayerwise",
            display_name="Wan Layerwise Prefetch",
            category="WanStream",
            description="Smallest device memory: every block is fetched in every step, ahead of its use, and nothing "
            "stays.",
            inputs=[_prefetch_blocks(), _weights_from()],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(cls, prefetch_blocks: int, weights_from: str) -> io.NodeOutput:
        return io.NodeOutput(OffloadPolicy.layerwise(prefetch_blocks, source=_SOURCES[weights_from]))


class WanStreamBlockSwap(io.ComfyNode):
    """Streams some blocks of each expert and keeps the others while that expert runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBlockSwap",
            display_name="Wan Block Swap",
            category="WanStream",
            description="Spends device memory to save bus time: only blocks_to_swap blocks of an expert are fetched "
            "per step.",
            inputs=[
                io.Int.Input(
                    "blocks_to_swap",
                    default=20,
                    min=0,
                    max=40,
                    tooltip="Blocks of each expert (of 40) that are fetched in every step. Every block less costs "
                    "0.70 GB of device memory in bf16 and saves its copy per step. 40 keeps none, 0 keeps a "
                    "whole expert: 28 GB.",
                ),
                _prefetch_blocks(),
                _weights_from(),
            ],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(cls, blocks_to_swap: int, prefetch_blocks: int, weights_from: str) -> io.NodeOutput:
        source = _SOURCES[weights_from]
        return io.NodeOutput(OffloadPolicy.block_swap(blocks_to_swap, prefetch_blocks, source=source))
