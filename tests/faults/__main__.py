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
    parser.add_argument(
        "--seed", type=int, default=0, help="the same seed is the same campaign (default: 0)"
    )
    parser.add_argument("--kind", default="", help="only kinds with this text in their names")
    parser.add_argument("--first", type=int, help="of each kind only so many cases")
    parser.add_argument(
        "--from", dest="begin", default="", help="only this kind and those after it"
    )
    args = parser.parse_args()
    names = [kind.name for kind in KINDS]
    begin = names.index(args.begin) if args.begin else 0
    kinds = [kind for kind in KINDS[begin:] if args.kind.lower() in kind.name.lower()]
    begun, totals = time.monotonic(), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Campaign(Path(folder), seed=args.seed)) as campaign,
    ):
        print(
            "| fault | n | lost | doubled | broken | leaked | exit codes of all clients | seconds |"
        )
        print("|---|--:|--:|--:|--:|--:|---|--:|")
        for kind in kinds:
            start, found = time.monotonic(), []
            cases = campaign.cases([kind])[: args.first]
            for case in cases:
                try:
                    found.append(campaign.run(case))
                except SkippedError as err:
                    print(f"SKIPPED: {kind.name}: {err}", file=sys.stderr, flush=True)
                    break
                _tell(kind.name, case.number, found[-1])
            costs = {cost: sum(bool(getattr(each, cost)) for each in found) for cost in _COSTS}
            codes = Counter(code for each in found for code in each.codes)
            listed = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
            numbers = " | ".join(str(costs[cost]) for cost in _COSTS)
            print(
                f"| {kind.name} | {len(found)} | {numbers} | {listed} | "
                f"{time.monotonic() - start:.0f} |",
                flush=True,
            )
            totals.update({"n": len(found), **costs})
    numbers = " | ".join(str(totals[cost]) for cost in ("n", *_COSTS))
    print(f"| sum, seed {args.seed} | {numbers} | | {time.monotonic() - begun:.0f} |")
    return int(any(totals[cost] for cost in _COSTS))


def _tell(kind: str, number: int, findings: Findings) -> None:
    for cost in _COSTS:
        for what in getattr(findings, cost):
            print(f"{kind}, case {number}: {cost}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run())
