"""What stays on the device: a user's offload policy, and the residents and buffers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

PolicyKind = Literal["resident", "layerwise", "block_swap"]
SourceKind = Literal["file", "pinned"]


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Blocks that stay in their buffer between visits, per expert; all others stream, one fetch per visit.

    A resident stays until its last visit of the stage (a stage is a maximal run of visits of one expert). With
    `permanent` it stays until its last visit of the whole run, whatever ran in between.
    """

    residents: Mapping[str, frozenset[int]]
    permanent: bool = False

    def keeps(self, expert: str, block: int) -> bool:
        return block in self.residents.get(expert, frozenset())


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """How much device memory the weights may take, as a user says it. Make one with the constructors below.

    `source` says where streamed blocks come from: the checkpoint file, or pinned RAM filled from it once.
    Raises ValueError for numbers out of range, unknown words, and settings of RAM without pinned RAM.
    """

    kind: PolicyKind
    prefetch_blocks: int
    blocks_to_swap: int
    source: SourceKind = "file"
    ram_blocks: int | None = None
    """Blocks of all experts together that have a home in pinned RAM, also for later runs; None: every block. The others
    are read from their file for every fetch."""
    chunk_tokens: int | None = None
    """Tokens that go through feed-forward and norms at once; None: all of them."""
    pin_first_block: bool = False
    """Whether the first block of an expert stays as long as that runs, for a cache that asks it in every step."""

    def __post_init__(self) -> None:
        self._check_words()
        self._check_ram()
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}, it must be 1 or more (None takes all at once)")

    def _check_words(self) -> None:
        if self.kind not in get_args(PolicyKind):
            raise ValueError(f"kind is {self.kind!r}, choose one of {get_args(PolicyKind)}")
        if self.source not in get_args(SourceKind):
            raise ValueError(f"source is {self.source!r}, choose one of {get_args(SourceKind)}")
        if self.prefetch_blocks < 0:
            raise ValueError(f"prefetch_blocks is {self.prefetch_blocks}, it must be 0 or more (1 is the default)")
        if self.blocks_to_swap < 0:
            raise ValueError(f"blocks_to_swap is {self.blocks_to_swap}, it must be 0 or more (0 keeps every block)")

    def _check_ram(self) -> None:
        if self.ram_blocks is None:
            return
        if self.ram_blocks < 0:
            raise ValueError(f"ram_blocks is {self.ram_blocks}, it must be 0 or more (None keeps every block in RAM)")
        if self.source != "pinned":
            raise ValueError(f"ram_blocks is {self.ram_blocks}, but source is {self.source!r}: use source 'pinned'")

    @classmethod
    def resident(cls, *, source: SourceKind = "file") -> OffloadPolicy:
        """Every block of every expert is fetched once and stays, for later runs too."""
        return cls(kind="resident", prefetch_blocks=0, blocks_to_swap=0, source=source)

    @classmethod
    def layerwise(cls, prefetch_blocks: int = 1, *, source: SourceKind = "file") -> OffloadPolicy:
        """Every block streams, `prefetch_blocks` of them ahead of the one that computes: smallest device memory."""
        return cls(kind="layerwise", prefetch_blocks=prefetch_blocks, blocks_to_swap=0, source=source)

    @classmethod
    def block_swap(
        cls, blocks_to_swap: int = 20, prefetch_blocks: int = 1, *, source: SourceKind = "file"
    ) -> OffloadPolicy:
        """`blocks_to_swap` blocks of each expert stream, the others stay while their expert runs."""
        return cls(kind="block_swap", prefetch_blocks=prefetch_blocks, blocks_to_swap=blocks_to_swap, source=source)


def spread_evenly(residents: int, blocks: int) -> frozenset[int]:
    """`residents` of `blocks` block numbers at equal distances, block 0 among them.

    Even gaps give every streamed block the same time to arrive: at equal memory a contiguous set can make the step
    1.45 times as long when the bus is the limit.
    """
    return frozenset(j * blocks // residents for j in range(residents))


def plan_residency(policy: OffloadPolicy, block_counts: Mapping[str, int]) -> tuple[Residency, int]:
    """Residents and number of buffers for stacks of `block_counts[expert]` blocks.

    Never asks for more buffers than there are blocks. Raises ValueError when a stack has no blocks, or fewer than
    `blocks_to_swap`.
    """
    if not block_counts:
        raise ValueError("block_counts is empty: name at least one stack of blocks")
    if empty := sorted(expert for expert, blocks in block_counts.items() if blocks < 1):
        raise ValueError(f"stack {empty[0]!r} has {block_counts[empty[0]]} blocks, it needs at least 1")
    distinct_blocks = sum(block_counts.values())
    if policy.kind == "resident":
        residents = {expert: frozenset(range(blocks)) for expert, blocks in block_counts.items()}
        return Residency(residents=residents, permanent=True), distinct_blocks

    least = 1 if policy.pin_first_block else 0
    residents = {
        expert: spread_evenly(max(least, _kept_blocks(policy, expert, blocks)), blocks)
        for expert, blocks in block_counts.items()
    }
    buffers = max(
        blocks if len(residents[expert]) == blocks else len(residents[expert]) + policy.prefetch_blocks + 1
        for expert, blocks in block_counts.items()
    )
    return Residency(residents=residents), min(buffers, distinct_blocks)


def _kept_blocks(policy: OffloadPolicy, expert: str, blocks: int) -> int:
    """How many blocks of one expert stay while it runs."""
    if policy.kind == "layerwise":
        return 0
    if policy.blocks_to_swap > blocks:
        raise ValueError(
            f"blocks_to_swap is {policy.blocks_to_swap}, but the {expert} expert has only {blocks} blocks: "
            f"use {blocks} or less"
        )
    return blocks - policy.blocks_to_swap
