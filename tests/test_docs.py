"""Pages are short and linked. Their nodes, commands, paths and examples exist, figures are true."""

import ast
import json
import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest
import torch

from wanstream.batch.running.collector import MAX_FILES
from wanstream.batch.running.failures import MAX_LOSSES
from wanstream.batch.running.runner import GRACE_SECONDS
from wanstream.batch.servers.server_backend import MAX_BODY_BYTES, MAX_FILE_BYTES
from wanstream.block_kernels import ATTENTIONS, int8_attention
from wanstream.cli import _COMMANDS, _parser, options
from wanstream.cli.batch.ray_backend import PIECE
from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import run_shape
from wanstream.cli.selftest.device_checks import LOCK_BYTES
from wanstream.distributed.clusters import OPTIONAL, REQUIRED
from wanstream.distributed.driver import driver, heartbeat
from wanstream.distributed.ray.pool import START_TIMEOUT_S
from wanstream.host.run_events import KEPT_RUNS
from wanstream.offload.formats.safetensors_header import MAX_HEADER_BYTES
from wanstream.plan import Budgets, expected_machine, plan_offload
from wanstream.plan.programs.visits import split_at_boundary
from wanstream.sampling import saved_states
from wanstream.sampling.cache import PRESETS
from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.schema import SMALLEST_BLOCK, SMALLEST_LAYER, Mesh, OffloadPolicy
from wanstream.schema.records.timeline import STEP_FIGURES
from wanstream.schema.refs import WEIGHT_PLACEMENTS, KernelSet
from wanstream.shapes.block_times import WORTHWHILE
from wanstream.shapes.expert import T2V_A14B
from wanstream.telemetry.trace import MAX_SPANS
from wanstream.tests.support.host.given_nodes import PACK
from wanstream.tests.support.plan_fixtures import needs_of, predicted
from wanstream.tools.code_counts import SourceTree
from wanstream.tools.model_files import MODEL_FILES
from wanstream.tools.templates import TITLES as TEMPLATES
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
    for line in [line for block in FENCED.findall(TEXTS[name]) for line in block.splitlines()]:
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
    for path in re.findall(rf"(?<![\w./-])(?:\.\./)?((?:{FOLDERS})/[\w./*-]+)", TEXTS[name]):
        assert [*ROOT.glob(path.rstrip("./"))], path


WORD = re.compile(r"[\w\0][\w\0'./-]*")
FILLED = re.compile(r"\.\.\.|'[^']*'|\[[^]]*\]|\b(?:[NM]|PATH|MACHINE)\b|(?<![\w.])\d[\d.,]*\b")
"""Parts of a quoted message filled in by a run."""


def _texts(module):
    """Yield the texts in a module, except docstrings, with NUL for each value filled in."""
    docstrings = {id(each.value) for each in ast.walk(module) if isinstance(each, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def _words(text: str) -> list[str]:
    return ["\0" if "\0" in word else word for word in WORD.findall(text)]


def test_every_quoted_message_has_the_words_of_the_code():
    """Adjacent words in a message are adjacent in the code too, or have a value in between."""
    modules = SourceTree(ROOT).trees.values()
    known = {pair for each in modules for text in _texts(each) for pair in pairwise(_words(text))}
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


LISTED = {
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
        f"{SMALLEST_LAYER / 1e6:g} MB or more"
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


README = TEXTS["README.md"]
LAYERWISE = OffloadPolicy.layerwise(1)


def test_python_example_makes_frames(sample_models, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["cli.md"], flags=re.DOTALL)
    small = {'"cuda"': '"cpu"', "(1, 16, 21, 60, 104)": "(1, 16, 3, 6, 8)", "steps=20": "steps=3"}
    for written, smaller in small.items():
        assert code.count(written) == 1
        code = code.replace(written, smaller)
    monkeypatch.chdir(sample_models / "diffusers")
    names = {}
    exec(compile(code, "cli.md", "exec"), names)  # noqa: S102 - our own example
    assert names["frames"].shape == (1, 9, 48, 64, 3)
    assert torch.isfinite(names["frames"]).all()
    assert [step.expert for step in names["result"].timeline.steps] == ["high", "high", "low"]


def test_it_is_short_and_needs_no_glossary():
    assert len(README.splitlines()) <= 80
    assert re.findall(r"\b(?:lanes?|layerwise|visits?)\b", README, re.IGNORECASE) == []


def test_measured_cards_have_the_figures_of_the_result():
    result = ROOT / "benchmarks" / "results" / "kernels-gpu_nvidia-h100-80gb-hbm3_20261127.json"
    runs = json.loads(result.read_text(encoding="utf-8"))["figures"]["runs"]
    row = r"^\| H100 \| (\d+) frames, .*? \| (.+) \| measured \|$"
    rows = re.findall(row, README, re.MULTILINE)
    cells = "{device_peak_gb:.1f} | {rss_gb:.0f} | {median_step_s:.2f}"
    expected = {name: cells.format(**run["streamed"]) for name, run in runs.items()}
    assert {f"480p{frames}": row for frames, row in rows} == expected
    long = runs["480p81"]
    assert f"**{long['streamed']['device_peak_gb']:.1f} GB on" in README
    assert f"instead of {long['resident']['device_peak_gb']:.1f}**" in README
    assert f"**{long['streamed']['to_resident']:.3f} times**" in README


def simulated(gpu, size):
    """Return the run and the machine of a simulated row."""
    options = PlanOptions(machine=MachineOptions(gpu=gpu), size=size, steps=4, cfg="none")
    machine = expected_machine(gpu, ram_bytes=32 * 2**30, disk_bytes_per_s=3.5e9)
    return run_shape(options), machine


def test_simulated_cards_have_the_figures_of_the_planner():
    """The planner chooses the policy with two buffers for the fastest and the slowest card."""
    section = (
        PAGES["performance.md"].partition("## Other cards (simulated)")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (\w+ \d.*?) \| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    sizes = {"832x480x81": "4.8", "1280x720x81": "9.2"}
    for card, *step_s in rows:
        for (size, vram_gb), step in zip(sizes.items(), step_s, strict=True):
            run, machine = simulated(card, size)
            needs = needs_of(run, machine, LAYERWISE)
            assert f"{predicted(run, machine, LAYERWISE).total_s / 4:.1f}" == step, card
            assert f"{needs.device_bytes / 1e9:.1f}" == vram_gb, card
            assert f"{needs.host_bytes / 1e9:.1f}" == "1.4", card
    for card in ("A100 80GB", "RTX 3060 12GB"):
        assert plan_offload(*simulated(card, "832x480x81"), Budgets()).policy == LAYERWISE
    cards = {card: step for card, step, _ in rows}
    row = r"^\| (.*) \| .* \| 4\.8 \| 1\.4 \| ([\d.]+) \| simulated \|$"
    shown = re.findall(row, README, re.MULTILINE)
    assert len(shown) == README.count("| simulated |")
    assert {card: cards[card] for card, _ in shown} == dict(shown)
    h100 = predicted(*simulated("H100", "832x480x81"), LAYERWISE)
    computing = f"{(h100.total_s - sum(step.stall_s for step in h100.timeline.steps)) / 4:.1f} s"
    assert f"{computing} of computing in a step" in section
    assert f"{computing} of computing in a step" in README


def test_graphs_have_the_seconds_of_the_result():
    (result,) = (ROOT / "benchmarks" / "results").glob("native-graph_*.json")
    figures = json.loads(result.read_text(encoding="utf-8"))["figures"]
    for run in (case.removesuffix(", whole") for case in figures if case.endswith("whole")):
        both = [figures[f"{run}, {how}"] for how in ("whole", "streamed")]
        cells = [f"{each[name]:.2f}" for each in both for name in ("total_s", "outside_s")]
        name = run.replace("wan", "Wan").replace("z_image", "Z-Image")
        assert f"| {name} | {' | '.join(cells)} |" in PAGES["native-compared.md"]


def first_cells(page: str) -> list[str]:
    """Return the first cells of all rows in a page."""
    return [line.split("|")[1] for line in PAGES[page].splitlines() if line.startswith("| ")]


def test_every_node_and_every_workflow_is_in_its_table():
    nodes = {name.strip() for cell in first_cells("nodes.md")[1:] for name in cell.split(",")}
    assert nodes == TITLES
    cells = " ".join(first_cells("workflows.md"))
    links = re.findall(r"\[([^]]+)\]\(\.\./workflows/([^)]+)\.json\)", cells)
    titles = [title for title, address in links if unquote(address) == title]
    assert sorted(titles) == sorted(TEMPLATES.values())


@EACH_TEXT
def test_every_file_a_page_links_to_is_there(name):
    folder = ROOT / "docs" if name in PAGES else ROOT
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", TEXTS[name]):
        target = folder / unquote(link or name)
        assert target.exists(), link
        if anchor:
            text = target.read_text(encoding="utf-8").lower()
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", each).replace(" ", "-") for each in headings}


MIGRATION = ("migrate.md", "migrate-packs.md", "coming-from-wanvideowrapper.md")
PACKS = PAGES["migrate.md"] + PAGES["migrate-packs.md"]
SCHEMAS = [node.define_schema() for node in PACK]


def rows_in(text: str) -> list[list[str]]:
    """Return the table cells in a text, without rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not row[0].startswith("---")]


def section(title: str) -> list[list[str]]:
    """Return the table cells in a section."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PACKS, re.MULTILINE | re.DOTALL)
    assert found, title
    return rows_in(found[1])


def names_of(schemas):
    """Return the inputs of nodes, and their options."""
    sockets = [socket for schema in schemas for socket in schema.inputs]
    options = {str(option) for socket in sockets for option in socket.as_dict().get("options", ())}
    return options | {socket.id for socket in sockets}


@pytest.mark.parametrize("page", MIGRATION)
def test_every_word_in_bold_is_a_node_of_ours(page):
    assert {*re.findall(r"\*\*(.+?)\*\*", PAGES[page])} <= TITLES
    assert PAGES[page].isascii()


def test_every_setting_of_a_table_is_an_input_of_ours():
    titles = re.findall(r"^## (From .*)$", PACKS, re.MULTILINE)
    rows = [row for title in titles for row in section(title)]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[1])}
    assert named <= names_of(SCHEMAS) | {"guider"}
    assert len(named) > 20


OF_WRAPPER = [row for row in rows_in(PAGES[MIGRATION[2]]) if row[0] != "there"]


@pytest.mark.parametrize("row", OF_WRAPPER, ids=lambda row: row[0][:40])
def test_every_setting_for_the_wrapper_is_one_of_ours(row):
    """Settings in a row belong to the nodes that the row names."""
    _, here = row
    named = [schema for schema in SCHEMAS if f"**{schema.display_name}**" in here]
    assert {*re.findall(r"`([^`]+)`", here)} <= names_of(named or SCHEMAS)


def test_page_for_the_wrapper_has_everything():
    assert len(OF_WRAPPER) > 40
    assert all(len(row) == 2 and all(row) for row in OF_WRAPPER)
    assert sum(row[1].startswith("not here") for row in OF_WRAPPER) >= 10


def switch(steps: int, shift: float, boundary: float) -> int:
    timesteps = [1000 * sigma for sigma in simple_schedule(steps, shift).sigmas[:-1]]
    return split_at_boundary(timesteps, boundary)


def test_switch_beside_that_of_another_pack():
    table = [row for row in section("From WanMoeKSampler") if re.match(r"\d+, \d+, 0", row[0])]
    assert len(table) == 5
    for case, theirs, ours in table:
        steps, shift, boundary = case.split(", ")
        assert switch(int(steps), float(shift), float(boundary)) == int(ours)
        assert int(theirs) == int(ours) - 1


def test_sum_of_device_memory():
    (swapped,) = map(int, re.findall(r"10 GB with one block ahead make (\d+)", PACKS))
    block = T2V_A14B.streamed_bytes() / 1e9
    outer = 2 * T2V_A14B.resident_bytes() / 1e9
    assert (f"{block:.2f}", f"{outer:.2f}") == ("0.70", "0.03")
    assert (41 - swapped + 1) * block + outer <= 10 < (41 - (swapped - 1) + 1) * block + outer
