"""README and docs name what is there, and their examples and figures are true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import run_shape
from wanstream.plan import Budgets, Machine, expected_machine, plan_offload
from wanstream.schema import OffloadPolicy
from wanstream.shapes import RunShape
from wanstream.tests.support.host.given_nodes import PACK
from wanstream.tests.support.plan_fixtures import needs_of, predicted
from wanstream.tools.templates import TITLES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYERWISE = OffloadPolicy.layerwise(1)
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_python_example_makes_frames(sample_models, monkeypatch):
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    small = {'"cuda"': '"cpu"', "(1, 16, 21, 60, 104)": "(1, 16, 3, 6, 8)", "steps=20": "steps=3"}
    for written, smaller in small.items():
        assert code.count(written) == 1
        code = code.replace(written, smaller)
    monkeypatch.chdir(sample_models / "diffusers")
    names: dict[str, Any] = {}
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


def simulated(gpu: str, size: str) -> tuple[RunShape, Machine]:
    """Return the run and the machine of a simulated row."""
    options = PlanOptions(machine=MachineOptions(gpu=gpu), size=size, steps=4, cfg="none")
    machine = expected_machine(gpu, ram_bytes=32 * 2**30, disk_bytes_per_s=3.5e9)
    return run_shape(options), machine


def test_simulated_cards_have_the_figures_of_the_planner():
    """The planner chooses the policy with two buffers for the fastest and the slowest card."""
    section = PERFORMANCE.partition("## Other cards (simulated)")[2].partition("\n## ")[0]
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
    page = (ROOT / "docs" / "native-compared.md").read_text(encoding="utf-8")
    for run in (case.removesuffix(", whole") for case in figures if case.endswith("whole")):
        both = [figures[f"{run}, {how}"] for how in ("whole", "streamed")]
        cells = [f"{each[name]:.2f}" for each in both for name in ("total_s", "outside_s")]
        name = run.replace("wan", "Wan").replace("z_image", "Z-Image")
        assert f"| {name} | {' | '.join(cells)} |" in page


def first_cells(page: str) -> list[str]:
    """Return the first cells of all rows in a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]


def test_every_node_and_every_workflow_is_in_its_table():
    nodes = {name.strip() for cell in first_cells("nodes")[1:] for name in cell.split(",")}
    assert nodes == {node.define_schema().display_name for node in PACK}
    cells = " ".join(first_cells("workflows"))
    links = re.findall(r"\[([^]]+)\]\(\.\./workflows/([^)]+)\.json\)", cells)
    titles = [title for title, address in links if unquote(address) == title]
    assert sorted(titles) == sorted(TITLES.values())


LINKING = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_every_file_a_page_links_to_is_there(page):
    for name, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / unquote(name) if name else page
        assert target.exists(), name
        if anchor:
            text = target.read_text(encoding="utf-8").lower()
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each).replace(" ", "-") for each in headings}
            assert anchor in anchors
