"""`wanstream plan` prints the planner's results for other machines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream import devices
from wanstream.cli import main
from wanstream.cli.arguments import ArgumentError
from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import best_candidates, planned_dtype, requested_machine, run_shape
from wanstream.plan import Budgets, OffloadPlan, plan_offload
from wanstream.plan.machine import GPUS, expected_machine
from wanstream.schema.text.numbers import format_size
from wanstream.shapes import TI2V_5B

ASKED = PlanOptions(
    machine=MachineOptions(gpu="RTX 4060 Ti 16GB", ram_gb=32, ssd_gb_s=3.5), size="1280x720x81"
)
COMMAND = [
    "plan",
    "--gpu",
    "RTX 4060 Ti 16GB",
    "--ram",
    "32",
    "--ssd",
    "3.5",
    "--size",
    "1280x720x81",
]


def _plan(arguments: PlanOptions, budgets: Budgets = Budgets()) -> OffloadPlan:  # noqa: B008 - frozen
    asked = arguments.machine
    assert asked.ram_gb is not None
    assert asked.ssd_gb_s is not None
    machine = expected_machine(
        asked.gpu, ram_bytes=int(asked.ram_gb * 2**30), disk_bytes_per_s=asked.ssd_gb_s * 1e9
    )
    return plan_offload(run_shape(arguments), machine, budgets)


def test_the_table_shows_the_planners_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    printed, expected = capsys.readouterr().out, _plan(ASKED)
    lines = printed.splitlines()
    assert lines[0].startswith("simulated for RTX 4060 Ti 16GB, 34.4 GB of RAM, files at 3.50 GB/s")
    assert GPUS["RTX 4060 Ti 16GB"].source in lines[0]
    rows = best_candidates(run_shape(ASKED), expected)
    assert rows[0].policy == expected.policy
    for line, candidate in zip(lines[2:], rows, strict=False):
        figures = re.split(r" {2,}", line)
        assert figures[3] == f"{candidate.total_s:.1f} s"
        assert figures[4] == f"{candidate.total_s / 20:.2f} s"
        assert figures[6:8] == [
            format_size(candidate.device_bytes),
            format_size(candidate.host_bytes),
        ]
    for misfit in expected.misfits:
        assert f"because it {misfit.shortage}" in printed
    assert lines[-1].endswith(expected.reason)


def test_json_has_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    data, expected = json.loads(capsys.readouterr().out), _plan(ASKED)
    assert data["kind"] == "simulated"
    assert data["timeline"]["kind"] == "simulated"
    assert data["total_s"] == expected.total_s == min(c["total_s"] for c in data["candidates"])
    assert len(data["candidates"]) == len(expected.candidates)
    assert len(data["does_not_fit"]) == len(expected.misfits)


def test_other_ways_are_told_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, "--vram", "9", "--steps", "4", "--compare"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("alternative"))
    assert main([*command, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    fitting = [way for way in ways if "video_s" in way]
    assert {"as requested", 'storage "fp8"'} <= {way["way"] for way in fitting}
    for line, way in zip(lines[start + 1 :], fitting, strict=False):
        figures = re.split(r" {2,}", line)
        assert figures[0] == way["way"]
        assert figures[1:3] == [
            f"{way['total_s'] / way['videos']:.1f} s",
            f"{way['total_s']:.1f} s",
        ]
    lacking = [way for way in ways if "because" in way]
    assert lacking, "four videos at once do not fit into 9 GB"
    assert lines[start + 1 + len(fitting) :] == [
        f"does not fit: {w['way']}, because {w['because']}" for w in lacking
    ]


@pytest.mark.slow  # plans for every alternative
def test_the_precision_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*COMMAND[:-1], "832x480x17", "--steps", "4"]
    for storage, words in {
        "bf16": "multiplied in bf16",
        "int8 ConvRot": "multiplied in int8 at 3.0 x the rate of bf16, linear layers only",
    }.items():
        assert main(["plan", *small[1:], "--storage", storage, "--compare"]) == 0
        told = capsys.readouterr().out
        lines = told.splitlines()
        assert lines[0].endswith(f"; {words}")
        (best,) = (line for line in lines if line.startswith("best: "))
        assert best.endswith(f"; {words}")
        other = (
            'storage "int8 ConvRot", multiplied in int8'
            if storage == "bf16"
            else "decoded, multiplied in bf16"
        )
        assert f"\n{other} " in told


def test_arguments_reach_the_job() -> None:
    plain = run_shape(ASKED)
    assert plain.tokens == 75_600
    assert plain.lanes == {"high": 2, "low": 2}
    assert plain.experts_of_steps == ("high",) * 10 + ("low",) * 10
    assert (
        plain.blocks.stored_bytes
        == plain.blocks.file_bytes
        == plain.blocks.computed_bytes
        == 702_545_920
    )

    def changed(**changes: object) -> PlanOptions:
        return PlanOptions(**{**ASKED.__dict__, **changes})  # type: ignore[arg-type]

    assert run_shape(changed(cfg="high")).lanes == {"high": 2, "low": 1}
    assert run_shape(changed(cfg="none", steps=5, switch_step=1)).experts_of_steps == (
        "high",
        *("low",) * 4,
    )
    fp8 = run_shape(changed(storage="fp8"))
    assert (fp8.blocks.stored_bytes, fp8.blocks.file_bytes) == (702_545_920 // 2, 702_545_920)
    int8 = run_shape(changed(storage="int8 ConvRot"))
    assert (
        int8.blocks.stored_bytes
        == int8.blocks.computed_bytes
        == 702_545_920 // 2 + 4 * (9 * 5120 + 13824)
    )
    assert int8.blocks.file_bytes == 702_545_920
    assert (int8.kernels.linear_format, int8.blocks.decodes, int8.blocks.quantised_to) == (
        "int8",
        False,
        "int8 ConvRot",
    )
    gguf = run_shape(changed(storage="Q8_0"))
    assert gguf.blocks.stored_bytes == gguf.blocks.file_bytes == 702_545_920 * 34 // 64


def test_the_5b_model_is_one_expert_of_fewer_tokens() -> None:
    asked = replace(ASKED, model="5b", size="1280x704x121")
    run = run_shape(asked)
    assert (run.expert, run.tokens, run.blocks.counts) == (TI2V_5B, 31 * 22 * 40, {"high": 30})
    assert {*run.experts_of_steps} == {"high"}
    assert (run.blocks.computed_bytes, run.blocks.outside_bytes) == (
        327_155_712,
        TI2V_5B.resident_bytes(),
    )
    with pytest.raises(ArgumentError, match=r"height is 720, it must be a multiple of 32: use 736"):
        run_shape(replace(asked, size="1280x720x121"))
    with pytest.raises(ArgumentError, match=r"--switch-step 5: 5b has a single expert"):
        run_shape(replace(asked, switch_step=5))
    assert _plan(asked).total_s < _plan(replace(ASKED, size="1280x704x121")).total_s / 5


def test_less_memory_than_two_buffers_is_refused_with_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--vram", "1.5"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(
        "does not fit, because RTX 4060 Ti 16GB: needs 2 buffers of 0.70 GB + "
    )
    assert "; 1.50 GB given; give more, or make the video smaller or shorter" in told.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--gpu": "RTX 9090"},
            "no figures for the GPU 'RTX 9090': choose one of RTX 3060 12GB, RTX 3090",
        ),
        ({"--size": "1280x720"}, "--size 1280x720: write WIDTHxHEIGHTxFRAMES"),
        (
            {"--size": "1280x721x81"},
            "--size 1280x721x81: height is 721, it must be a multiple of 16: use 720",
        ),
        ({"--size": "1280x720x80"}, "frames is 80"),
        ({"--ram": "0"}, "both must be numbers above 0"),
        ({"--ssd": "-1"}, "both must be numbers above 0"),
        ({"--ram": "inf"}, "both must be numbers above 0"),
        ({"--ssd": "nan"}, "both must be numbers above 0"),
        ({"--ram": "1e-12"}, "ram_bytes of RTX 4060 Ti 16GB is 0, it must be a number above 0"),
        ({"--steps": "0"}, "--steps 0"),
        ({"--switch-step": "21"}, "--steps 20 --switch-step 21"),
        ({"--vram": "0"}, "--vram 0.0: it must be a number above 0"),
        ({"--vram": "inf"}, "--vram inf: it must be a number above 0"),
        (
            {"--gpu": "this", "--models": "/nowhere/at/all"},
            "--models /nowhere/at/all: no such file or folder",
        ),
        ({"--gpu": "this", "--ram": "0"}, "--ram 0.0: it must be a number above 0"),
        ({"--ram": None}, "give --ram GB and --ssd GB/s of that machine, or --gpu this"),
    ],
)
def test_wrong_arguments(
    changes: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**dict(zip(COMMAND[1::2], COMMAND[2::2], strict=True)), **changes}
    given = [
        word for option, value in options.items() if value is not None for word in (option, value)
    ]
    assert main(["plan", *given]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


def test_a_measured_machine_is_read_from_a_file(tmp_path: Path) -> None:
    measured = replace(requested_machine(ASKED), name="a measured card", flops_per_s=1e12)
    for name, data in {
        "probe": {"machine": measured.to_dict(), "notes": []},
        "selftest": {"case": "selftest", "figures": {"machine": measured.to_dict()}},
    }.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        asked = replace(ASKED, machine=MachineOptions(gpu=str(path)))
        assert requested_machine(asked) == measured
        assert (
            requested_machine(
                replace(asked, machine=MachineOptions(gpu=str(path), ram_gb=8))
            ).ram_bytes
            == 8 * 2**30
        )


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
def test_a_file_without_a_machine(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["plan", "--gpu", str(path), "--size", "832x480x81"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_on_this_machine_is_planned_in_the_dtype_that_it_would_compute_in(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "auto_dtype", lambda device: dtype)
    name, size = planned_dtype(replace(ASKED, machine=MachineOptions(gpu="this")))
    assert size == dtype.itemsize
    run, usual = run_shape(ASKED, dtype=(name, size)), run_shape(ASKED)
    assert f"torch.{run.compute_dtype}" == str(dtype)
    assert run.blocks.computed_bytes == run.expert.streamed_parameters * size
    assert run.blocks.outside_bytes * 2 == usual.blocks.outside_bytes * size
    assert (run.blocks.stored_bytes, run.blocks.file_bytes) == (
        usual.blocks.stored_bytes,
        usual.blocks.file_bytes,
    )
    assert run.blocks.decodes == (dtype != torch.bfloat16)
    assert planned_dtype(ASKED) == ("bfloat16", 2)
