"""Matrix of a benchmark: policies x prefetch x steps, parsed from text and expanded into the settings of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias, TypeGuard

from ..plan import AutoOffload
from ..schema import OffloadPolicy

Policy: TypeAlias = OffloadPolicy | AutoOffload

POLICY_SYNTAX = "layerwise, block_swap N, resident or auto"
MAX_PREFETCH = 8
MAX_STEPS = 1000
STREAMING = ("layerwise", "block_swap")
"""Kinds of policies that have a prefetch depth."""


class MatrixError(ValueError):
    """Invalid text for a matrix; the message has the valid syntax."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of a matrix: the policy and the number of steps of a run."""

    policy: Policy
    steps: int | None = None
    """Number of steps; None: that of the repeated run."""

    @property
    def name(self) -> str:
        """Text like `block_swap 20, 1 ahead, 8 steps`."""
        steps = "" if self.steps is None else f", {self.steps} steps"
        return f"{policy_name(self.policy)}{steps}"


@dataclass(frozen=True, kw_only=True)
class TrialMatrix:
    """Values to vary; an empty field keeps the value of the repeated run."""

    policies: tuple[Policy, ...] = ()
    """Policies, whose settings other than kind and streamed blocks are those of the repeated run."""
    prefetch: tuple[int, ...] = ()
    """Prefetch depths of the policies that stream."""
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
            # Refuse a prefetch list without a streaming policy here, not when the run starts. The base does not matter.
            matrix.settings(OffloadPolicy.layerwise())
        return matrix

    @property
    def is_empty(self) -> bool:
        """True if nothing is varied."""
        return not (self.policies or self.prefetch or self.steps)

    def settings(self, base: Policy) -> tuple[Setting, ...]:
        """Expand the matrix into distinct settings for a run with the policy `base`.

        All policies except auto take their RAM settings and `chunk_tokens` from `base`; auto plans both.
        Raises MatrixError if prefetch depths are given and no policy has one.
        """
        policies = [_with_settings_of(base, policy) for policy in self.policies] or [base]
        if self.prefetch and not any(_streams(policy) for policy in policies):
            raise MatrixError(
                f"prefetch is {', '.join(map(str, self.prefetch))}, but {' and '.join(map(policy_name, policies))} "
                "fetch nothing ahead that a user sets: leave prefetch empty, or name layerwise or block_swap N"
            )
        found = [
            Setting(policy=policy, steps=steps)
            for chosen, steps in product(policies, self.steps or (None,))
            for policy in _with_prefetch(chosen, self.prefetch)
        ]
        return tuple(dict.fromkeys(found))


def policy_name(policy: Policy) -> str:
    """Return the text of `policy` in a matrix, with its prefetch depth."""
    if isinstance(policy, AutoOffload):
        return "auto"
    if policy.kind == "resident":
        return "resident"
    swap = f" {policy.blocks_to_swap}" if policy.kind == "block_swap" else ""
    return f"{policy.kind}{swap}, {policy.prefetch_blocks} ahead"


def _split_list(text: str) -> Iterator[str]:
    """Return the non-empty items between commas and line ends."""
    return (item.strip() for item in text.replace("\n", ",").split(",") if item.strip())


def _numbers(name: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    found = []
    for item in _split_list(text):
        if not _is_number(item) or not least <= int(item) <= most:
            raise MatrixError(f"{name}: {item!r} is not a number from {least} to {most}: write a list like 1, 2, 4")
        found.append(int(item))
    return tuple(dict.fromkeys(found))


def _is_number(text: str) -> bool:
    # The length is limited because int() refuses thousands of digits with another error.
    return text.isascii() and text.isdecimal() and len(text) < 10


WITHOUT_NUMBER: Mapping[str, Policy] = {
    "layerwise": OffloadPolicy.layerwise(),
    "resident": OffloadPolicy.resident(),
    "auto": AutoOffload(),
}
"""Policies by their names, except the one with a number of blocks."""


def _parse_policy(name: str) -> Policy:
    kind, _, number = name.partition(" ")
    if kind == "block_swap":
        if not _is_number(number):
            raise MatrixError(f"{name!r} has no number of streamed blocks: write block_swap 20, for example")
        return OffloadPolicy.block_swap(int(number))
    if kind not in WITHOUT_NUMBER:
        raise MatrixError(f"{name!r} names no policy: write {POLICY_SYNTAX}, separated by commas")
    if number:
        raise MatrixError(f"{name!r}: {kind} takes no {number!r} here (give the prefetch depth in prefetch)")
    return WITHOUT_NUMBER[kind]


def _with_settings_of(base: Policy, policy: Policy) -> Policy:
    if isinstance(policy, AutoOffload):
        return base if isinstance(base, AutoOffload) else policy
    if isinstance(base, AutoOffload):
        return policy
    depth = base.prefetch_blocks if _streams(base) and _streams(policy) else policy.prefetch_blocks
    return replace(base, kind=policy.kind, prefetch_blocks=depth, blocks_to_swap=policy.blocks_to_swap)


def _streams(policy: Policy) -> TypeGuard[OffloadPolicy]:
    return isinstance(policy, OffloadPolicy) and policy.kind in STREAMING


def _with_prefetch(policy: Policy, depths: tuple[int, ...]) -> list[Policy]:
    if not depths or not _streams(policy):
        return [policy]
    return [replace(policy, prefetch_blocks=depth) for depth in depths]
