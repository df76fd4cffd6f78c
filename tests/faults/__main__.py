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
from wanstream.tests.faults.stage import Findings

_COSTS = ("lost", "doubled", "broken", "leaked")


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m wanstream.tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="the same seed is the same campaign (default: 0)")
    add("--kind", default="", help="only kinds with this text in their names")
    add("--first", type=int, help="of each kind only so many cases")

    args = parser.parse_args()
    kinds = [kind for kind in KINDS if args.kind.lower() in kind.name.lower()]
    begun, totals = time.monotonic(), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Campaign(Path(folder), seed=args.seed)) as campaign,
    ):
        print(f"| fault | n | {' | '.join(_COSTS)} | exit codes of all clients | seconds |")
        print("|---|--:|--:|--:|--:|--:|---|--:|")
        for kind in kinds:
            start, found = time.monotonic(), []
            for case in campaign.cases([kind])[: args.first]:
                try:
                    found.append(campaign.run(case))
                except SkippedError as err:
                    print(f"SKIPPED: {kind.name}: {err}", file=sys.stderr, flush=True)
                    break
                _print_costs(kind.name, case.number, found[-1])
            costs = Counter(n=len(found))
            costs.update(cost for each in found for cost in _COSTS if getattr(each, cost))
            codes = sorted(Counter(code for each in found for code in each.codes).items())
            listed = ", ".join(f"{code}: {count}" for code, count in codes)
            _print_row(kind.name, costs, listed, start)
            totals.update(costs)
    _print_row(f"sum, seed {args.seed}", totals, "", begun)
    return int(any(totals[cost] for cost in _COSTS))


def _print_row(name: str, costs: Counter[str], codes: str, begun: float) -> None:
    numbers = " | ".join(str(costs[cost]) for cost in ("n", *_COSTS))
    print(f"| {name} | {numbers} | {codes} | {time.monotonic() - begun:.0f} |", flush=True)


def _print_costs(kind: str, number: int, findings: Findings) -> None:
    for cost in _COSTS:
        for what in getattr(findings, cost):
            print(f"{kind}, case {number}: {cost}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run())
