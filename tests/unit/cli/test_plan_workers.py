"""`wanstream plan --workers`: `choose_layout`'s layouts, with one worker's plan."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from wanstream.cli import main
from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import run_shape
from wanstream.distributed import choose_layout, worker_share
from wanstream.plan import Budgets, OffloadPlan, plan_offload
from wanstream.plan.machine import expected_machine
from wanstream.schema import Mesh

COMMAND = [
    "plan",
    "--gpu",
    "RTX 4090",
    "--ram",
    "128",
    "--ssd",
    "5",
    "--size",
    "832x480x81",
    "--steps",
    "8",
]
ASKED = PlanOptions(
    machine=MachineOptions(gpu="RTX 4090", ram_gb=128, ssd_gb_s=5), size="832x480x81", steps=8
)
MACHINE = expected_machine("RTX 4090", ram_bytes=128 * 2**30, disk_bytes_per_s=5e9)


def _plan(workers: int, videos: int, per_machine: int = 8) -> tuple[Mesh, OffloadPlan]:
    run, here = run_shape(ASKED), {"workers_per_machine": per_machine}
    mesh = choose_layout(workers, run, MACHINE, Budgets(), samples=videos, **here)
    share = worker_share(mesh, run, MACHINE, Budgets(), **here)
    return mesh, plan_offload(share.run, share.machine, share.budgets)


def test_the_table_has_a_layout_for_one_video_and_one_for_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--workers", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 workers with RTX 4090, up to 8 on a machine with 137 GB of RAM")
    assert "without communication between workers" in lines[-1]
    rows = {row[0]: row for row in (re.split(r" {2,}", line.strip()) for line in lines[2:4])}
    for videos in (1, 100):
        mesh, worker = _plan(4, videos)
        assert (rows[str(videos)][1], rows[str(videos)][4]) == (
            str(mesh),
            f"{worker.total_s:.1f} s",
        )
    assert [line.split(":")[0] for line in lines[4:6]] == ["one video", "100 videos"]


@pytest.mark.slow  # runs whole commands
def test_json_has_both_layouts_and_the_plan_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*COMMAND, "--workers", "4", "--gpus-per-node", "2", "--videos", "3", "--json"]) == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "simulated"
    assert [proposal["videos"] for proposal in data["proposals"]] == [1, 3]
    for proposal in data["proposals"]:
        mesh, worker = _plan(4, proposal["videos"], 2)
        assert proposal["mesh"] == asdict(mesh)
        assert proposal["policy"] == asdict(worker.policy)
        assert proposal["video_s_without_exchanges"] == worker.total_s
        assert proposal["device_bytes"] == worker.device_bytes


@pytest.mark.slow  # runs whole commands
def test_little_memory_chooses_another_layout_or_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--workers", "4", "--vram", "3", "--json"]) == 0
    many = json.loads(capsys.readouterr().out)["proposals"][1]
    assert (many["mesh"], many["device_bytes"] <= 3e9) == (asdict(Mesh(ulysses=4)), True)
    assert main([*COMMAND, "--workers", "4", "--vram", "1"]) == 1
    told = capsys.readouterr().err
    assert (
        "does not fit, because RTX 4090, one worker of cfg 2 x ulysses 2: needs 2 buffers of 0.70 "
        "GB" in told
    )
    assert "1.00 GB given" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers 0: give 1 or more"),
        (["--workers", "2", "--gpus-per-node", "0"], "--gpus-per-node 0: give 1 or more"),
        (["--workers", "2", "--videos", "0"], "--videos 0: give 1 or more"),
        (["--workers", "2", "--compare"], "--compare plans a single worker: omit it, or --workers"),
        (
            ["--workers", "37"],
            "37 workers cannot share 1 video of 32760 tokens and 40 heads evenly: use 36",
        ),
    ],
)
def test_wrong_arguments(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
