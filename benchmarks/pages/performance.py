"""Write the tables in the performance pages of docs/ from the newest result by case.

The text around them is not changed.

python benchmarks/pages/performance.py
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from wanstream.bench import Result, Table
from wanstream.benchmarks.offload_case.variants import all_variants
from wanstream.benchmarks.record import RESULTS, newest_results

PAGES = tuple(sorted((RESULTS.parent.parent / "docs").glob("performance*.md")))
PLACE = re.compile(r"(<!-- (\S+): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Generated section of a page, with case and content kind."""
NOTHING = "-"
LIMITED = " (limited)"

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def page(text: str, results: Mapping[str, Result]) -> str:
    """Return `text` with every generated section filled from `results`."""

    def filled(found: re.Match[str]) -> str:
        start, case, kind, end = found.groups()
        lines = (
            CONTENTS[kind](results[case])
            if case in results
            else [f"No result of the case `{case}` yet."]
        )
        return "\n".join([start, *(f"{line}\n" for line in lines), end])

    return PLACE.sub(filled, text)


def provenance(result: Result) -> str:
    """Return a result's date, machine and versions in one line."""
    machine = f"{result.hardware['name']}, {result.hardware['ram_gb']:g} GB RAM"
    software = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.date}, {machine}; {software}"


def figures(name: str, digits: int = 1, unit: str = "") -> Callable[[Row], str]:
    """Return a formatter for the figure or figures with this name. A dash if missing."""

    def words(row: Row) -> str:
        value = row.get(name)
        values = value if isinstance(value, list) else [value]
        return (
            NOTHING if value is None else " / ".join(f"{each:.{digits}f}{unit}" for each in values)
        )

    return words


def steps(digits: int) -> Callable[[Row], str]:
    """Return a formatter for the step seconds, or for the reason why a run failed."""

    def words(row: Row) -> str:
        ended = "why" in row and "step_s" not in row
        return (
            f"{row['why']} after {row['ended_after_s']:.0f} s"
            if ended
            else figures("step_s", digits)(row)
        )

    return words


def latents(row: Row) -> str:
    if row.get("equal_to_resident"):
        return "equal"
    return f"{row['relative_l2']:.1e}" if "relative_l2" in row else NOTHING


def first_to_median(row: Row) -> str:
    taken = row.get("step_s")
    return f"{taken[0] / statistics.median(taken):.2f}" if taken else NOTHING


RUNS: Sequence[Column] = (
    ("runs", figures("runs", 0)),
    ("load s", figures("load_s")),
    ("steps s", steps(1)),
    ("switch / median", figures("switch_to_median", 2)),
    ("total s", figures("total_s")),
    ("steps / resident", figures("steps_to_resident", 2, "x")),
    ("peak RSS GB", figures("peak_rss_gb", 2)),
    ("anonymous GB", figures("peak_anonymous_gb", 2)),
    ("read GB", figures("read_gb")),
    ("CPU s", figures("cpu_s", 0)),
    ("latents", latents),
)
PREDICTED: Sequence[Column] = (
    ("simulated steps s", figures("predicted_step_s")),
    ("executed steps s", steps(1)),
    ("simulated / executed", figures("predicted_to_executed", 2)),
)
GPU: Sequence[Column] = (
    ("steps s", steps(2)),
    ("steps / resident", figures("steps_to_resident", 3, "x")),
    ("first / median", first_to_median),
    ("switch / median", figures("switch_to_median", 2)),
    ("device peak GB", figures("device_peak_gb", 2)),
    ("device weights GB", figures("device_weights_gb", 2)),
    ("host peak GB", figures("peak_rss_gb")),
    ("copies GB/s", figures("copy_gb_per_s")),
    ("latents", latents),
)
SIMULATED: Sequence[Column] = (
    ("steps s", figures("step_s", 2)),
    ("of it waiting s", figures("stall_s", 2)),
    (
        "bus GB/s",
        lambda row: f"{'' if row['bus_was_the_limit'] else 'at least '}{row['bus_gb_per_s']:g}",
    ),
)


def table(rows: Sequence[tuple[str, Row]], columns: Sequence[Column]) -> str:
    """Format a table with a line per variant."""
    lines = tuple((title, *(words(row) for _, words in columns)) for title, row in rows)
    return Table(head=("", *(name for name, _ in columns)), rows=lines).markdown()


def titled(rows: Mapping[str, Row], blocks: int) -> list[tuple[str, Row]]:
    """Return each row with its variant's title, WanStream's first, in `all_variants` order.

    Rows for variants that no longer exist are dropped.
    """
    found = []
    for variant in all_variants(blocks).values():
        for name in sorted(name for name in rows if name.removesuffix(LIMITED) == variant.name):
            disturbed = "" if rows[name].get("calm", True) else " (disturbed)"
            found.append(
                (f"{variant.title}{name.removeprefix(variant.name)}{disturbed}", rows[name])
            )
    # Sorting is stable, so both halves keep the order of `all_variants`.
    return sorted(found, key=lambda line: not line[0].startswith("WanStream"))


def runs(result: Result) -> Iterator[str]:
    yield table(titled(result.figures["variants"], result.figures["blocks"]), RUNS)
    yield from source(result)


def source(result: Result) -> Iterator[str]:
    yield f"Method: {result.method}"
    yield f"`benchmarks/results/{result.name}.json`: {provenance(result)}."


def moved(result: Result) -> Iterator[str]:
    """Yield GB per step with two forward passes, and the ratio to the streamed weights."""
    whole = result.figures["expert_gb"]
    streamed = result.figures["streamed_gb"]
    kinds = {
        variant.title: variant.kind for variant in all_variants(result.figures["blocks"]).values()
    }
    lines = []
    for title, row in titled(result.figures["variants"], result.figures["blocks"]):
        if LIMITED in title or "step_s" not in row:
            continue
        counted = row.get("step_moved_gb")
        kind = kinds.get(title.removesuffix(" (disturbed)"), "")
        if counted:
            known = "counted"
            each = sorted({*counted})
            # All steps of a layerwise run move the same bytes, so one figure is enough.
            words = figures("step_moved_gb", 2)(row) if len(each) > 1 else f"{each[0]:.2f}"
            against = NOTHING if len(each) > 1 else f"{each[0] / streamed:.2f}x"
        elif kind in ("group", "accelerate"):
            known = "by construction: each forward pass brings every weight"
            # Two forward passes per step, one for each side of the guidance.
            words = f"{2 * whole:.2f}"
            against = f"{2 * whole / streamed:.2f}x"
        elif kind in ("swap", "resident"):
            known = "by construction"
            against = NOTHING
            words = f"0, {whole:.2f} at the switch" if kind == "swap" else "0"
        else:
            known = "the system decides"
            words = NOTHING
            against = NOTHING
        lines.append((title, words, against, known))
    yield Table(
        head=("", "GB per step", "of the streamed weights", "known"), rows=tuple(lines)
    ).markdown()


def predicted(result: Result) -> Iterator[str]:
    rows = titled(result.figures["variants"], result.figures["blocks"])
    yield table([(title, row) for title, row in rows if "predicted_step_s" in row], PREDICTED)


def parts(result: Result) -> Iterator[str]:
    """Yield the parts of the GPU case: measured with few blocks, simulated for all."""
    for name, part in result.figures["parts"].items():
        cap = (
            ""
            if part["vram_gb"] is None
            else f", {part['vram_gb']} GB of VRAM for all but the resident model"
        )
        yield f"### {name}: {part['tokens']} tokens, 2 x {part['blocks']} blocks{cap} (measured)"
        yield table(titled(part["variants"], part["blocks"]), GPU)
        if part["simulated_40_blocks"]:
            yield "The same with 40 blocks, **simulated** from the rates of that run:"
            yield table(titled(part["simulated_40_blocks"], part["blocks"]), SIMULATED)
    yield from source(result)


CONTENTS: Mapping[str, Callable[[Result], Iterator[str]]] = {
    "runs": runs,
    "moved": moved,
    "predicted": predicted,
    "parts": parts,
}


if __name__ == "__main__":
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(page(text, newest_results(RESULTS)), encoding="utf-8")
        print(path)
