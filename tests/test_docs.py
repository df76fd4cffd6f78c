"""Pages in `docs/` are short and linked, and their nodes, commands and paths exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from wanstream.batch.running.collector import MAX_FILES
from wanstream.batch.running.failures import MAX_LOSSES
from wanstream.batch.running.runner import GRACE_SECONDS
from wanstream.batch.servers.server_backend import MAX_BODY_BYTES, MAX_FILE_BYTES
from wanstream.block_kernels import ATTENTIONS, int8_attention
from wanstream.cli import _COMMANDS, _parser, options
from wanstream.cli.batch.ray_backend import PIECE
from wanstream.cli.selftest.device_checks import LOCK_BYTES
from wanstream.distributed.clusters import OPTIONAL, REQUIRED
from wanstream.distributed.driver import driver, heartbeat
from wanstream.distributed.ray.pool import START_TIMEOUT_S
from wanstream.host.run_events import KEPT_RUNS
from wanstream.offload.formats.safetensors_header import MAX_HEADER_BYTES
from wanstream.sampling import saved_states
from wanstream.sampling.cache import PRESETS
from wanstream.schema import Mesh
from wanstream.schema.policy import SMALLEST_BLOCK, SMALLEST_LAYER
from wanstream.schema.records.timeline import STEP_FIGURES
from wanstream.schema.refs import WEIGHT_PLACEMENTS, KernelSet
from wanstream.shapes.block_times import WORTHWHILE
from wanstream.telemetry.trace import MAX_SPANS
from wanstream.tests.support.host.given_nodes import PACK
from wanstream.tools.code_counts import SourceTree
from wanstream.tools.model_files import MODEL_FILES
from wanstream.wan.measurement.meter import METERED_TOKENS

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
TEXTS = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ROOT_PAGES}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EACH_TEXT = pytest.mark.parametrize("name", sorted(TEXTS))
TITLES = {node.define_schema().display_name for node in PACK}
NODES = TITLES | {title.partition(" (")[0] for title in TITLES}
FAMILIES = {"Wan Animate", "Wan Bernini", "Wan Dancer"}
"""Native models, not nodes."""
FOLDERS = "benchmarks|docs|scripts|tests|workflows/api"
NEVER_RUN = re.compile(r"never run|nothing on this page was measured|no figure here|we measured no")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_has_120_lines_at_most(name):
    assert len(PAGES[name].splitlines()) <= 120


def test_every_page_is_reached_from_the_readme():
    reached: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\((?:docs/|\.\./)?([\w-]+\.md)[#)]", TEXTS[page])
            waiting += [link for link in links if link in TEXTS]
    assert {*TEXTS} <= reached


def test_pages_for_several_gpus_begin_with_what_was_never_run():
    section = PAGES["start.md"].partition("### Several GPUs")[2].partition("\n### ")[0]
    listed = re.findall(r"\]\(([\w-]+\.md)\)", section)
    prefixes = ("workers", "scaling", "batch-ray", "batch-servers")
    assert {*listed} == {name for name in PAGES if name.startswith(prefixes)}
    for name in listed:
        assert NEVER_RUN.search(" ".join(PAGES[name].lower().splitlines()[:5])), name


@EACH_TEXT
def test_every_node_in_bold_or_in_a_table_is_ours(name):
    bold = re.findall(r"\*\*((?:Wan|Load |Stream |Join |Split )[^*]*?)\*\*", TEXTS[name])
    assert {text for text in bold if not text.endswith((".", ":"))} <= NODES
    rows = "\n".join(line for line in TEXTS[name].splitlines() if line.startswith("|"))
    for node in sorted(NODES, key=len, reverse=True):
        rows = rows.replace(node, "")
    assert {*re.findall(r"\bWan(?:Stream)? [A-Z][a-z]+\b", rows)} <= FAMILIES
    assert "(streamed)" not in rows


@EACH_TEXT
def test_every_command_line_is_accepted(name):
    lines = [line for block in FENCED.findall(TEXTS[name]) for line in block.splitlines()]
    for line in lines:
        if line.startswith("wanstream "):
            parsed = _parser().parse_args(shlex.split(line, comments=True)[1:])
            options.parsed_options(parsed.kind, parsed)


@EACH_TEXT
def test_every_command_in_a_sentence_has_these_options(name):
    choices = [action.choices for action in _parser()._actions]
    (commands,) = (each for each in choices if isinstance(each, dict))
    for command, words in re.findall(r"`wanstream ([\w-]+)([^`]*)`", FENCED.sub("", TEXTS[name])):
        flags = {word for word in words.split() if word.startswith("--")}
        assert flags <= {*commands[command]._option_string_actions}, command


@EACH_TEXT
def test_every_path_of_this_repository_is_there(name):
    found = re.findall(rf"(?<![\w./-])(?:\.\./)?((?:{FOLDERS})/[\w./*-]+)", TEXTS[name])
    for path in found:
        assert [*ROOT.glob(path.rstrip("./"))], path


WORD = re.compile(r"[\w\0][\w\0'./-]*")
FILLED = re.compile(r"\.\.\.|'[^']*'|\[[^]]*\]|\b(?:[NM]|PATH|MACHINE)\b|(?<![\w.])\d[\d.,]*\b")
"""Parts of a quoted message filled in by a run."""


def _texts(module: ast.Module) -> Iterator[str]:
    """Yield the texts in a module, except docstrings, with NUL for each value filled in."""
    docstrings = {id(each.value) for each in ast.walk(module) if isinstance(each, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def _words(text: str) -> list[str]:
    return ["\0" if "\0" in word else word for word in WORD.findall(text)]


def test_every_quoted_message_has_the_words_of_the_code():
    """Adjacent words in a message are adjacent in the code too, or have a value in between."""
    modules = SourceTree(ROOT).trees.values()
    known = {
        pair for module in modules for text in _texts(module) for pair in pairwise(_words(text))
    }
    pages = [ROOT / "docs" / "workers-faults.md", *(ROOT / "web" / "docs").glob("*.md")]
    messages = [
        message
        for page in pages
        for line in page.read_text(encoding="utf-8").partition("## Errors")[2].splitlines()
        for message in re.findall("`([^`]+)`", line.split("|")[1] if line[:1] == "|" else "")
    ]
    assert len(messages) > 300
    foreign = {
        message: f"{first} {second}"
        for message in messages
        for part in FILLED.split(message)
        for first, second in pairwise(_words(part))
        if not {(first, second), (first, "\0"), ("\0", second)} & known
    }
    assert foreign == {}


LISTED: dict[tuple[str, str], Iterable[str]] = {
    ("caching", "preset | threshold"): [f"{name} {value:g}" for name, value in PRESETS.items()],
    ("cli", "command"): _COMMANDS,
    ("kernels", "`attention`"): ATTENTIONS,
    ("kernels", "`kernels`"): get_args(KernelSet),
    ("timeline", "field"): STEP_FIGURES,
    ("workers", "key"): [*REQUIRED, *OPTIONAL],
    ("workers-splits", "`weights`"): WEIGHT_PLACEMENTS,
    ("workers-splits", "split"): [field.name for field in fields(Mesh)],
}
"""Choices and names in the code, by page and by the head of a table's first columns."""


@pytest.mark.parametrize(("page", "head"), LISTED)
def test_table_lists_what_the_code_has(page, head):
    rows = PAGES[f"{page}.md"].partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    columns = head.count("|") + 1
    cells = [" ".join(row.strip("| ").split(" | ")[:columns]) for row in rows]
    found = [name for cell in cells for name in re.findall("`([^`]+)`", cell) or [cell]]
    assert sorted(found) == sorted(LISTED[page, head])


LIMITS: dict[str, list[str]] = {
    "SECURITY.md": [
        f"{MAX_BODY_BYTES >> 20} MB for a JSON response after decompression, "
        f"{MAX_FILE_BYTES >> 30} GB for a file, {MAX_FILES:,} files for a row",
        f"A header has at most {MAX_HEADER_BYTES / 1e6:g} MB",
    ],
    "api.md": [f"lists the last {KEPT_RUNS} runs"],
    "arithmetic.md": [
        f"at most {WORTHWHILE} times a visit in the compute dtype",
        f"with up to {METERED_TOKENS:,} tokens",
    ],
    "batch-ray.md": [f"in pieces of {PIECE >> 20} MB", f"After {GRACE_SECONDS:g} seconds other"],
    "batch-servers.md": [f"to the others after {GRACE_SECONDS:g} seconds"],
    "hardware.md": [f"page-locks up to {LOCK_BYTES >> 30} GB of RAM"],
    "kernels.md": [f"a relative error above {int8_attention.LARGEST_ERROR:.0%}".replace("%", " %")],
    "native-models.md": [
        f"{SMALLEST_BLOCK / 1e6:g} MB of matrices or more, and linear layers of "
        f"{SMALLEST_LAYER / 1e6:g} MB or more",
    ],
    "overlay.md": [f"the server's last {KEPT_RUNS} runs"],
    "timeline.md": [f"in the first {MAX_SPANS:,} slices"],
    "workers-faults.md": [
        f"older than {saved_states.MAX_AGE_S / 86400:g} days, and the oldest ones above "
        f"{saved_states.MAX_BYTES >> 30} GB",
        f"at most {driver.HANDOVER_BYTES_PER_S / 1e6:g} MB a second",
        f"did not start within {START_TIMEOUT_S:g} s",
    ],
}
"""Words around a limit, with the code's value, by page."""
IN_WORDS = {
    "fails after five such losses": MAX_LOSSES == 5,
    "and once a minute": driver.HANDOVER_S == 60,
    "two minutes longer before the first block": heartbeat.OPENING_S == 120,
    "ten times the slowest step": heartbeat.SLOWER == 10,
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_that_of_the_code(name):
    words = " ".join(TEXTS[name].split())
    assert [limit for limit in LIMITS[name] if limit not in words] == []


def test_limits_in_words_are_those_of_the_code():
    words = " ".join(" ".join(PAGES.values()).split())
    assert [limit for limit, is_true in IN_WORDS.items() if not is_true or limit not in words] == []


def _kind(file: str) -> str:
    """Return the name shared by both experts' files, for text and for images."""
    return re.sub("high|low", "", file.lower()).replace("i2v", "t2v").replace("v1.1", "v1")


def test_files_of_all_workflows_are_listed():
    paths = (ROOT / "workflows" / "api").glob("*.json")
    used = "".join(path.read_text(encoding="utf-8") for path in paths)
    section = PAGES["workflows.md"].partition("## Model files")[2]
    named = [_kind(name) for name in re.findall(r"`([\w.-]+)`", section)]
    beginnings = tuple(name.removesuffix("...") for name in named if name[-3:] == "...")
    files = [name for name in MODEL_FILES if f'"{name}"' in used]
    assert len(files) > 30
    left = [name for name in files if _kind(name) not in named]
    assert [name for name in left if not _kind(name).startswith(beginnings)] == []
