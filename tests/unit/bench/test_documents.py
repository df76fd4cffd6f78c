"""Documents show the timelines' numbers, and the page loads and runs nothing."""

import base64
import csv
import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from wanstream.bench.documents import csv_document, html_document, json_document, summary
from wanstream.bench.report_tables import every_table
from wanstream.schema.records import Timeline
from wanstream.tests.support.bench_runs import make_report, make_timeline, make_variant

CHART = b"a PNG"


@pytest.fixture
def report():
    """Two variants. The first one has two trials: a warm-up and a counted run."""
    times = {"stall_s": 0.25, "stall_on_read_s": 0.125, "decode_s": 0.0625, "copy_s": 0.375}
    sizes = {"copied_bytes": 10**9, "read_bytes": 3 * 10**9, "device_bytes": 23 * 10**9}
    run = make_timeline(2.5, 1.25, 1.5, 3.75, 1.125, read_s=1.5, rss_bytes=7, **times, **sizes)
    one = make_variant("a", make_timeline(9, 9, 9, 9, 9), run)
    cold, warm = one.trials
    one = replace(one, trials=(replace(cold, warmup=True), warm))
    return make_report(one, make_variant("b", make_timeline(1, 1)))


class Page(HTMLParser):
    """A page's tables by title, and all tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self._inside = ""
        self._title = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "tr":
            self.tables.setdefault(self._title, []).append([])
        if tag in {"th", "td"}:
            self.tables[self._title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self._title = data
        elif self._inside in {"th", "td"}:
            self.tables[self._title][-1][-1] += data


def test_json_holds_every_timeline_as_it_is(report):
    written = json.loads(json_document(report))
    assert (written["wanstream_report"], written["finished"], written["done"]) == (1, True, 3)
    assert [each["name"] for each in written["variants"]] == ["a", "b"]
    trials = [trial for variant in report.variants for trial in variant.trials]
    stored = [trial for variant in written["variants"] for trial in variant["trials"]]
    timelines = [trial.timeline for trial in trials]
    assert [Timeline.from_dict(each["timeline"]) for each in stored] == timelines
    assert [each["warmup"] for each in stored] == [trial.warmup for trial in trials]
    total = written["figures"]["a"]["Total denoising"]
    assert total == {"median": 10.125, "low": 10.125, "high": 10.125, "runs": 1, "unit": "s"}


def test_csv_has_a_line_for_each_step_of_each_run(report):
    lines = [*csv.DictReader(io.StringIO(csv_document(report)))]
    assert len(lines) == 5 + 5 + 2
    counted = lines[5:10]
    run = report.variants[0].measured[0]
    for line, step in zip(counted, run.steps, strict=True):
        assert (line["variant"], line["run"], line["warmup"]) == ("a", "2", "0")
        for name, value in step.to_dict().items():
            assert line[name] == ("" if value is None else str(value)), name
    assert float(counted[-1]["cumulative_s"]) == run.wall_s
    assert [line["warmup"] for line in lines[:5]] == ["1"] * 5


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *((name, f"'{name}") for name in ("=1+1", "@SUM(1)", "\t=1", "\n=1", " =1", "\ufeff=1")),
        *((f"{sign}1", f"'{sign}1") for sign in "+-\uff1d\uff0b\uff0d\uff20\u2212"),
        ("\r=1", "' =1"),
        ('a, "b"\n= c', 'a, "b"\n= c'),
    ],
)
def test_no_name_is_a_formula_in_a_spreadsheet(name, cell):
    """Names are node titles, which come with a workflow."""
    written = csv_document(make_report(make_variant(name, make_timeline(1, 1))))
    lines = csv.DictReader(io.StringIO(written, newline=""))
    assert [line["variant"] for line in lines] == [cell, cell]


def test_page_and_summary_have_every_table(report):
    page = Page(html_document(report, b""))
    tables = [*every_table(report)]
    assert [*page.tables] == [table.title for table in tables]
    for table in tables:
        head, *rows = page.tables[table.title]
        assert (tuple(head), tuple(map(tuple, rows))) == (table.head, table.rows)
        assert table.markdown() in summary(report)


def test_page_needs_no_other_file_and_runs_nothing(report):
    page = html_document(report, CHART)
    seen = Page(page)
    assert not {"script", "link", "iframe", "object", "image", "use"} & seen.tags
    sources = [value or "" for name, value in seen.attributes if name in {"src", "href"}]
    assert sources == ["data:image/png;base64," + base64.b64encode(CHART).decode()]
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_texts_of_a_workflow_stay_text():
    evil = '</td><script>alert("1")</script><img src=x onerror=alert(1)>'
    variants = [make_variant(evil, make_timeline(1, 1), settings={evil: evil})]
    variants.append(make_variant("b", failed=evil))
    report = make_report(*variants, title=evil, method={evil: evil}, machine={evil: evil})
    seen = Page(html_document(report, CHART))
    assert "script" not in seen.tags
    assert "onerror" not in {name for name, _ in seen.attributes}
    assert evil in [cell for rows in seen.tables.values() for row in rows for cell in row]


def test_unfinished_report_says_so(report):
    unfinished = replace(report, finished=False, planned=12)
    words = "Unfinished: 3 of 12 runs were made."
    for document in (summary(unfinished), html_document(unfinished, b"")):
        assert words in document
    assert words not in summary(report)
    assert json.loads(json_document(unfinished))["finished"] is False
    empty = make_report(make_variant("a"), make_variant("b"), finished=False, planned=2)
    assert json.loads(json_document(empty))["figures"] == {"a": {}, "b": {}}
    assert csv_document(empty).count("\n") == 1
    assert "Unfinished: 0 of 2 runs" in summary(empty)


def test_method_and_machine_are_in_every_document(report):
    for document in (summary(report), html_document(report, b""), json_document(report)):
        for word in ("Runs", "3", "Device", "CPU"):
            assert word in document
