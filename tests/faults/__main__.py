"""`python -m wanstream.tests.faults`: the campaign of faults, and a table of costs by kind."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from wanstream.tests.faults.campaign import Campaign
from wanstream.tests.faults.cases import KINDS, SkippedError

_COSTS = ("lost", "doubled", "broken", "leaked")


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m wanstream.tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="the same seed is the same campaign (default: 0)")
    add("--kind", default="", help="only kinds with this text in their names")
    add("--first", type=int, help="of each kind only so many cases")

    args = parser.parse_args()
    begun = time.monotonic()
    totals = Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Campaign(Path(folder), seed=args.seed)) as campaign,
    ):
        print(f"| fault | n | {' | '.join(_COSTS)} | exit codes of all clients | seconds |")
        print("|---|--:|--:|--:|--:|--:|---|--:|")
        for kind in (kind for kind in KINDS if args.kind.lower() in kind.name.lower()):
            start = time.monotonic()
            costs = Counter[str]()
            codes = Counter[int]()
            for number in range(campaign.count(kind))[: args.first]:
                try:
                    findings = campaign.run(kind, number)
                except SkippedError as err:
                    print(f"SKIPPED: {kind.name}: {err}", file=sys.stderr, flush=True)
                    break
                codes.update(findings.codes)
                costs["n"] += 1
                for cost in _COSTS:
                    found = getattr(findings, cost)
                    costs[cost] += bool(found)
                    for what in found:
                        where = f"{kind.name}, case {number}"
                        print(f"{where}: {cost}: {what}", file=sys.stderr, flush=True)
            listed = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
            _print_row(kind.name, costs, listed, start)
            totals.update(costs)
    _print_row(f"sum, seed {args.seed}", totals, "", begun)
    return int(any(totals[cost] for cost in _COSTS))


def _print_row(name: str, costs: Counter[str], codes: str, begun: float) -> None:
    numbers = " | ".join(str(costs[cost]) for cost in ("n", *_COSTS))
    print(f"| {name} | {numbers} | {codes} | {time.monotonic() - begun:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run())
