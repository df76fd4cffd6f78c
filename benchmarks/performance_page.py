"""Writes docs/performance.md and its figures from the newest results of each case.

python benchmarks/performance_page.py [--results FOLDER] [--docs FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wanstream.benchmarks.performance.page import figures, page
from wanstream.benchmarks.performance.results import newest_results

BENCHMARKS = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--docs", type=Path, default=BENCHMARKS.parent / "docs")
    chosen = parser.parse_args()
    results = newest_results(chosen.results)
    files = {"performance.md": page(results), **figures(results)}
    for name, text in files.items():
        (chosen.docs / name).write_text(text, encoding="utf-8")
        print(chosen.docs / name)


if __name__ == "__main__":
    main()
