"""The matrix of a benchmark: policies x prefetch x steps, written as words, made into the runs that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from ..plan import AutoOffload
from ..schema import OffloadPolicy

Policy: TypeAlias = OffloadPolicy | AutoOffload

POLICY_WORDS = "layerwise, block_swap N, resident or auto"
MOST_AHEAD = 8
MOST_STEPS = 1000
STREAMING = ("layerwise", "block_swap")
"""Kinds of policies that a prefetch depth means something to."""


class MatrixError(ValueError):
    """Words that make no matrix; the message says which words would."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One place of a matrix: how experts are streamed, and how many steps are taken; None leaves the steps alone."""

    policy: Policy
    steps: int | None = None

    @property
    def name(self) -> str:
        """`block_swap 20, 1 ahead, 8 steps` and the like."""
        steps = "" if self.steps is None else f", {self.steps} steps"
        return f"{policy_name(self.policy)}{steps}"


@dataclass(frozen=True, kw_only=True)
class TrialMatrix:
    """What is varied; an empty field varies nothing: it is as in the run that is repeated."""

    policies: tuple[str, ...] = ()
    """Each "layerwise", "block_swap N", "resident" or "auto"."""
    prefetch: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @classmethod
    def parse(cls, policies: str, prefetch: str, steps: str) -> TrialMatrix:
        """Read three lists of words, each separated by commas. Raises MatrixError."""
        names = tuple(" ".join(word.split()) for word in _words(policies))
        for name in names:
            _check_policy(name)
        matrix = cls(
            policies=names,
            prefetch=_numbers("prefetch", prefetch, least=0, most=MOST_AHEAD),
            steps=_numbers("steps", steps, least=1, most=MOST_STEPS),
        )
        if matrix.policies:
            matrix.settings(OffloadPolicy.layerwise())  # which run it is for makes no difference now
        return matrix

    @property
    def is_empty(self) -> bool:
        return not (self.policies or self.prefetch or self.steps)

    def settings(self, asked: Policy) -> tuple[Setting, ...]:
        """Every setting once, for a run that was asked for with the policy `asked`.

        What `asked` says about RAM and about tokens at once holds for all policies but auto, which plans both itself.
        Raises MatrixError where a prefetch depth is varied and no policy has one.
        """
        policies = [_policy(name, asked) for name in self.policies] or [asked]
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
    """The words by which a matrix asks for `policy`, and its prefetch depth."""
    if isinstance(policy, AutoOffload):
        return "auto"
    if policy.kind == "resident":
        return "resident"
    swap = f" {policy.blocks_to_swap}" if policy.kind == "block_swap" else ""
    return f"{policy.kind}{swap}, {policy.prefetch_blocks} ahead"


def _words(text: str) -> Iterator[str]:
    """The parts between commas and line ends, without the empty ones."""
    return (word.strip() for word in text.replace("\n", ",").split(",") if word.strip())


def _numbers(name: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    found = []
    for word in _words(text):
        if not _is_number(word) or not least <= int(word) <= most:
            raise MatrixError(f"{name}: {word!r} is no number from {least} to {most}: write a list like 1, 2, 4")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


def _is_number(word: str) -> bool:
    """Longer ones are no numbers of anything here, and Python reads only so many digits."""
    return word.isascii() and word.isdecimal() and len(word) < 10


def _check_policy(name: str) -> None:
    kind, _, number = name.partition(" ")
    if kind not in (*STREAMING, "resident", "auto"):
        raise MatrixError(f"{name!r} names no policy: write {POLICY_WORDS}, separated by commas")
    if kind == "block_swap" and not _is_number(number):
        raise MatrixError(f"{name!r} does not say how many blocks are streamed: write block_swap 20, for example")
    if kind != "block_swap" and number:
        raise MatrixError(f"{name!r}: {kind} takes no {number!r} here (how many blocks lie ahead is said in prefetch)")


def _policy(name: str, asked: Policy) -> Policy:
    """The policy that the words name, with what `asked` says about anything else."""
    kind, _, number = name.partition(" ")
    if kind == "auto":
        return asked if isinstance(asked, AutoOffload) else AutoOffload()
    base = asked if isinstance(asked, OffloadPolicy) else OffloadPolicy.layerwise()
    if kind == "resident":
        return replace(base, kind="resident", prefetch_blocks=0, blocks_to_swap=0)
    ahead = base.prefetch_blocks if base.kind in STREAMING else 1
    if kind == "layerwise":
        return replace(base, kind="layerwise", prefetch_blocks=ahead, blocks_to_swap=0)
    return replace(base, kind="block_swap", prefetch_blocks=ahead, blocks_to_swap=int(number))


def _streams(policy: Policy) -> bool:
    return isinstance(policy, OffloadPolicy) and policy.kind in STREAMING


def _with_prefetch(policy: Policy, depths: tuple[int, ...]) -> Iterator[Policy]:
    if not isinstance(policy, OffloadPolicy) or policy.kind not in STREAMING or not depths:
        yield policy
        return
    for depth in depths:
        yield replace(policy, prefetch_blocks=depth)
