"""`wanstream batch` in the embedded host, from the command line to the files."""

from __future__ import annotations

import json
import re
import signal
import sys

import av
import pytest
import torch

from wanstream.batch.opening import locked
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED, INVALID
from wanstream.cli.batch import embedded_backend
from wanstream.tests.faults.stage import Stage
from wanstream.tests.support.batch.command import command_line, journal_rows, shipped, videos
from wanstream.tests.support.full_disk import largest_file
from wanstream.tests.support.polling import eventually
from wanstream.wan.latents import read_latent, write_latent

SMALL = {"latent": {"width": 32, "height": 32, "frames": 5}, "save": {"crf": 30}}
T2V = shipped(sampler={"steps": 2}, **SMALL)


def seeded(*seeds, **values):
    return [{"sampler.seed": seed, **values} for seed in seeds]


@pytest.fixture
def call(tmp_path, sample_models):
    """`call(*rows, workflow=T2V, options=())` returns a `wanstream batch` command line."""
    places = ["--models", sample_models, "--input", tmp_path]
    return lambda *rows, workflow=T2V, options=(): command_line(
        tmp_path, workflow, *rows, options=[*places, *options]
    )


@pytest.fixture
def run(call):
    """`run(*rows, workflow=T2V, options=())` runs the command and returns the exit code."""
    return lambda *rows, **given: main(call(*rows, **given))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def seeds_of(out):
    """Return the seeds in the videos by name."""
    found = {}
    for path in sorted(out.glob("*.mp4")):
        with av.open(str(path)) as container:
            graph = json.loads(container.metadata["prompt"])
        found[path.stem] = graph["sampler"]["inputs"]["seed"]
    return found


def test_a_batch_makes_a_file_for_each_row_and_names_bad_lines(run, out, capsys):
    rows = [
        {"sampler.seed": 1},
        {"sampler.seed": 2, "name": "shot"},
        "no json",
        {"sampler.sed": 3},
        {"KSampler.x": 1},
        {"sampler.steps": 0, "sampler.seed": 4},
        {"experts.low_noise": "none"},
        {"sampler.seed": 1},
    ]
    assert run(*rows) == FAILED
    assert seeds_of(out) == {"00001": 1, "00008": 1, "shot": 2}
    printed = capsys.readouterr()
    again = "correct them and run the same command again"
    assert printed.out == f"3 of 8 rows are done in {out}; 5 failed: {again}\n"
    assert re.search(r"^3 rows in [\d.:]+ s, [\d.]+ s a row$", printed.err, re.MULTILINE)
    for told in [
        "line 3 failed: this is not JSON",
        "line 4 failed: WanStreamSampler has no input sed; did you mean seed? it has experts",
        "line 5 failed: KSampler.x: no such node; the workflow has experts",
        "line 6 failed: node sampler (WanStreamSampler): 0 steps",
        "line 7 failed: node experts (WanStreamExperts): Value not in list: low_noise: 'none' not",
        "8/8",
    ]:
        assert told in printed.err
    assert journal_rows(out, "stem, state, attempts") == [
        ("00001", "done", 1),
        ("shot", "done", 1),
        *[(None, "failed", 0)] * 3,
        ("00006", "failed", 1),
        ("00007", "failed", 1),
        ("00008", "done", 1),
    ]
    # Only the files and the journal remain.
    journals = {"journal.sqlite", "journal.sqlite.before", "journal.sqlite.lock", ".wanstream"}
    assert {path.name for path in out.iterdir()} == {*videos(out), *journals}
    left = [path.name for path in (out / ".wanstream").rglob("*") if path.is_file()]
    assert left == ["lock"]


def test_a_row_loads_a_latent_of_the_output_folder(run, out):
    inputs = {"latent": ["load", 0], "filename_prefix": "latents/next"}
    workflow = {
        "load": {"class_type": "WanStreamLoadLatent", "inputs": {"file": "latents/first.latent"}},
        "save": {"class_type": "WanStreamSaveLatent", "inputs": inputs},
    }
    (out / "latents").mkdir(parents=True)
    for number, path in enumerate((out / "latents/first", out / "second", out.parent / "third")):
        write_latent(path.with_suffix(".latent"), torch.full((1, 16, 1, 2, 2), float(number)))
    files = {"second": "second.latent", "third": "third.latent [input]", "lost": "lost.latent"}
    rows = [{"load.file": file, "name": f"of {name}"} for name, file in files.items()]
    assert run({"name": "of first"}, *rows, workflow=workflow) == FAILED
    saved = {path.stem: read_latent(path).samples.unique() for path in out.glob("of *.latent")}
    assert saved == {"of first": 0, "of second": 1, "of third": 2}


def test_the_next_command_finds_the_states_of_a_row(run, out, monkeypatch):
    """A row's output folder has another name in each attempt."""
    places = []

    def refuse(prompt, *, folders, **_):
        places.append(folders)
        raise ValueError("only the folders count here")

    monkeypatch.setattr(embedded_backend, "load_workflow", refuse)
    for _ in range(2):
        assert run(*seeded(1)) != DONE
    work = out / ".wanstream"
    assert {each.states for each in places} == {work / "states"}
    assert all(work / "made" in (each.output, *each.output.parents) for each in places)


def test_a_dry_run_judges_all_rows_and_writes_nothing(run, out, capsys):
    assert run(*seeded(1), {"save.crf": 99}, "[]", options=["--dry-run"]) == INVALID
    printed = capsys.readouterr()
    assert printed.out == "1 of 3 rows are valid; nothing was queued\n"
    said = "line 2: node save (WanStreamSaveVideo): Value 99 bigger than max of 51: crf"
    assert said in printed.err
    assert "line 3: a row is an object" in printed.err
    passes = [*seeded(1, 2, 3, 4, 5), {"sampler.steps": 3}]
    assert run(*passes, options=["--dry-run", "--share-weights", "4"]) == DONE
    printed = capsys.readouterr()
    assert "6 of 6 rows are valid, in 3 passes; nothing was queued" in printed.out
    assert "line 6 runs alone: its sampler.steps is 3" in printed.err
    assert not out.exists()


def test_a_failed_row_does_not_stop_the_others(run, out, capsys):
    mixed = {"experts.low_noise": "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"}
    for limit, made in (("1", []), ("2", ["00002.mp4"])):
        assert run(mixed, *seeded(2), options=["--max-failures", limit]) == FAILED
        assert [*videos(out)] == made
        printed = capsys.readouterr()
        assert "line 1 failed: node experts (WanStreamExperts)" in printed.err
        assert ("1 are left: run the same command again" in printed.out) == (limit == "1")


FOREIGN_NODE = {**T2V, "9": {"class_type": "KSampler", "inputs": {}}}
WEIGHTS = "--share-weights"


@pytest.mark.parametrize(
    ("options", "workflow", "reason"),
    [
        (["--models", "/none"], T2V, "wanstream make-test-model"),
        (["--workflow", "/none.json"], T2V, "cannot be read"),
        (["--out", "/dev/null/x"], T2V, "--out /dev/null/x"),
        (["--journal", "/none/journal.sqlite"], T2V, "cannot be locked"),
        (["--server", "127.0.0.1:1"], T2V, "write an address like http://127.0.0.1:8188"),
        (["--server", "http://127.0.0.1:1"], T2V, "is ComfyUI running there?"),
        ([], FOREIGN_NODE, "--server"),
        ([], FOREIGN_NODE, "node 9: unknown class KSampler"),
        ([WEIGHTS, "1001"], T2V, f"{WEIGHTS} 1001: give a number of rows from 1 to 1000"),
        ([WEIGHTS, "0"], T2V, WEIGHTS),
        ([WEIGHTS, "many"], T2V, WEIGHTS),
    ],
)
def test_a_command_that_cannot_be_run_runs_nothing(run, out, capsys, options, workflow, reason):
    try:
        code: object = run(*seeded(1), workflow=workflow, options=options)
    except SystemExit as ended:  # from the parser
        code = ended.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (INVALID, "")
    assert reason in printed.err
    assert not [*out.glob("*.mp4")]


def test_a_fault_of_all_rows_is_printed_once_and_nothing_runs(run, out, capsys):
    twice = "sampler.seed and WanStreamSampler.seed are the same input"
    for inputs, fault in (
        ({"sampler.sed": 1}, "WanStreamSampler has no input sed"),
        ({"sampler.seed": 1, "WanStreamSampler.seed": 2}, twice),
    ):
        assert run(inputs, inputs | {"save.crf": 40}) == INVALID
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"no row can run: lines 1-2: {fault}")
        assert not out.exists()


@pytest.mark.parametrize("name", ["jobs.jsonl", "notes.csv"])
def test_a_file_that_was_never_a_journal_is_not_changed(call, tmp_path, capsys, name):
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    command = call(*seeded(1), options=["--journal", tmp_path / name])
    (tmp_path / "notes.csv").write_text("sampler.seed\n1\n", encoding="utf-8")
    before = contents()
    assert main(command) == INVALID
    assert f"{name} is not a journal, and is not changed" in capsys.readouterr().err
    assert contents() == before


def test_a_folder_and_a_journal_belong_to_one_client(run, out, capsys):
    journal = out.parent / "other.sqlite"
    (out / ".wanstream").mkdir(parents=True)
    for lock in (out / ".wanstream" / "lock", journal.with_name("other.sqlite.lock")):
        with locked(lock, of="x"):
            assert run(*seeded(2), options=["--journal", journal]) == INVALID
        assert "another `wanstream batch` is using" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks and signals are POSIX")
def test_ctrl_c_ends_after_the_row_and_a_second_one_at_once(call, out, tmp_path):
    stage = Stage(tmp_path / "stage", T2V, (), ())
    first = {"sampler.seed": 1, "sampler.steps": 40}
    stage.command = call(first, *seeded(2))
    client = stage.start()
    assert eventually(lambda: "sampler 2/40" in stage.stderr())
    stage.signal(client, signal.SIGINT)
    assert stage.wait(client) == INTERRUPTED
    left = "1 are left: run the same command again to resume"
    assert f"1 of 2 rows are done in {out}; {left}\n" in stage.stderr()
    assert [*videos(out)] == ["00001.mp4"]

    endless = {"sampler.seed": 2, "sampler.steps": 1000}
    stage = Stage(tmp_path / "second", T2V, (), ())
    stage.command = call(first, endless, *seeded(3))
    client = stage.start()
    for words in ("sampler 2/1000", "press Ctrl-C again to stop it too"):
        assert eventually(lambda words=words: words in stage.stderr())
        stage.signal(client, signal.SIGINT)
    assert stage.wait(client) == INTERRUPTED
    assert "1 of 3 rows are done" in stage.stderr()
    assert "Traceback" not in stage.stderr()
    assert journal_rows(out, "state")[-2:] == [("waiting",)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "reason"), [(1, "lock"), (4000, "the journal"), (44_000, "could not be written")]
)
def test_a_full_disk_ends_the_batch_and_the_same_command_goes_on(call, out, capsys, limit, reason):
    large = {"latent.width": 64, "latent.height": 64, "latent.frames": 9, "save.crf": 1}
    command = call(*seeded(1, 2, **large))
    with largest_file(limit):
        assert main(command) in {FAILED, INVALID}
    told = capsys.readouterr().err
    assert reason in told
    assert "File too large" in told
    assert f"free space in {out}, then run the same command again to resume" in told
    assert "Traceback" not in told
    assert not videos(out)
    assert main(command) == DONE
    assert [*videos(out)] == ["00001.mp4", "00002.mp4"]
