"""The figures of a benchmark over workers as Markdown, in the form in which others publish theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from statistics import median

from ..plan.figure_words import seconds_text, size_text
from .bench_figures import CaseFigures, Spread, WorkerMemory

SETTLED = 2
"""Steps that a steady one is not reckoned from: the first ones fill buffers and caches."""


def report(
    title: str,
    found: Sequence[CaseFigures],
    *,
    method: str,
    machine: Mapping[str, str],
    without: Sequence[tuple[str, str]],
) -> str:
    """The whole page. `without` are cases that have no figures, with the reason."""
    parts = [
        f"# {title}",
        "\n".join(f"* {name}: {value}" for name, value in machine.items()),
        f"Method: {method}",
        "## Loading and generation",
        _table(SUMMARY, map(_summary, found)),
        "## Policies head to head",
        _table(HEAD_TO_HEAD, map(_head_to_head, found)),
        "## Who computed which steps, and with how much memory",
        _table(("configuration", "worker", "steps", "peak memory", "average memory"), _workers(found)),
        "## Every step",
        *_every_step(found),
    ]
    if without:
        parts += ["## Not measured", "\n".join(f"* {name}: {why}" for name, why in without)]
    return "\n\n".join(parts) + "\n"


SUMMARY = (
    *("configuration", "start of workers s", "loading s", "generation s", "total s", "peak memory of a worker"),
    *("average memory of a worker", "speedup", "scaling efficiency", "latents of one worker"),
)


def _summary(case: CaseFigures) -> tuple[str, ...]:
    return (
        case.name,
        seconds_text(case.start_s),
        "-" if case.load_s is None else seconds_text(case.load_s),
        _spread(case.generation_s),
        seconds_text(case.total_s),
        size_text(max(memory.peak for memory in case.memory.values())),
        size_text(max(memory.average for memory in case.memory.values())),
        "-" if case.speedup is None else f"{case.speedup:.2f}x",
        "-" if case.efficiency is None else f"{100 * case.efficiency:.0f} %",
        {None: "-", True: "equal", False: "other"}[case.same_latents],
    )


HEAD_TO_HEAD = (
    *("configuration", "generation s", "first step s", "steady step s", "switch step s", "switch / steady"),
    *("weights moved", "from worker to worker"),
)


def _head_to_head(case: CaseFigures) -> tuple[str, ...]:
    steady, switch = _steady(case), _switch(case)
    return (
        case.name,
        _spread(case.generation_s),
        seconds_text(case.step_s[0]),
        seconds_text(steady),
        "-" if switch is None else seconds_text(case.step_s[switch]),
        "-" if switch is None else f"{case.step_s[switch] / steady:.2f}",
        size_text(case.moved_bytes),
        size_text(case.gathered_bytes),
    )


def _workers(found: Sequence[CaseFigures]) -> Iterable[tuple[str, ...]]:
    for case in found:
        for rank, memory in case.memory.items():
            yield case.name, str(rank), _step_words(memory), size_text(memory.peak), size_text(memory.average)


def _every_step(found: Sequence[CaseFigures]) -> Iterable[str]:
    """A table per number of steps: seconds of each step, and since the beginning."""
    for steps, group in groupby(sorted(found, key=lambda case: case.steps), key=lambda case: case.steps):
        cases = list(group)
        sums = [list(accumulate(case.step_s)) for case in cases]
        rows = [
            (
                str(step + 1),
                cases[0].experts[step],
                _phase(cases[0], step),
                *(
                    f"{seconds_text(case.step_s[step])} ({seconds_text(sums[at][step])})"
                    for at, case in enumerate(cases)
                ),
            )
            for step in range(steps)
        ]
        yield _table(("step", "expert", "phase", *(f"{case.name}: s (since start)" for case in cases)), rows)


def _steady(case: CaseFigures) -> float:
    switch = _switch(case)
    later = [seconds for step, seconds in enumerate(case.step_s) if step >= SETTLED and step != switch]
    return median(later or case.step_s)


def _switch(case: CaseFigures) -> int | None:
    pairs = zip(case.experts, case.experts[1:], strict=False)
    return next((step for step, (before, now) in enumerate(pairs, start=1) if before != now), None)


def _phase(case: CaseFigures, step: int) -> str:
    if step == 0:
        return "first"
    if step == _switch(case):
        return "switch of experts"
    return "settling" if step < SETTLED else "steady"


def _spread(spread: Spread) -> str:
    words = seconds_text(spread.median)
    if spread.least == spread.most:
        return words
    return f"{words} ({seconds_text(spread.least)} to {seconds_text(spread.most)})"


def _step_words(memory: WorkerMemory) -> str:
    """`1-4, 7`, counted from 1."""
    runs: list[list[int]] = []
    for step in sorted(memory.steps):
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0] + 1}-{run[-1] + 1}" if len(run) > 1 else str(run[0] + 1) for run in runs)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ("---", *("--:" for _ in head[1:]))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
