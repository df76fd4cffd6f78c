"""What a run asks of a machine, and how much of the machine it may take: the planner's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..schema import ExpertShape
from .visits import Visit, step_visits


@dataclass(frozen=True, kw_only=True)
class OffloadJob:
    """One run of a pair of experts of one shape. Bytes are those of one block, the larger one where experts differ.

    Raises ValueError for a run without steps, an expert without lanes, and sizes that are not above 0.
    """

    expert: ExpertShape
    tokens: int
    """Of one lane; where workers share them, those of one worker."""
    lanes: Mapping[str, int]
    """Lanes of each expert of the pair, also of one that no step runs."""
    experts_of_steps: tuple[str, ...]
    stored_bytes: int
    """What lies in RAM and crosses the bus."""
    file_bytes: int
    """What is read from the file; more than `stored_bytes` where blocks are quantised on their way."""
    computed_bytes: int
    """What a buffer takes."""
    resident_bytes: int
    """What does not stream, of all experts together, on the device from the start to the end."""
    value_bytes: int = 2
    """Of one value of the activations."""
    host_resident_bytes: int = 0
    """RAM beside the slots for as long as the run goes: factors of LoRAs, what waits for the next expert."""
    converts: bool = False
    """Whether blocks arrive in another form of the same size: fp16 where bf16 is computed with."""
    ring: int = 1
    ulysses: int = 1
    """`ring` x `ulysses` workers share the tokens of every lane."""
    kept_states: int = 0
    """Tensors of the size of a hidden state that a cache keeps of every lane."""
    lanes_of_steps: tuple[int, ...] = ()
    """Of each step, where steps of an expert have more or fewer; () where not. The planner reckons with `lanes`, the
    most: they are for what is foretold of a plan, and for what a first step tells."""
    skipped_steps: frozenset[int] = frozenset()
    """Steps of `experts_of_steps`, from 0, that a cache is known to take over: no block is visited in them."""

    def __post_init__(self) -> None:
        if not self.experts_of_steps:
            raise ValueError("the run has no steps; there is nothing to plan")
        if unknown := sorted(set(self.experts_of_steps) - set(self.lanes)):
            raise ValueError(f"no lanes for the {unknown[0]!r} expert: lanes names {sorted(self.lanes)}")
        for name in ("tokens", "stored_bytes", "file_bytes", "computed_bytes", "value_bytes", "ring", "ulysses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        if self.lanes_of_steps and len(self.lanes_of_steps) != len(self.experts_of_steps):
            raise ValueError(
                f"{len(self.lanes_of_steps)} lanes of {len(self.experts_of_steps)} steps: give all or none"
            )
        if min(self.lanes.values()) < 1:
            raise ValueError(f"lanes are {dict(self.lanes)}, each must be 1 or more")

    @property
    def block_counts(self) -> dict[str, int]:
        return dict.fromkeys(self.lanes, self.expert.blocks)

    @property
    def visits(self) -> tuple[Visit, ...]:
        return step_visits(self.experts_of_steps, self.block_counts, skipped=self.skipped_steps)

    @property
    def decodes(self) -> bool:
        """Whether blocks arrive in another form than they compute in."""
        return self.converts or self.stored_bytes != self.computed_bytes

    @property
    def quantises(self) -> bool:
        """Whether blocks change their form between file and RAM."""
        return self.file_bytes > self.stored_bytes


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory that a run may take, in bytes; None: what `plan_offload` thinks the machine can spare.

    `vram_bytes` is for weights and for what is computed in, together; `ram_bytes` for all RAM that weights take, and on
    a CPU for everything. Raises ValueError for negative budgets.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, it must be 0 or more (None leaves it to the planner)")


@dataclass(frozen=True, kw_only=True)
class AutoOffload:
    """Stands in for an offload policy until a run is there to plan for: `plan_offload` is asked with these budgets."""

    budgets: Budgets = Budgets()
