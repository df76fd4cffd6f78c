"""`wanstream plan` prints the planner's results for other machines, and layouts for workers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from wanstream import devices
from wanstream.cli import main
from wanstream.cli.alternatives import plan_alternatives
from wanstream.cli.arguments import FAILED, ArgumentError
from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import best_candidates, planned_dtype, requested_machine, run_shape
from wanstream.distributed import choose_layout, worker_share
from wanstream.plan import Budgets, OffloadPlan, plan_offload
from wanstream.plan.machine import GPUS, expected_machine
from wanstream.schema import Mesh
from wanstream.schema.text.numbers import format_size
from wanstream.shapes import TI2V_5B

RTX_4060 = MachineOptions(gpu="RTX 4060 Ti 16GB", ram_gb=32, ssd_gb_s=3.5)
ASKED = PlanOptions(machine=RTX_4060, size="1280x720x81")
OPTIONS = {"gpu": "RTX 4060 Ti 16GB", "ram": "32", "ssd": "3.5", "size": "1280x720x81"}
FOUR = ["--workers", "4"]


def plan_command(*more: str, **changed: str | None) -> list[str]:
    """Return the command for `ASKED` with other values, and without an option for None."""
    given = {name: value for name, value in (OPTIONS | changed).items() if value is not None}
    return ["plan", *(word for name in given for word in (f"--{name}", given[name])), *more]


def on_4090(*more: str) -> list[str]:
    given = {"gpu": "RTX 4090", "ram": "128", "ssd": "5", "size": "832x480x81"}
    return plan_command("--steps", "8", *more, **given)


def _plan(arguments: PlanOptions) -> OffloadPlan:
    return plan_offload(run_shape(arguments), requested_machine(arguments), Budgets())


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_table_and_json_have_the_planners_own_figures(capsys):
    assert main(plan_command()) == 0
    printed = capsys.readouterr().out
    expected = _plan(ASKED)
    lines = printed.splitlines()
    assert lines[0].startswith("simulated for RTX 4060 Ti 16GB, 34.4 GB of RAM, files at 3.50 GB/s")
    assert lines[0].endswith("; multiplied in bf16")
    assert GPUS["RTX 4060 Ti 16GB"].source in lines[0]
    rows = best_candidates(run_shape(ASKED), expected)
    assert rows[0].policy == expected.policy
    for line, candidate in zip(lines[2:], rows, strict=False):
        figures = cells(line)
        assert figures[3:5] == [f"{candidate.total_s:.1f} s", f"{candidate.total_s / 20:.2f} s"]
        sizes = [candidate.device_bytes, candidate.host_bytes]
        assert figures[6:8] == [format_size(each) for each in sizes]
    for misfit in expected.misfits:
        assert f"because it {misfit.shortage}" in printed
    assert lines[-1].endswith(expected.reason)
    assert main(plan_command("--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == data["timeline"]["kind"] == "simulated"
    assert data["total_s"] == expected.total_s == min(c["total_s"] for c in data["candidates"])
    assert len(data["candidates"]) == len(expected.candidates)
    assert len(data["does_not_fit"]) == len(expected.misfits)


def test_alternatives_are_listed_on_request(capsys, monkeypatch):
    planned = []

    def plan_once(*given):
        if not planned:
            planned.extend(plan_alternatives(*given))
        return planned

    monkeypatch.setattr("wanstream.cli.plan.plan_alternatives", plan_once)
    command = plan_command("--vram", "9", "--steps", "2", "--compare")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("alternative"))
    assert main([*command, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    fitting = [way for way in ways if "video_s" in way]
    assert {"as requested", 'storage "fp8"'} <= {way["way"] for way in fitting}
    for line, way in zip(lines[start + 1 :], fitting, strict=False):
        total_s = way["total_s"]
        video_s = total_s / way["videos"]
        assert cells(line)[:3] == [way["way"], f"{video_s:.1f} s", f"{total_s:.1f} s"]
    lacking = [way for way in ways if "because" in way]
    assert lacking, "four videos at once do not fit into 9 GB"
    told = [f"does not fit: {way['way']}, because {way['because']}" for way in lacking]
    assert lines[start + 1 + len(fitting) :] == told


def test_arguments_reach_the_run():
    plain = run_shape(ASKED)
    assert (plain.tokens, plain.lanes) == (75_600, {"high": 2, "low": 2})
    assert plain.experts_of_steps == ("high",) * 10 + ("low",) * 10
    assert run_shape(replace(ASKED, cfg="high")).lanes == {"high": 2, "low": 1}
    few = run_shape(replace(ASKED, cfg="none", steps=5, switch_step=1))
    assert few.experts_of_steps == ("high", *("low",) * 4)


BLOCK = 702_545_920
"""Bytes of a block in bf16."""
INT8 = BLOCK // 2 + 4 * (9 * 5120 + 13824)


@pytest.mark.parametrize(
    ("storage", "stored", "file", "computed"),
    [
        ("bf16", BLOCK, BLOCK, BLOCK),
        ("fp8", BLOCK // 2, BLOCK, BLOCK),
        ("int8 ConvRot", INT8, BLOCK, INT8),
        ("Q8_0", BLOCK * 34 // 64, BLOCK * 34 // 64, BLOCK),
    ],
)
def test_blocks_have_the_size_of_their_storage(storage, stored, file, computed):
    run = run_shape(replace(ASKED, storage=storage))
    found = (run.blocks.stored_bytes, run.blocks.file_bytes, run.blocks.computed_bytes)
    assert found == (stored, file, computed)
    assert run.blocks.decodes == (stored != computed)
    is_int8 = storage == "int8 ConvRot"
    assert run.kernels.linear_format == ("int8" if is_int8 else "")
    assert not is_int8 or run.blocks.quantised_to == storage


def test_5b_model_is_one_expert_of_fewer_tokens():
    asked = replace(ASKED, model="5b", size="1280x704x121")
    run = run_shape(asked)
    assert (run.expert, run.tokens, run.blocks.counts) == (TI2V_5B, 31 * 22 * 40, {"high": 30})
    assert {*run.experts_of_steps} == {"high"}
    sizes = (run.blocks.computed_bytes, run.blocks.outside_bytes)
    assert sizes == (327_155_712, TI2V_5B.resident_bytes())
    for change, message in (
        ({"size": "1280x720x121"}, "height is 720, it must be a multiple of 32: use 736"),
        ({"switch_step": 5}, "--switch-step 5: 5b has a single expert"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run_shape(replace(asked, **change))
    assert _plan(asked).total_s < _plan(replace(ASKED, size="1280x704x121")).total_s / 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_run_on_this_machine_is_planned_in_its_dtype(dtype, monkeypatch):
    monkeypatch.setattr(devices, "auto_dtype", lambda device: dtype)
    name, size = planned_dtype(replace(ASKED, machine=MachineOptions(gpu="this")))
    assert size == dtype.itemsize
    run = run_shape(ASKED, dtype=(name, size))
    usual = run_shape(ASKED)
    assert f"torch.{run.compute_dtype}" == str(dtype)
    assert run.blocks.computed_bytes == run.expert.streamed_parameters * size
    assert run.blocks.outside_bytes * 2 == usual.blocks.outside_bytes * size
    assert run.blocks.stored_bytes == run.blocks.file_bytes == usual.blocks.stored_bytes
    assert run.blocks.decodes == (dtype != torch.bfloat16)
    assert planned_dtype(ASKED) == ("bfloat16", 2)


# --- workers --------------------------------------------------------------------------------------


def _layout(workers: int, videos: int, per_machine: int = 8) -> tuple[Mesh, OffloadPlan]:
    run = run_shape(PlanOptions(machine=MachineOptions(gpu="RTX 4090"), size="832x480x81", steps=8))
    machine = expected_machine("RTX 4090", ram_bytes=128 * 2**30, disk_bytes_per_s=5e9)
    here = {"workers_per_machine": per_machine}
    mesh = choose_layout(workers, run, machine, Budgets(), samples=videos, **here)
    share = worker_share(mesh, run, machine, Budgets(), **here)
    return mesh, plan_offload(share.run, share.machine, share.budgets)


def test_table_has_a_layout_for_one_video_and_one_for_many(capsys):
    assert main(on_4090(*FOUR)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 workers with RTX 4090, up to 8 on a machine with 137 GB of RAM")
    assert "without communication between workers" in lines[-1]
    rows = {row[0]: row for row in map(cells, lines[2:4])}
    for videos in (1, 100):
        mesh, worker = _layout(4, videos)
        row = rows[str(videos)]
        assert (row[1], row[4]) == (str(mesh), f"{worker.total_s:.1f} s")
    assert [line.split(":")[0] for line in lines[4:6]] == ["one video", "100 videos"]


@pytest.mark.slow  # runs whole commands
def test_json_has_both_layouts_and_those_for_little_memory(capsys, refusal):
    assert main(on_4090(*FOUR, "--gpus-per-node", "2", "--videos", "3", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "simulated"
    assert [proposal["videos"] for proposal in data["proposals"]] == [1, 3]
    for proposal in data["proposals"]:
        mesh, worker = _layout(4, proposal["videos"], 2)
        assert proposal["mesh"] == asdict(mesh)
        assert proposal["policy"] == asdict(worker.policy)
        assert proposal["video_s_without_exchanges"] == worker.total_s
        assert proposal["device_bytes"] == worker.device_bytes
    assert main(on_4090(*FOUR, "--vram", "3", "--json")) == 0
    many = json.loads(capsys.readouterr().out)["proposals"][1]
    assert (many["mesh"], many["device_bytes"] <= 3e9) == (asdict(Mesh(ulysses=4)), True)
    words = "because RTX 4090, one worker of cfg 2 x ulysses 2: needs 2 buffers of 0.70 GB"
    assert words in refusal(*on_4090(*FOUR, "--vram", "1"), code=FAILED)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": "RTX 9090"}, "no figures for the GPU 'RTX 9090': choose one of RTX 3060 12GB"),
        ({"size": "1280x720"}, "--size 1280x720: write WIDTHxHEIGHTxFRAMES"),
        ({"size": "1280x721x81"}, "height is 721, it must be a multiple of 16: use 720"),
        ({"ram": "0"}, "both must be numbers above 0"),
        ({"ssd": "-1"}, "both must be numbers above 0"),
        ({"ram": "inf"}, "both must be numbers above 0"),
        ({"ssd": "nan"}, "both must be numbers above 0"),
        ({"ram": "1e-12"}, "ram_bytes of RTX 4060 Ti 16GB is 0, it must be a number above 0"),
        ({"steps": "0"}, "--steps 0"),
        ({"switch-step": "21"}, "--steps 20 --switch-step 21"),
        ({"vram": "0"}, "--vram 0.0: it must be a number above 0"),
        ({"vram": "inf"}, "--vram inf: it must be a number above 0"),
        ({"gpu": "this", "models": "/nowhere/at/all"}, "--models /nowhere/at/all: no such file or"),
        ({"gpu": "this", "ram": "0"}, "--ram 0.0: it must be a number above 0"),
        ({"ram": None}, "give --ram GB and --ssd GB/s of that machine, or --gpu this"),
        ({"workers": "0"}, "--workers 0: give 1 or more"),
        ({"workers": "2", "gpus-per-node": "0"}, "--gpus-per-node 0: give 1 or more"),
        ({"workers": "2", "videos": "0"}, "--videos 0: give 1 or more"),
    ],
)
def test_wrong_arguments(given, message, refusal):
    assert message in refusal(*plan_command(**given))


def test_refusals_have_the_remedy(refusal):
    said = refusal(*plan_command("--vram", "1.5"), code=FAILED)
    start = "does not fit, because RTX 4060 Ti 16GB: needs 2 buffers of 0.70 GB + "
    assert said.startswith(start)
    assert "; 1.50 GB given; give more, or make the video smaller or shorter" in said
    said = refusal(*plan_command("--workers", "2", "--compare"))
    assert "--compare plans a single worker: omit it, or --workers" in said
    said = refusal(*on_4090("--workers", "37"))
    assert "37 workers cannot share 1 video of 32760 tokens and 40 heads evenly: use 36" in said


def test_measured_machine_is_read_from_a_file(tmp_path):
    measured = replace(requested_machine(ASKED), name="a measured card", flops_per_s=1e12)
    path = tmp_path / "measured.json"
    for data in (
        {"machine": measured.to_dict(), "notes": []},
        {"case": "selftest", "figures": {"machine": measured.to_dict()}},
    ):
        path.write_text(json.dumps(data), encoding="utf-8")
        asked = MachineOptions(gpu=str(path))
        assert requested_machine(replace(ASKED, machine=asked)) == measured
        more = requested_machine(replace(ASKED, machine=replace(asked, ram_gb=8)))
        assert more.ram_bytes == 8 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "has no measured machine: give a file of `wanstream selftest`"),
        ('{"figures": {"checks": {}}}', "has no measured machine"),
        ('{"machine": {"name": "x"}}', "not a machine: "),
        ("{", "is not JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_without_a_machine(text, message, tmp_path, refusal):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert message in refusal("plan", "--gpu", str(path), "--size", "832x480x81")
