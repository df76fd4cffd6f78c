"""Write the table in docs/hardware.md from `wanstream selftest` files in benchmarks/results.

python benchmarks/pages/hardware.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from wanstream.bench import Result, Table
from wanstream.benchmarks.record import RESULTS, saved_results
from wanstream.plan.machine import GPUS
from wanstream.schema.text import format_rate

PAGE = RESULTS.parent.parent / "docs" / "hardware.md"
PLACE = re.compile(r"(<!-- selftests -->\n).*?(<!-- end -->)", re.DOTALL)
EXPECTED = (*GPUS, "AMD GPU (ROCm)", "Intel GPU (XPU)", "Apple GPU (MPS)")
"""Cards with a row, with or without a file."""
HEAD = (
    *(
        "card",
        "checks",
        "versions",
        "RAM to device",
        "file to RAM",
        "block",
        "share of limit",
        "streamed / longer",
    ),
    "file",
)


def page(text: str, results: Sequence[Result]) -> str:
    """Return `text` with the table for `results`, and an empty row per other expected card."""
    measured = [_row(result) for result in sorted(results, key=lambda each: each.name)]
    # Dashes at both ends, so a name matches whole words only.
    names = [f"-{_plain(row[0])}-" for row in measured]
    missing = [card for card in EXPECTED if not any(f"-{_plain(card)}-" in name for name in names)]
    rows = (*measured, *((card, *("" for _ in HEAD[1:])) for card in missing))
    # A function returns the text, because `re` would interpret backslashes in a plain string.
    return PLACE.sub(
        lambda found: f"{found[1]}\n{Table(head=HEAD, rows=rows).markdown()}\n\n{found[2]}", text
    )


def selftests() -> list[Result]:
    """Return all `wanstream selftest` results."""
    return saved_results(names="selftest_*")


def _row(result: Result) -> tuple[str, ...]:
    figures = result.figures
    described = figures["described"]
    machine = figures.get("machine", {})
    checks = figures["checks"]
    outcomes = Counter(
        check["outcome"] for check in checks.values() if check["outcome"] != "not needed"
    )
    h2d, disk, flops = (
        machine.get(name) for name in ("h2d_bytes_per_s", "disk_bytes_per_s", "flops_per_s")
    )
    ratio = checks["overlap"]["figures"].get("ratio")
    arithmetic = checks.get("arithmetic", {}).get("figures", {}).get("arithmetic", {})
    shares = ", ".join(f"{name} {times['limit_share']:.0%}" for name, times in arithmetic.items())
    card = described["Device"] if machine.get("computes_on") != "cpu" else described["Processor"]
    return (
        card,
        ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()),
        f"{described['Versions']}, {described['System']}",
        "" if h2d is None else format_rate(h2d),
        "" if disk is None else format_rate(disk),
        "" if flops is None else f"{flops / 1e12:.2f} TFLOP/s",
        shares,
        "" if ratio is None else f"{ratio:.2f}",
        f"`{result.name}`",
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), selftests()), encoding="utf-8")
    print(PAGE)
