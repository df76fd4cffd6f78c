"""docs/scaling.md says what the planner says, and what others have measured."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from wanstream.benchmarks.scaling.held_section import COUNTS as SHARING
from wanstream.benchmarks.scaling.held_section import SIZES, Block, block_of
from wanstream.benchmarks.scaling.measured import OFF, reports
from wanstream.benchmarks.scaling.page import figures, page
from wanstream.benchmarks.scaling.setups import COUNTS, SETUPS, job_of, many_videos, one_video
from wanstream.benchmarks.scaling.splits import SPLITS, mesh_of
from wanstream.plan import Mesh, simulate_fleet
from wanstream.plan.fleet import queue_on

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # the whole page is computed


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return {"scaling.md": page(), **figures()}


def test_the_page_in_the_repository_is_that_of_the_planner(files: dict[str, str]) -> None:
    for name, text in files.items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is old: run python benchmarks/scaling_page.py"


def test_what_is_simulated_is_called_so(files: dict[str, str]) -> None:
    text = files["scaling.md"]
    assert "**Everything on this page is simulated, but the\ncolumns called measured**" in text
    for setup in SETUPS:
        assert f"## {setup.name} (simulated)" in text
        assert setup.machine.origin in text
        assert setup.links.origin in text


def test_every_measured_figure_stands_beside_a_simulated_one(files: dict[str, str]) -> None:
    text = files["scaling.md"]
    assert len(reports()) == 5
    for report in reports():
        for point in report.points:
            figures = f"{point.measured:.2f} {point.unit} | {point.simulated:.2f} {point.unit}"
            assert f"| {point.what} | {figures} | {100 * point.error:+.1f} % | {point.remark} |" in text


def test_where_the_planner_is_off_the_page_says_why() -> None:
    points = [point for report in reports() for point in report.points]
    assert {662.2, 585.7, 21.6, 19.8, 6.7, 4.22, 280.0, 129.04, 191.26} <= {point.measured for point in points}
    for point in points:
        assert point.remark or abs(point.error) <= OFF, point.what
    near = [point.what for point in points if not point.remark]
    assert len(near) >= 8, "what can be simulated comes out within 15 %"


def test_a_gpu_cannot_compute_faster_than_its_maker_says() -> None:
    """That is why the report of the eight RTX 5090 has no simulated counterpart."""
    (report,) = (report for report in reports() if "RTX 5090" in report.setup)
    rates = [int(point.remark.split()[0]) for point in report.points if "TFLOP/s" in point.remark]
    assert len(rates) == 2
    assert min(rates) > 209.5


@pytest.mark.parametrize("split", SPLITS)
def test_cells_of_the_page_are_those_of_the_whole_mesh(split: str) -> None:
    """The page simulates a cell once for all numbers of machines; here it is done anew."""
    setup, mesh = SETUPS[0], mesh_of(split, 32)
    assert mesh is not None
    one = one_video(setup, mesh)
    assert one.mesh.size == len(one.loads) == 32
    if split in ("data", "all for one: cfg 2, ring, ulysses 8"):
        job = job_of()
        assert one == simulate_fleet(job, setup.machine, setup.links, mesh)
        assert many_videos(setup, mesh) == queue_on(job, setup.links, mesh, one.stages, 1000)


def test_splits_are_for_the_gpus_that_there_are() -> None:
    for split in SPLITS:
        assert mesh_of(split, 1) == Mesh()
        for count in COUNTS:
            mesh = mesh_of(split, count)
            assert mesh is None or mesh.size == count
    assert mesh_of("a stage per GPU", 64) is None, "there are 40 steps"
    assert mesh_of("all for one: cfg 2, ring, ulysses 8", 64) is None, "32 do not divide 75600 tokens"


def test_figures_are_drawings(files: dict[str, str]) -> None:
    for name in ("scaling.svg", "scaling-measured.svg"):
        root = ElementTree.fromstring(files[name])
        assert root.tag.endswith("svg")
        words = [element.text for element in root.iter() if element.tag.endswith("text")]
        assert any("simulated" in word for word in words if word)


def test_holding_fetches_back_costs_what_the_rest_of_a_block_does_not_hide() -> None:
    over, beside = SETUPS
    hidden, short = block_of(over, "1280x720x81", 2), block_of(over, "832x480x17", 8)
    assert hidden.held_s == hidden.first_s < hidden.halved_s
    assert short.held_s > short.halved_s
    assert short.held_s - short.compute_s - short.exchange_s == pytest.approx(short.fetch_s - short.rest_s)
    for setup in (over, beside):
        for size in SIZES:
            for count in SHARING:
                block = block_of(setup, size, count)
                assert block.first_s <= block.halved_s
                assert block.first_s <= block.held_s
                assert block.rest_s < block.compute_s


def test_two_that_share_wires_take_no_less_than_what_passes_them() -> None:
    block = Block(compute_s=1.0, exchange_s=2.0, rest_s=0.5, fetch_s=5.0, bus_s=5.0)
    assert (block.first_s, block.halved_s, block.held_s) == (7.0, 7.0, 7.5)
