"""`wanstream run`, from the command line to files, messages and progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED, INVALID
from wanstream.cli.run import LINE_EVERY_S, ProgressBars, ProgressLines, progress_of_run
from wanstream.host.embedded.events import NodeProgress
from wanstream.nodes.latents import WanStreamEmptyLatent
from wanstream.tests.faults.stage import Stage
from wanstream.tests.support.batch.command import WORKFLOWS, shipped
from wanstream.tests.support.full_disk import largest_file
from wanstream.tests.support.polling import eventually

SHORT = [("text", 0, 1), ("text", 1, 1), *(("sampler", n, 8) for n in range(9)), ("sampler", 1, 1)]
LONG = [("sampler", done, 4) for done in range(5)]


@pytest.mark.parametrize(
    ("pause_s", "events", "lines"),
    [
        (0.5, SHORT, ["text: 1.0 s", "sampler: 8/8 steps 5.0 s"]),
        # Steps that take long are seen every ten seconds.
        (0.6 * LINE_EVERY_S, LONG, ["sampler: 2/4 steps 12.0 s", "sampler: 4/4 steps 24.0 s"]),
    ],
)
def test_lines_of_a_log(pause_s, events, lines, capsys):
    now = 0.0
    with closing(ProgressLines(lambda: now)) as progress:
        for node_id, done, total in events:
            progress.show(NodeProgress(node_id=node_id, class_type="N", done=done, total=total))
            now += pause_s
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(("terminal", "kind"), [(True, ProgressBars), (False, ProgressLines)])
def test_only_a_terminal_gets_bars(terminal, kind, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert isinstance(progress_of_run(), kind)


T2V = WORKFLOWS / "t2v.json"
SIZE = ("latent.width=32", "latent.height=32", "latent.frames=5")
SMALL = (*SIZE, "sampler.steps=3")


@pytest.fixture
def arguments(tmp_path, sample_models):
    """`arguments(*changes, workflow=T2V)`: a small run's command line, with the test's folders."""

    def arguments(*changes: str, workflow: Path = T2V, models: Path = sample_models) -> list[str]:
        places = ["--out", tmp_path / "out", "--models", models, "--input", tmp_path]
        changed = [word for change in changes for word in ("--set", change)]
        return [str(word) for word in ("run", workflow, *places, *changed)]

    return arguments


@pytest.mark.slow  # runs whole commands
def test_a_run_prints_its_steps_and_the_path_of_its_video(arguments, tmp_path, capsys):
    assert main(arguments(*SMALL)) == DONE

    printed = capsys.readouterr()
    header, *steps, total, path = printed.out.splitlines()
    # The sample experts are fp8 files: they are decoded when they arrive, and read in every step.
    columns = ["step", "expert", "sigma", "seconds", "stall", "decode", "moved", "read", "memory"]
    assert header.split() == columns
    begins = ["1 high 1.0000", "2 high 0.9601", "3 low 0.8575"]
    assert [" ".join(line.split()[:3]) for line in steps] == begins
    assert total.split()[0] == "all"
    assert Path(path) == tmp_path / "out" / "video" / "wan2.2_t2v_00001_.mp4"
    assert Path(path).stat().st_size > 0
    assert "3/3" in printed.err


@pytest.mark.slow  # runs whole commands
def test_a_benchmark_prints_its_summary_and_its_chart(arguments, tmp_path, capsys):
    fewer = ("benchmark.warmup=0", "benchmark.repeats=2")
    assert main(arguments(*SMALL, *fewer, workflow=WORKFLOWS / "benchmark.json")) == DONE
    printed = capsys.readouterr()
    assert "# WanStream benchmark\n" in printed.out
    assert "Runs of each variant: 2 measured after 0 not counted" in printed.out
    assert printed.out.count("\n## Per-step timing: layerwise, ") == 2
    chart = Path(printed.out.splitlines()[-1])
    assert chart == tmp_path / "out" / "benchmark" / "wan2.2_t2v_00001_.png"
    assert chart.stat().st_size > 0


TOO_SMALL = "value_smaller_than_min: Value -1 smaller than min of 0"
FAILED_VALIDATION = "exception_during_inner_validation"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("policy.prefetch_blocks=-1", f"policy (WanStreamLayerwise): {TOO_SMALL}"),
        ("sampler.steps=0", f"sampler (WanStreamSampler): {FAILED_VALIDATION}: Exception when"),
        ("sampler.switch_step=21", "switch step 21 of 20 steps: give 0 to 20"),
        ("experts.high_noise=../x", "experts (WanStreamExperts): value_not_in_list"),
        ("save.filename_prefix=../x", "save (WanStreamSaveVideo): exception_during_validation"),
        ('sampler.latent=["text", 0]', "sampler (WanStreamSampler): return_type_mismatch"),
        ('sampler.latent=["gone", 0]', f"sampler (WanStreamSampler): {FAILED_VALIDATION}"),
        ('sampler.latent=["sampler", 0]', "sampler"),
        ("sampler.step=4", "WanStreamSampler has no input step"),
        ("decode.vae=x", "no such node"),
    ],
)
def test_an_invalid_input_has_the_error_type_of_comfyui(
    arguments, tmp_path, refusal, change, reason
):
    assert reason in refusal(*arguments(change))
    assert not (tmp_path / "out").exists()


def with_bad_output() -> str:
    """Return a workflow that ComfyUI would run without the second output."""
    nodes = shipped()
    nodes["copy"] = {**nodes["save"], "inputs": {**nodes["save"]["inputs"], "crf": 99}}
    return json.dumps(nodes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("not json", "is not JSON"),
        ("[]", "this is not a workflow"),
        ('{"nodes": [], "links": []}', "Export (API)"),
        ('{"1": {"class_type": "KSampler", "inputs": {}}}', "missing_node_type"),
        ("{}", "prompt_no_outputs"),
        (with_bad_output(), "copy (WanStreamSaveVideo): value_bigger_than_max"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(arguments, tmp_path, refusal, content, reason):
    path = tmp_path / "workflow.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert reason in refusal(*arguments(workflow=path))


def test_unusable_folders_are_refused(arguments, tmp_path, refusal):
    assert "wanstream make-test-model" in refusal(*arguments(models=tmp_path / "none"))
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    assert "is not a folder, but one is needed there" in refusal(*arguments(*SMALL))


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("give another size"), "give another size"), (ZeroDivisionError(), "Traceback")],
    ids=["refusal", "fault"],
)
def test_a_node_that_fails_is_named(error, message, arguments, capsys, monkeypatch):
    """An error that is not a refusal has a traceback."""
    monkeypatch.setattr(WanStreamEmptyLatent, "execute", mock.Mock(side_effect=error))
    assert main(arguments(*SMALL)) == FAILED
    output = capsys.readouterr().err
    assert "failed: node latent (WanStreamEmptyLatent): " in output
    assert message in output
    assert ("Traceback" in output) == (message == "Traceback")
    assert ("ZeroDivisionError" in output) == (message == "Traceback")


def test_wrong_options_end_with_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", str(T2V)])
    assert ended.value.code == INVALID
    assert "--out" in capsys.readouterr().err


def test_a_test_model_for_an_unsuitable_workflow_or_folder_is_refused(tmp_path, refusal):
    models = tmp_path / "models"
    for workflow, code, reason in (
        ("native_flux.json", FAILED, "the test model has no"),
        ("none.json", INVALID, "none.json cannot be read"),
    ):
        files = [str(T2V), str(WORKFLOWS / workflow)]
        assert reason in refusal("make-test-model", str(models), "--workflow", *files, code=code)
        assert not models.exists()
    (tmp_path / "mine.txt").write_text("not a model", encoding="utf-8")
    assert str(tmp_path) in refusal("make-test-model", str(tmp_path), code=FAILED)


@pytest.mark.slow  # runs whole commands
def test_a_test_model_for_a_workflow_is_small_and_runs_it(arguments, tmp_path):
    """As `scripts/demo` does. The README has the size."""
    models = tmp_path / "models"
    assert main(["make-test-model", str(models), "--workflow", str(T2V)]) == DONE
    files = [path for path in models.rglob("*.safetensors") if path.is_file()]
    assert len(files) == 4
    assert 65e6 < sum(path.stat().st_size for path in files) < 75e6
    assert main(arguments(*SIZE, "sampler.steps=1", models=models)) == DONE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks and signals are POSIX")
def test_ctrl_c_ends_a_run_between_two_blocks(arguments, tmp_path):
    stage = Stage(tmp_path / "stage", {}, (), ())
    stage.command = arguments(*SIZE, "sampler.steps=1000")
    client = stage.start()
    assert eventually(lambda: "sampler:" in stage.stderr())
    stage.signal(client, signal.SIGINT)
    assert stage.wait(client) == INTERRUPTED
    assert stage.stderr().splitlines()[-1] == "stopped"
    assert list((tmp_path / "out").glob("**/*.mp4")) == []


@pytest.mark.slow
def test_a_full_disk_costs_the_video_but_not_the_latent(arguments, tmp_path, capsys):
    with largest_file(4000):  # room for the latent, but not for the video
        assert main(arguments(*SMALL)) == FAILED
    (kept,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert kept == tmp_path / "out" / "latents" / "WanStream_00001_.latent"
    assert f"The latent is kept in {kept}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_real_depth_in_a_new_process(arguments, full_sample_model):
    """Forty blocks and two LoRAs, as a user starts them."""
    file = WORKFLOWS / "t2v_lightning.json"
    call = [sys.executable, "-m", "wanstream.cli"]
    call += arguments(*SIZE, "sampler.steps=2", workflow=file, models=full_sample_model.folder)
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == DONE, done.stderr
    assert done.stdout.splitlines()[-1].endswith("t2v_lightning_00001_.mp4")
