"""Benchmark matrix, policies x prefetch x steps: from text to run settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias, TypeGuard, TypeVar

from ..plan import AutoOffload
from ..schema import OffloadPolicy
from .report import Variant

Policy: TypeAlias = OffloadPolicy | AutoOffload

POLICY_SYNTAX = "layerwise, block_swap N, resident or auto"
MAX_PREFETCH = 8
MAX_STEPS = 1000
STREAMING = ("layerwise", "block_swap")
"""Policy kinds with a prefetch depth."""


class MatrixError(ValueError):
    """Invalid text for a matrix. The message has the valid syntax."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of a matrix: a run's policy and number of steps."""

    policy: Policy
    steps: int | None = None
    """Number of steps. None: as in the repeated run."""

    @property
    def name(self) -> str:
        """Text like `block_swap 20, 1 ahead, 8 steps`."""
        name = policy_name(self.policy)
        if self.steps is not None:
            name += f", {self.steps} steps"
        return name


@dataclass(frozen=True, kw_only=True)
class TrialMatrix:
    """Values to vary. An empty field keeps the repeated run's value."""

    policies: tuple[Policy, ...] = ()
    """Policies. Settings other than kind and streamed blocks come from the repeated run."""
    prefetch: tuple[int, ...] = ()
    """Prefetch depths for streaming policies."""
    steps: tuple[int, ...] = ()
    """Numbers of steps."""

    @classmethod
    def parse(cls, policies: str, prefetch: str, steps: str) -> TrialMatrix:
        """Parse three comma-separated lists. Raises MatrixError for invalid text."""
        matrix = cls(
            policies=tuple(_parse_policy(" ".join(item.split())) for item in _split_list(policies)),
            prefetch=_numbers("prefetch", prefetch, least=0, most=MAX_PREFETCH),
            steps=_numbers("steps", steps, least=1, most=MAX_STEPS),
        )
        if matrix.policies:
            # Refuse a prefetch list without a streaming policy here, not when the run starts. The
            # base does not matter.
            matrix.settings(OffloadPolicy.layerwise())
        return matrix

    @property
    def is_empty(self) -> bool:
        """True if nothing is varied."""
        return not (self.policies or self.prefetch or self.steps)

    def settings(self, base: Policy) -> tuple[Setting, ...]:
        """Expand the matrix into distinct settings for a run with the policy `base`.

        All policies except auto take RAM settings and `chunk_tokens` from `base`. auto plans both.
        Raises MatrixError if prefetch depths are given and no policy has one.
        """
        policies = [_with_settings_of(base, policy) for policy in self.policies] or [base]
        if self.prefetch and not any(_streams(policy) for policy in policies):
            raise MatrixError(
                f"prefetch is {', '.join(map(str, self.prefetch))}, but "
                f"{' and '.join(map(policy_name, policies))} fetch nothing ahead that a user sets: "
                "leave prefetch empty, or name layerwise or block_swap N"
            )
        found = [
            Setting(policy=policy, steps=steps)
            # A product with an empty list would be empty, so None stands for no step count.
            for chosen, steps in product(policies, self.steps or (None,))
            for policy in _with_prefetch(chosen, self.prefetch)
        ]
        return tuple(dict.fromkeys(found))


def policy_name(policy: Policy) -> str:
    """Return the matrix text for `policy`, with its prefetch depth."""
    if isinstance(policy, AutoOffload):
        return "auto"
    if policy.kind == "resident":
        return "resident"
    kind: str = policy.kind
    if kind == "block_swap":
        kind = f"block_swap {policy.blocks_to_swap}"
    return f"{kind}, {policy.prefetch_blocks} ahead"


def _split_list(text: str) -> Iterator[str]:
    """Return the non-empty items between commas and line ends."""
    return (item.strip() for item in text.replace("\n", ",").split(",") if item.strip())


def _numbers(name: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    found = []
    for item in _split_list(text):
        if not _is_number(item) or not least <= int(item) <= most:
            raise MatrixError(
                f"{name}: {item!r} is not a number from {least} to {most}: write a list like 1, 2, "
                "4"
            )
        found.append(int(item))
    return tuple(dict.fromkeys(found))


def _is_number(text: str) -> bool:
    # The length is limited because int() refuses thousands of digits with another error.
    # `isascii` is needed, because `isdecimal` is True for digits in every script.
    return text.isascii() and text.isdecimal() and len(text) < 10


WITHOUT_NUMBER: Mapping[str, Policy] = {
    "layerwise": OffloadPolicy.layerwise(),
    "resident": OffloadPolicy.resident(),
    "auto": AutoOffload(),
}
"""Policies by name, except the one with a number of blocks."""


def _parse_policy(name: str) -> Policy:
    kind, _, number = name.partition(" ")
    if kind == "block_swap":
        if not _is_number(number):
            raise MatrixError(
                f"{name!r} has no number of streamed blocks: write block_swap 20, for example"
            )
        return OffloadPolicy.block_swap(int(number))
    if kind not in WITHOUT_NUMBER:
        raise MatrixError(f"{name!r} names no policy: write {POLICY_SYNTAX}, separated by commas")
    if number:
        raise MatrixError(
            f"{name!r}: {kind} takes no {number!r} here (give the prefetch depth in prefetch)"
        )
    return WITHOUT_NUMBER[kind]


def _with_settings_of(base: Policy, policy: Policy) -> Policy:
    if isinstance(base, AutoOffload) and isinstance(policy, AutoOffload):
        return base
    if isinstance(base, AutoOffload) or isinstance(policy, AutoOffload):
        return policy
    chosen = replace(base, kind=policy.kind, blocks_to_swap=policy.blocks_to_swap)
    # A base that does not stream has no depth to keep.
    if _streams(base) and _streams(policy):
        return chosen
    return replace(chosen, prefetch_blocks=policy.prefetch_blocks)


def _streams(policy: Policy) -> TypeGuard[OffloadPolicy]:
    return isinstance(policy, OffloadPolicy) and policy.kind in STREAMING


def _with_prefetch(policy: Policy, depths: tuple[int, ...]) -> list[Policy]:
    if not depths or not _streams(policy):
        return [policy]
    return [replace(policy, prefetch_blocks=depth) for depth in depths]


MAX_RUNS = 100
MAX_PAUSE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """Number of runs per variant, and the pause before each run.

    Raises:
        ValueError: a number is out of range.
    """

    repeats: int = 1
    """Measured runs."""
    warmup: int = 0
    """Uncounted runs before them."""
    cooldown_s: float = 0.0
    """Pause before each run in seconds."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"{self.repeats} repeats measure nothing: give 1 to {MAX_RUNS}")
        for name in ("repeats", "warmup"):
            if not 0 <= getattr(self, name) <= MAX_RUNS:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: give at most {MAX_RUNS}, and not less than 0"
                )
        if not (math.isfinite(self.cooldown_s) and 0 <= self.cooldown_s <= MAX_PAUSE_S):
            raise ValueError(
                f"cooldown_s is {self.cooldown_s:g}: give 0 to {MAX_PAUSE_S:g} seconds"
            )

    @property
    def runs(self) -> int:
        """Number of runs per variant, including warm-ups."""
        return self.warmup + self.repeats


AnyVariant = TypeVar("AnyVariant", bound=Variant)


def run_trials(
    variant: AnyVariant,
    times: TrialTimes,
    with_trial: Callable[[AnyVariant, int], AnyVariant],
    *,
    failures: tuple[type[Exception], ...],
) -> Iterator[AnyVariant]:
    """Yield `variant` after each trial.

    `with_trial` makes a trial by number, starting at 0. The first `times.warmup` trials are
    warm-ups. One of `failures` ends the trials and becomes the reason in `failed`.
    """
    try:
        for number in range(times.runs):
            variant = with_trial(variant, number)
            yield variant
    except failures as err:
        yield replace(variant, failed=str(err) or type(err).__name__)
