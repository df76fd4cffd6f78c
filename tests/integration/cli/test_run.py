from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED, INVALID
from wanstream.nodes.latents import WanStreamEmptyLatent
from wanstream.testing.folder import ModelFolder
from wanstream.tests.support.forked_command import ForkedCommand

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
T2V = WORKFLOWS / "t2v.json"
SMALL = ("latent.width=32", "latent.height=32", "latent.frames=5", "sampler.steps=3")

Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(tmp_path: Path, sample_models: Path) -> Arguments:
    """`arguments(*changes, workflow=T2V)`: a small run's command line, with the test's folders."""

    def arguments(*changes: str, workflow: Path = T2V, models: Path = sample_models) -> list[str]:
        folders = [
            "--out",
            str(tmp_path / "out"),
            "--models",
            str(models),
            "--input",
            str(tmp_path),
        ]
        return [
            "run",
            str(workflow),
            *folders,
            *(part for change in changes for part in ("--set", change)),
        ]

    return arguments


@pytest.mark.slow  # runs whole commands
def test_a_run_prints_the_table_of_its_steps_and_the_path_of_its_video(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(*SMALL)) == DONE

    printed = capsys.readouterr()
    header, *steps, total, path = printed.out.splitlines()
    # The sample experts are fp8 files: they are decoded when they arrive, and read in every step.
    columns = ["step", "expert", "sigma", "seconds", "stall", "decode", "moved", "read", "memory"]
    assert header.split() == columns
    assert [line.split()[:3] for line in steps] == [
        ["1", "high", "1.0000"],
        ["2", "high", "0.9601"],
        ["3", "low", "0.8575"],
    ]
    assert total.split()[0] == "all"
    assert Path(path) == tmp_path / "out" / "video" / "wan2.2_t2v_00001_.mp4"
    assert Path(path).stat().st_size > 0
    assert "3/3" in printed.err


@pytest.mark.slow  # runs whole commands
def test_a_benchmark_prints_its_summary_and_the_path_of_its_chart(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = ("benchmark.warmup=0", "benchmark.repeats=2")
    assert main(arguments(*SMALL, *fewer, workflow=WORKFLOWS / "benchmark.json")) == DONE
    printed = capsys.readouterr()
    assert "# WanStream benchmark\n" in printed.out
    assert "Runs of each variant: 2 measured after 0 not counted" in printed.out
    assert printed.out.count("\n## Per-step timing: layerwise, ") == 2
    chart = Path(printed.out.splitlines()[-1])
    assert chart == tmp_path / "out" / "benchmark" / "wan2.2_t2v_00001_.png"
    assert chart.stat().st_size > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "policy.prefetch_blocks=-1",
            "policy (WanStreamLayerwise): value_smaller_than_min: Value -1 smaller than min of 0",
        ),
        (
            "sampler.steps=0",
            "sampler (WanStreamSampler): exception_during_inner_validation: Exception when",
        ),
        ("sampler.switch_step=21", "switch step 21 of 20 steps: give 0 to 20"),
        ("experts.high_noise=../x", "experts (WanStreamExperts): value_not_in_list"),
        ("save.filename_prefix=../x", "save (WanStreamSaveVideo): exception_during_validation"),
        ('sampler.latent=["text", 0]', "sampler (WanStreamSampler): return_type_mismatch"),
        (
            'sampler.latent=["gone", 0]',
            "sampler (WanStreamSampler): exception_during_inner_validation",
        ),
        ("sampler.step=4", "WanStreamSampler has no input step"),
        ("decode.vae=x", "no such node"),
    ],
)
def test_an_invalid_workflow_is_refused_with_comfyuis_error_types(
    arguments: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    reason: str,
) -> None:
    assert main(arguments(change)) == INVALID
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_one_bad_output_spoils_the_run_although_comfyui_would_drop_it(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = json.loads(T2V.read_text(encoding="utf-8"))
    nodes["copy"] = {**nodes["save"], "inputs": {**nodes["save"]["inputs"], "crf": 99}}
    path = tmp_path / "two.json"
    path.write_text(json.dumps(nodes), encoding="utf-8")
    assert main(arguments(*SMALL, workflow=path)) == INVALID
    assert "copy (WanStreamSaveVideo): value_bigger_than_max" in capsys.readouterr().err


def test_a_cycle_is_explained(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = json.loads(T2V.read_text(encoding="utf-8"))
    nodes["sampler"]["inputs"]["latent"] = ["sampler", 0]
    path = tmp_path / "cycle.json"
    path.write_text(json.dumps(nodes), encoding="utf-8")
    assert main(arguments(*SMALL, workflow=path)) == INVALID
    output = capsys.readouterr().err
    assert "sampler" in output, output


def test_a_fault_that_is_no_refusal_shows_where_it_is(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WanStreamEmptyLatent, "execute", classmethod(lambda cls, **_: 1 / 0))
    assert main(arguments(*SMALL)) == FAILED
    output = capsys.readouterr().err
    assert "Traceback" in output
    assert "failed: node latent (WanStreamEmptyLatent): ZeroDivisionError" in output


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("not json", "is not JSON"),
        ("[]", "this is not a workflow"),
        ('{"nodes": [], "links": []}', "Export (API)"),
        ('{"1": {"class_type": "KSampler", "inputs": {}}}', "missing_node_type"),
        ("{}", "prompt_no_outputs"),
    ],
)
def test_a_file_that_is_no_workflow_of_ours_is_refused(
    arguments: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    reason: str,
) -> None:
    path = tmp_path / "workflow.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(arguments(workflow=path)) == INVALID
    assert reason in capsys.readouterr().err


def test_missing_models_name_the_command_that_makes_some(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(models=tmp_path / "none")) == INVALID
    assert "wanstream make-test-model" in capsys.readouterr().err


def test_an_output_that_is_no_folder_is_refused_before_the_run(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    assert main(arguments(*SMALL)) == INVALID
    assert "is not a folder, but one is needed there" in capsys.readouterr().err


def test_a_node_that_fails_is_named(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("give another size")

    monkeypatch.setattr(WanStreamEmptyLatent, "execute", classmethod(refuse))
    assert main(arguments(*SMALL)) == FAILED
    output = capsys.readouterr().err
    assert "failed: node latent (WanStreamEmptyLatent): " in output
    assert "give another size" in output
    assert "Traceback" not in output


def test_wrong_options_end_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(T2V)])
    assert ended.value.code == INVALID
    assert "--out" in capsys.readouterr().err


def test_sample_model_writes_once_and_says_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("not a model", encoding="utf-8")
    assert main(["make-test-model", str(tmp_path)]) == FAILED
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workflow", "result", "reason"),
    [
        ("native_flux.json", FAILED, "the test model has no"),
        ("none.json", INVALID, "none.json cannot be read"),
    ],
)
def test_a_test_model_for_a_workflow_that_it_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workflow: str, result: int, reason: str
) -> None:
    call = [
        "make-test-model",
        str(tmp_path / "models"),
        "--workflow",
        str(T2V),
        str(WORKFLOWS / workflow),
    ]
    assert main(call) == result
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


@pytest.mark.slow  # runs whole commands
def test_a_test_model_for_a_workflow_is_small_and_runs_it(
    arguments: Arguments, tmp_path: Path
) -> None:
    """As `scripts/demo` does. The README has the size."""
    models = tmp_path / "models"
    assert main(["make-test-model", str(models), "--workflow", str(T2V)]) == DONE
    files = [path for path in models.rglob("*.safetensors") if path.is_file()]
    assert len(files) == 4
    assert 65e6 < sum(path.stat().st_size for path in files) < 75e6
    assert (
        main(
            arguments(
                "latent.width=32",
                "latent.height=32",
                "latent.frames=5",
                "sampler.steps=1",
                models=models,
            )
        )
        == DONE
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_ctrl_c_ends_a_run_between_two_blocks(arguments: Arguments, tmp_path: Path) -> None:
    endless = arguments(
        "latent.width=32", "latent.height=32", "latent.frames=5", "sampler.steps=1000"
    )
    command = ForkedCommand(endless, tmp_path)
    command.wait_for("sampler:")
    command.signal(signal.SIGINT)
    code, _, said = command.end()
    assert code == INTERRUPTED
    assert said.splitlines()[-1] == "stopped"
    assert list((tmp_path / "out").glob("**/*.mp4")) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_full_disk_costs_the_video_but_not_the_latent(
    arguments: Arguments, tmp_path: Path
) -> None:
    # Room for the latent, but not for the video.
    code, _, said = ForkedCommand(arguments(*SMALL), tmp_path, largest_file=4000).end()
    (kept,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert kept == tmp_path / "out" / "latents" / "WanStream_00001_.latent"
    assert f"The latent is kept in {kept}" in said
    assert code == FAILED


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["t2v", "i2v_lightning"])
def test_a_shipped_workflow_of_our_nodes_runs_on_the_full_sample_model(
    arguments: Arguments, tmp_path: Path, full_sample_model: ModelFolder, workflow: str
) -> None:
    """A model with forty blocks, the real depth, runs in a new process as a user starts it."""
    from PIL import Image

    Image.linear_gradient("L").save(tmp_path / "example.png")
    file = WORKFLOWS / f"{workflow}.json"
    sized = "latent" if "latent" in json.loads(file.read_text(encoding="utf-8")) else "start"
    small = [f"{sized}.width=64", f"{sized}.height=32", f"{sized}.frames=5", "sampler.steps=4"]
    call = [sys.executable, "-m", "wanstream.cli"]
    call += arguments(*small, workflow=file, models=full_sample_model.folder)
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == DONE, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"{workflow}_00001_.mp4")
