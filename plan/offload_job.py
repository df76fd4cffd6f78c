"""Input of the planner: the resource requirements of a run, and its memory budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..schema import ExpertShape, Storage
from .machine import LINEAR_FORMATS
from .visits import Visit, step_visits


@dataclass(frozen=True, kw_only=True)
class OffloadJob:
    """One run of a pair of experts with the same shape.

    `stored_bytes`, `file_bytes` and `computed_bytes` are those of one block, the larger one if the experts differ.
    Raises ValueError for a run without steps, an expert without lanes, and sizes that are not above 0.
    """

    expert: ExpertShape
    tokens: int
    """Sequence length of the longest lane; if workers share it, the tokens of one worker."""
    lanes: Mapping[str, int]
    """Lanes of each expert of the pair, also of one that no step runs."""
    experts_of_steps: tuple[str, ...]
    stored_bytes: int
    """Bytes in RAM and on the bus."""
    file_bytes: int
    """Bytes read from the file; more than `stored_bytes` if blocks are quantised after reading."""
    computed_bytes: int
    """Bytes in a buffer."""
    resident_bytes: int
    """Bytes of all experts together that do not stream: on the device for the whole run."""
    value_bytes: int = 2
    """Bytes of one activation value."""
    compute_dtype: str = "bfloat16"
    """Name of the compute dtype, for a reader."""
    linear_format: str = ""
    """Format in which the linear layers of the blocks are multiplied, of `LINEAR_FORMATS`; "": in `compute_dtype`."""
    attention_bytes: int = 0
    """See `KernelNeeds`."""
    quantised_to: Storage = "as stored"
    """Format that blocks are quantised to between file and RAM."""
    patch_bytes: int = 0
    """Bytes of a buffer behind its block: factors of LoRAs that are computed beside matrices."""
    host_resident_bytes: int = 0
    """RAM for the whole run in addition to the slots: LoRA factors, and an embedder that is not on the device."""
    converts: bool = False
    """True if blocks are converted on arrival to another dtype of the same size: fp16 to bf16."""
    ring: int = 1
    ulysses: int = 1
    """`ring` x `ulysses` workers share the tokens of every lane."""
    cached_states: int = 0
    """Tensors of the size of a hidden state that a cache keeps for each lane."""
    lanes_of_steps: tuple[int, ...] = ()
    """Lanes of each step if they vary between the steps of an expert, else (). The planner uses `lanes`, the maximum;
    predictions of a chosen plan and corrections by a first step use these."""
    extra_tokens: tuple[int, ...] = ()
    """Tokens of a lane next to those of its video (references), for each CFG side in the order of the lanes; `tokens`
    includes the largest number. (): none."""
    sides: Mapping[str, int] = field(default_factory=dict)
    """Number of CFG sides of each expert, all with equally many lanes. An expert with fewer of them than others has the
    first ones. {}: every lane counts as one of `tokens`."""
    sides_of_steps: tuple[int, ...] = ()
    """Those of each step, next to `lanes_of_steps`; (): those of its expert."""
    patches_of_steps: tuple[int, ...] = ()
    """`BlockKey.patch` in each step; (): 0 in all of them."""
    skipped_steps: frozenset[int] = frozenset()
    """Steps that a cache is known to skip, as indices of `experts_of_steps`: they visit no block."""

    def __post_init__(self) -> None:
        if not self.experts_of_steps:
            raise ValueError("the run has no steps; there is nothing to plan")
        if unknown := sorted(set(self.experts_of_steps) - set(self.lanes)):
            raise ValueError(f"no lanes for the {unknown[0]!r} expert: lanes names {sorted(self.lanes)}")
        for name in ("tokens", "stored_bytes", "file_bytes", "computed_bytes", "value_bytes", "ring", "ulysses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        for name in ("lanes_of_steps", "sides_of_steps", "patches_of_steps"):
            if (count := len(getattr(self, name))) not in (0, len(self.experts_of_steps)):
                raise ValueError(
                    f"{name} has {count} values for {len(self.experts_of_steps)} steps: give one for each step, or none"
                )
        if self.extra_tokens and not 0 <= min(self.extra_tokens) <= max(self.extra_tokens) < self.tokens:
            raise ValueError(f"extra_tokens are {self.extra_tokens} of {self.tokens} tokens: give 0 or more, and fewer")
        if self.linear_format not in ("", *LINEAR_FORMATS):
            raise ValueError(f"linear_format is {self.linear_format!r}, choose '' or one of {LINEAR_FORMATS}")
        self._check_lanes()

    def _check_lanes(self) -> None:
        if min(self.lanes.values()) < 1:
            raise ValueError(f"lanes are {dict(self.lanes)}, each must be 1 or more")
        for expert, sides in self.sides.items():
            if sides < 1 or self.lanes.get(expert, 0) % sides:
                raise ValueError(
                    f"sides are {dict(self.sides)} and lanes {dict(self.lanes)}: give multiples of the sides"
                )

    def of_steps(self, steps: Sequence[int]) -> OffloadJob:
        """Return the job of these steps alone, given as indices of `experts_of_steps`, with all values of each step."""
        return replace(
            self,
            experts_of_steps=tuple(self.experts_of_steps[step] for step in steps),
            lanes_of_steps=tuple(self.lanes_of_steps[step] for step in steps) if self.lanes_of_steps else (),
            sides_of_steps=tuple(self.sides_of_steps[step] for step in steps) if self.sides_of_steps else (),
            patches_of_steps=tuple(self.patches_of_steps[step] for step in steps) if self.patches_of_steps else (),
            skipped_steps=frozenset(place for place, step in enumerate(steps) if step in self.skipped_steps),
        )

    @property
    def block_counts(self) -> dict[str, int]:
        return dict.fromkeys(self.lanes, self.expert.blocks)

    @property
    def video_tokens(self) -> int:
        """Tokens of a lane's video alone."""
        return self.tokens - max(self.extra_tokens, default=0)

    @property
    def tokens_of_sides(self) -> tuple[int, ...]:
        """Tokens of a lane of each CFG side; one number if they are equal."""
        return tuple(dict.fromkeys(self.video_tokens + extra for extra in self.extra_tokens or (0,)))

    def lane_tokens(self, expert: str) -> tuple[int, ...]:
        """Return the tokens of each lane of an expert, in the order of its lanes."""
        return self._lane_tokens(self.lanes[expert], self.sides.get(expert))

    def lane_tokens_of_step(self, number: int) -> tuple[int, ...]:
        """Return the tokens of each lane of a step, an index of `experts_of_steps`."""
        expert = self.experts_of_steps[number]
        if not self.lanes_of_steps:
            return self.lane_tokens(expert)
        sides = self.sides_of_steps[number] if self.sides_of_steps else self.sides.get(expert)
        return self._lane_tokens(self.lanes_of_steps[number], sides)

    def _lane_tokens(self, lanes: int, sides: int | None) -> tuple[int, ...]:
        extras = self.extra_tokens[:sides]
        if sides is None or not extras:
            return (self.tokens,) * lanes
        return tuple(self.video_tokens + extra for extra in extras for _ in range(lanes // len(extras)))

    @property
    def visits(self) -> tuple[Visit, ...]:
        return step_visits(
            self.experts_of_steps,
            self.block_counts,
            skipped=self.skipped_steps,
            patches_of_steps=self.patches_of_steps,
        )

    @property
    def decodes(self) -> bool:
        """True if blocks are decoded on arrival, because their stored form differs from the computed one."""
        return self.converts or self.stored_bytes != self.computed_bytes

    @property
    def quantises(self) -> bool:
        """True if blocks are quantised between file and RAM."""
        return self.quantised_to != "as stored"


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory that a run may take, in bytes; None: a default share of the machine, see `memory_budget`.

    Raises ValueError for negative budgets.
    """

    vram_bytes: int | None = None
    """Limit for weights and activations together."""
    ram_bytes: int | None = None
    """Limit for weights in RAM; on a CPU also for everything else."""

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, it must be 0 or more (None leaves it to the planner)")


@dataclass(frozen=True, kw_only=True)
class AutoOffload:
    """Placeholder for an offload policy that `plan_offload` chooses, within these budgets, when the run is known."""

    budgets: Budgets = Budgets()
