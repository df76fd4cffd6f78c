"""`wanstream plan --workers` prints what `propose_mesh` says."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from wanstream.cli import main
from wanstream.cli.plan_arguments import PlanArguments, offload_job
from wanstream.plan import MeshPlan, expected_links, propose_mesh
from wanstream.plan.gpus import expected_machine
from wanstream.plan.links import LINKS

COMMAND = ["plan", "--gpu", "RTX 4090", "--ram", "128", "--ssd", "5", "--size", "832x480x81", "--steps", "8"]
ASKED = PlanArguments(gpu="RTX 4090", ram_gb=128, ssd_gb_s=5, size="832x480x81", steps=8)
MACHINE = expected_machine("RTX 4090", ram_bytes=128 * 2**30, disk_bytes_per_s=5e9)


def _plan(workers: int, videos: int, link: str | None = None, per_machine: int = 8) -> MeshPlan:
    links = expected_links(MACHINE, workers_per_machine=per_machine)
    if link is not None:
        links = replace(LINKS[link], workers_per_machine=per_machine)
    return propose_mesh(workers, offload_job(ASKED), MACHINE, links, videos)


def test_the_table_proposes_a_mesh_for_one_video_and_one_for_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--workers", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("simulated for 4 workers with RTX 4090, up to 8 on a machine with 137 GB of RAM")
    assert "(assumed)" in lines[0]
    one, many = _plan(4, 1), _plan(4, 100)
    assert one.mesh != many.mesh
    assert lines[-2:] == [f"best for one video now: {one.reason}", f"best for 100 videos: {many.reason}"]
    proposed = {}
    for line in lines[2:-2]:
        figures = re.split(r" {2,}", line)
        proposed.setdefault(figures[0], figures)
    for plan in (one, many):
        figures = proposed[str(plan.run.videos)]
        assert figures[1:4] == [str(plan.mesh), f"{plan.run.makespan_s:.1f} s", f"{plan.run.video_s:.1f} s"]
        assert figures[7] == plan.weights


def test_json_has_the_links_every_layout_and_every_worker(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "4", "--link", "nvlink", "--per-machine", "2", "--videos", "3", "--json"]
    assert main([*COMMAND, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "simulated"
    assert data["links"] == asdict(replace(LINKS["nvlink"], workers_per_machine=2))
    assert [proposal["videos"] for proposal in data["proposals"]] == [1, 3]
    for proposal in data["proposals"]:
        plan = _plan(4, proposal["videos"], "nvlink", 2)
        assert proposal["mesh"] == asdict(plan.mesh)
        assert proposal["reason"] == plan.reason
        assert [run["makespan_s"] for run in proposal["candidates"]] == [run.makespan_s for run in plan.candidates]
        assert [load["rank"] for load in proposal["candidates"][0]["loads"]] == [0, 1, 2, 3]


def test_little_memory_says_which_layouts_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--workers", "4", "--vram", "3"]) == 0
    told = capsys.readouterr().out
    assert "does not fit: data 4, because RTX 4090, one worker of data 4: needs 2 buffers of 0.70 GB" in told
    assert "3.00 GB given" in told
    assert main([*COMMAND, "--workers", "1", "--vram", "1"]) == 1
    assert "does not fit, because RTX 4090, one worker of one worker" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers 0: give 1 or more"),
        (["--workers", "2", "--per-machine", "0"], "--per-machine 0: give 1 or more"),
        (["--workers", "2", "--videos", "0"], "--videos 0: give 1 or more"),
        (["--workers", "2", "--ways"], "--ways is about one worker: leave it out, or --workers"),
        (["--workers", "37"], "37 workers cannot share 1 video of 8 steps, 32760 tokens and 40 heads evenly: use 36"),
    ],
)
def test_wrong_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
