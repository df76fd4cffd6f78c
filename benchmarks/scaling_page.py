"""Writes docs/scaling.md and its figures: 1 to 64 GPUs as the planner sees them, beside what others have measured.

python benchmarks/scaling_page.py [--docs FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wanstream.benchmarks.scaling.page import figures, page


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", type=Path, default=Path(__file__).parent.parent / "docs")
    chosen = parser.parse_args()
    for name, text in {"scaling.md": page(), **figures()}.items():
        (chosen.docs / name).write_text(text, encoding="utf-8")
        print(chosen.docs / name)


if __name__ == "__main__":
    main()
