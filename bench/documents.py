"""Report documents: Markdown, JSON, CSV, and one HTML page that needs no other file."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape

from ..schema.records import STEP_FIGURES
from .figures import figures_dict
from .report import Report, Table
from .report_tables import every_table

FORMAT = 1
CSV_HEAD = ("variant", "run", "warmup", *STEP_FIGURES, "cumulative_s")

# The page may not load anything: its text comes from a workflow, whose author may be a stranger.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #d8d8d8; --paper: #fff;
        --row: #f3f6fa; --mark: #fdf0dc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --faint: #444; --paper: #1b1d20; --row: #23272c; --mark: #4a3a1c; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 2em auto; max-width: 1180px; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin: 2em 0 .5em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .6em; border-bottom: 1px solid var(--faint); text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 12em; }
tr:nth-child(even) { background: var(--row); }
tr.marked { background: var(--mark); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content auto; gap: .15em 1em; margin: 0; }
dt { opacity: .7; } dd { margin: 0; }
img { max-width: 100%; height: auto; }
"""


def summary(report: Report, tables: Iterable[Table] = ()) -> str:
    """Format title, method, machine, `tables` and the report tables as Markdown."""
    about = [f"{name}: {text}" for name, text in {**report.method, **report.machine}.items()]
    # Two spaces before a line end break the line in Markdown.
    head = f"# {report.title}\n\n" + "  \n".join([*_unfinished(report), *about])
    parts = [head, *(table.markdown() for table in (*tables, *every_table(report)))]
    return "\n\n".join(parts) + "\n"


def json_document(report: Report) -> str:
    """Format the report as JSON: settings, every timeline, and figures by variant."""
    figures = {variant.name: figures_dict(variant) for variant in report.variants}
    data = {"wanstream_report": FORMAT, "done": report.done, **asdict(report), "figures": figures}
    for variant, written in zip(report.variants, data["variants"], strict=True):
        for trial, values in zip(variant.trials, written["trials"], strict=True):
            # `asdict` nests transfers and memory, but `Timeline.from_dict` reads flat steps.
            values["timeline"] = trial.timeline.to_dict()
    return json.dumps(data, indent=1) + "\n"


def csv_document(report: Report) -> str:
    """Format one CSV line per step and run.

    Times in seconds, sizes in bytes, unknown values empty.
    """
    text = io.StringIO()
    # csv writes CRLF by default, and a text file on Windows would turn CRLF into CR CR LF.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for variant in report.variants:
        for number, trial in enumerate(variant.trials, start=1):
            ended = 0.0
            for step in trial.timeline.steps:
                ended += step.wall_s
                run = (_as_text(variant.name), number, int(trial.warmup))
                writer.writerow([*run, *step.to_dict().values(), ended])
    return text.getvalue()


_FORMULA = re.compile(
    "[\\s\0\ufeff]*[=+\\-@\uff1d\uff0b\uff0d\uff20\u2212\ufe63\ufe62\ufe66\ufe6b]|[\\t\\r\\n]"
)
"""Start of a formula. Some spreadsheets ignore spaces, and take full-width signs for plain
ones."""


def _as_text(name: str) -> str:
    """Quote a name that a spreadsheet would evaluate as a formula.

    It may come from a stranger's workflow.
    """
    if _FORMULA.match(name):
        name = f"'{name}"
    return name.replace("\r", " ")  # which the writer does not quote


def html_document(report: Report, chart: bytes) -> str:
    """Format the report as one HTML page. `chart` is a PNG image to embed."""
    about = {**report.method, **report.machine}
    picture = base64.b64encode(chart).decode("ascii")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # The policy applies only to the elements after it, so it stands near the top.
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p><strong>{escape(line)}</strong></p>" for line in _unfinished(report)),
        _definitions(about),
        f'<p><img src="data:image/png;base64,{picture}" width="1100" '
        'alt="Chart; its figures are in the tables"></p>',
        *(table.html() for table in every_table(report)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _unfinished(report: Report) -> Iterator[str]:
    if not report.finished:
        yield f"Unfinished: {report.done} of {report.planned} runs were made."


def _definitions(items: Mapping[str, str]) -> str:
    parts = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items.items())
    return f"<dl>{''.join(parts)}</dl>"
