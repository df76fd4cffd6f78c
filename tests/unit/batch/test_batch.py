"""`wanstream batch` in the embedded host, from the command line to the files."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from wanstream.batch.opening import locked
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED, INVALID
from wanstream.cli.batch import embedded_backend
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import NodeFailedError, Workflow
from wanstream.tests.faults.replaced import run_replaced
from wanstream.tests.support.forked_command import ForkedCommand
from wanstream.wan.latents import read_latent, write_latent

T2V = Path(__file__).parents[3] / "workflows" / "api" / "t2v.json"
SMALL = {
    "latent": {"width": 32, "height": 32, "frames": 5},
    "sampler": {"steps": 2},
    "save": {"crf": 30},
}

Batch = Callable[..., list[str]]
FORKED = pytest.mark.skipif(sys.platform == "win32", reason="forks and signals are POSIX")


def small_workflow() -> dict[str, Any]:
    workflow = json.loads(T2V.read_text(encoding="utf-8"))
    for node_id, inputs in SMALL.items():
        workflow[node_id]["inputs"] |= inputs
    return workflow


@pytest.fixture
def batch(tmp_path: Path, sample_models: Path) -> Batch:
    """Return a function from JSON rows to a `wanstream batch` command line."""

    def arguments(
        *rows: object, workflow: dict[str, Any] | None = None, more: Sequence[str] = ()
    ) -> list[str]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (tmp_path / "workflow.json").write_text(
            json.dumps(workflow or small_workflow()), encoding="utf-8"
        )
        files = [str(tmp_path / "jobs.jsonl"), "--workflow", str(tmp_path / "workflow.json")]
        folders = [
            "--out",
            str(tmp_path / "out"),
            "--models",
            str(sample_models),
            "--input",
            str(tmp_path),
        ]
        return ["batch", *files, *folders, *more]

    return arguments


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".mp4")


def seed_of(path: Path) -> int:
    """Return the seed from the graph in a video."""
    with av.open(str(path)) as container:
        seed: int = json.loads(container.metadata["prompt"])["sampler"]["inputs"]["seed"]
    return seed


def journal_of(folder: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(folder / "journal.sqlite")
    rows = connection.execute(
        "SELECT line, stem, state, attempts, error FROM rows ORDER BY line"
    ).fetchall()
    connection.close()
    return rows


def test_a_batch_makes_a_file_for_each_row_and_names_the_lines_that_are_none(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"sampler.seed": 1},
        {"sampler.seed": 2, "name": "shot"},
        "no json",
        {"sampler.sed": 3},
        {"KSampler.x": 1},
    ]
    rows += [
        {"sampler.steps": 0, "sampler.seed": 4},
        {"experts.low_noise": "none"},
        {"sampler.seed": 1},
    ]
    assert main(batch(*rows)) == FAILED

    out = tmp_path / "out"
    assert made(out) == ["00001.mp4", "00008.mp4", "shot.mp4"]
    assert [seed_of(out / name) for name in made(out)] == [1, 1, 2]
    printed = capsys.readouterr()
    assert (
        printed.out
        == f"3 of 8 rows are done in {out}; 5 failed: correct them and run the same command again\n"
    )
    assert re.search(r"^3 rows in [\d.:]+ s, [\d.]+ s a row$", printed.err, re.MULTILINE)
    for told in [
        "line 3 failed: this is not JSON",
        "line 4 failed: WanStreamSampler has no input sed; did you mean seed? it has experts",
        "line 5 failed: KSampler.x: no such node; the workflow has experts",
        "line 6 failed: node sampler (WanStreamSampler): 0 steps",
        "line 7 failed: node experts (WanStreamExperts): Value not in list: low_noise: 'none' not "
        "in",
    ]:
        assert told in printed.err
    assert "8/8" in printed.err
    states = [(line, stem, state, attempts) for line, stem, state, attempts, _ in journal_of(out)]
    assert states == [
        *(
            (1, "00001", "done", 1),
            (2, "shot", "done", 1),
            (3, None, "failed", 0),
            (4, None, "failed", 0),
        ),
        *(
            (5, None, "failed", 0),
            (6, "00006", "failed", 1),
            (7, "00007", "failed", 1),
            (8, "00008", "done", 1),
        ),
    ]
    # Only the files and the journal remain.
    journals = {"journal.sqlite", "journal.sqlite.before", "journal.sqlite.lock"}
    assert {path.name for path in out.iterdir()} == {*made(out), *journals, ".wanstream"}
    assert [path for path in (out / ".wanstream").rglob("*") if path.is_file()] == [
        out / ".wanstream" / "lock"
    ]


def test_a_row_loads_a_latent_of_the_output_folder(batch: Batch, tmp_path: Path) -> None:
    workflow = {
        "load": {"class_type": "WanStreamLoadLatent", "inputs": {"file": "latents/first.latent"}},
        "save": {
            "class_type": "WanStreamSaveLatent",
            "inputs": {"latent": ["load", 0], "filename_prefix": "latents/next"},
        },
    }
    for number, name in enumerate(("out/latents/first", "out/second", "third")):
        path = tmp_path / f"{name}.latent"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_latent(path, torch.full((1, 16, 1, 2, 2), float(number)))
    rows = [
        {"load.file": name, "name": f"of {name.partition('.')[0]}"}
        for name in ("second.latent", "third.latent [input]", "lost.latent")
    ]
    assert main(batch({"name": "of first"}, *rows, workflow=workflow)) == FAILED
    saved = {
        path.stem: read_latent(path).samples.unique().item()
        for path in (tmp_path / "out").glob("of *.latent")
    }
    assert saved == {"of first": 0, "of second": 1, "of third": 2}


def test_states_of_a_row_are_found_again_by_the_next_command(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's output folder has another name in each attempt."""
    places: list[Folders] = []

    def refuse(prompt: object, *, folders: Folders, **_: object) -> None:
        places.append(folders)
        raise ValueError("only the folders count here")

    monkeypatch.setattr(embedded_backend, "load_workflow", refuse)
    for _ in range(2):
        assert main(batch({"sampler.seed": 1})) != DONE
    work = tmp_path / "out" / ".wanstream"
    assert {each.states for each in places} == {work / "states"}
    assert all(work / "made" in (each.output, *each.output.parents) for each in places)


def test_the_same_command_again_makes_only_what_is_missing(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(batch({"sampler.seed": 1}, {"sampler.seed": 2})) == DONE
    before = {name: (out / name).stat().st_mtime_ns for name in made(out)}
    assert main(batch({"sampler.seed": 3}, {"sampler.seed": 1}, {"sampler.seed": 2})) == DONE
    assert [seed_of(out / name) for name in made(out)] == [1, 2, 3]
    (out / "00002.mp4").unlink()
    assert main(batch({"sampler.seed": 1}, {"sampler.seed": 2}, {"sampler.seed": 3})) == DONE
    assert "line 2 runs again: its files are missing" in capsys.readouterr().err
    assert [seed_of(out / name) for name in made(out)] == [1, 2, 3]
    assert (out / "00001.mp4").stat().st_mtime_ns == before["00001.mp4"]
    assert (out / "00002.mp4").stat().st_mtime_ns > before["00002.mp4"]


def test_csv_cells_fit_their_inputs(batch: Batch, tmp_path: Path) -> None:
    call = batch({})
    (tmp_path / "jobs.csv").write_text(
        'WanStreamSampler.seed,text.positive,sampler.add_noise,save.fps\n5,"1, 2\nfly",TRUE,8.5\n',
        encoding="utf-8",
    )
    call[1] = str(tmp_path / "jobs.csv")
    assert main(call) == DONE
    with av.open(str(tmp_path / "out" / "00001.mp4")) as container:
        graph = json.loads(container.metadata["prompt"])
        assert float(container.streams.video[0].average_rate) == 8.5
    assert graph["sampler"]["inputs"]["seed"] == 5
    assert graph["text"]["inputs"]["positive"] == "1, 2\nfly"


def test_a_dry_run_judges_all_rows_and_writes_nothing(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = {"sampler.seed": 1}, {"save.crf": 99}
    assert main(batch(good, bad, "[]", more=["--dry-run"])) == INVALID
    printed = capsys.readouterr()
    assert printed.out == "1 of 3 rows are valid; nothing was queued\n"
    assert (
        "line 2: node save (WanStreamSaveVideo): Value 99 bigger than max of 51: crf" in printed.err
    )
    assert "line 3: a row is an object" in printed.err
    assert main(batch(good, more=["--dry-run"])) == DONE
    assert not (tmp_path / "out").exists()


def test_a_row_that_fails_while_it_runs_does_not_stop_the_others(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = {"experts.low_noise": "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"}
    assert main(batch(mixed, {"sampler.seed": 2})) == FAILED
    assert made(tmp_path / "out") == ["00002.mp4"]
    assert "line 1 failed: node experts (WanStreamExperts)" in capsys.readouterr().err
    assert main(batch(mixed, {"sampler.seed": 3}, more=["--max-failures", "1"])) == FAILED
    assert made(tmp_path / "out") == ["00002.mp4"]
    assert "1 are left: run the same command again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--models", "/none"], "wanstream make-test-model"),
        (["--workflow", "/none.json"], "cannot be read"),
        (["--out", "/dev/null/x"], "--out /dev/null/x"),
        (["--journal", "/none/journal.sqlite"], "cannot be locked"),
        (["--server", "127.0.0.1:1"], "write an address like http://127.0.0.1:8188"),
        (["--server", "http://127.0.0.1:1"], "is ComfyUI running there?"),
    ],
)
def test_a_command_that_cannot_be_run_runs_nothing(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], reason: str
) -> None:
    assert main(batch({"sampler.seed": 1}, more=change)) == INVALID
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""
    assert not list(tmp_path.glob("out/*.mp4"))


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        ({"sampler.sed": 1}, "WanStreamSampler has no input sed"),
        (
            {"sampler.seed": 1, "WanStreamSampler.seed": 2},
            "sampler.seed and WanStreamSampler.seed are the same input",
        ),
    ],
    ids=["misspelled", "given twice"],
)
def test_a_fault_of_all_rows_is_printed_once_and_nothing_runs(
    batch: Batch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    inputs: dict[str, int],
    fault: str,
) -> None:
    assert main(batch(inputs, inputs | {"save.crf": 40})) == INVALID
    printed = capsys.readouterr()
    assert printed.err.startswith(f"no row can run: lines 1-2: {fault}")
    assert len(printed.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["jobs.jsonl", "notes.csv"])
def test_a_file_that_was_never_a_journal_is_not_changed(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = batch({"sampler.seed": 1}, more=["--journal", str(tmp_path / name)])
    (tmp_path / "notes.csv").write_text("sampler.seed\n1\n", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert main(command) == INVALID
    assert f"{name} is not a journal, and is not changed" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_nodes_of_others_need_a_server(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    workflow = {**small_workflow(), "9": {"class_type": "KSampler", "inputs": {}}}
    assert main(batch({"sampler.seed": 1}, workflow=workflow)) == INVALID
    told = capsys.readouterr().err
    assert "--server" in told
    assert "node 9: unknown class KSampler" in told


def test_a_journal_belongs_to_one_workflow_and_one_client(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(batch({"sampler.seed": 1})) == DONE
    workflow = small_workflow()
    workflow["sampler"]["_meta"]["title"] = "another title"
    assert main(batch({"sampler.seed": 1}, workflow=workflow)) == DONE
    workflow["sampler"]["inputs"]["steps"] = 3
    assert main(batch({"sampler.seed": 1}, workflow=workflow)) == INVALID
    assert "is the journal of another workflow" in capsys.readouterr().err
    own_journal = ["--journal", str(tmp_path / "other.sqlite")]
    with locked(tmp_path / "out" / ".wanstream" / "lock", of="x"):
        assert main(batch({"sampler.seed": 2}, more=own_journal)) == INVALID
    with locked(tmp_path / "other.sqlite.lock", of="x"):
        assert main(batch({"sampler.seed": 2}, more=own_journal)) == INVALID
    assert capsys.readouterr().err.count("another `wanstream batch` is using") == 2
    # The existing file is not in the other journal.
    assert main(batch({"sampler.seed": 2}, more=own_journal)) == INVALID
    assert "contains 00001.mp4, which is not from this batch" in capsys.readouterr().err
    assert seed_of(tmp_path / "out" / "00001.mp4") == 1


ENDLESS = {"sampler.steps": 1000}


@pytest.mark.slow
@FORKED
def test_ctrl_c_ends_after_the_row_and_a_second_one_at_once(batch: Batch, tmp_path: Path) -> None:
    command = ForkedCommand(
        batch({"sampler.seed": 1, "sampler.steps": 40}, {"sampler.seed": 2}), tmp_path
    )
    command.wait_for("sampler 2/40")
    command.signal(signal.SIGINT)
    code, said, _ = command.end()
    assert code == INTERRUPTED
    assert said == (
        f"1 of 2 rows are done in {tmp_path / 'out'}; 1 are left: run the same command again to "
        "resume\n"
    )
    assert made(tmp_path / "out") == ["00001.mp4"]

    rows = [
        {"sampler.seed": 1, "sampler.steps": 40},
        {"sampler.seed": 2, **ENDLESS},
        {"sampler.seed": 3},
    ]
    command = ForkedCommand(batch(*rows), tmp_path)
    command.wait_for("sampler 2/1000")
    command.signal(signal.SIGINT)
    command.wait_for("press Ctrl-C again to stop it too")
    command.signal(signal.SIGINT)
    code, said, rest = command.end()
    assert code == INTERRUPTED
    assert "1 of 3 rows are done" in said
    assert "Traceback" not in rest
    assert [state for _, _, state, _, _ in journal_of(tmp_path / "out")][-2:] == [
        "waiting",
        "waiting",
    ]


@pytest.mark.slow
@FORKED
def test_a_client_that_was_killed_goes_on(batch: Batch, tmp_path: Path) -> None:
    rows = [{"sampler.seed": seed, "sampler.steps": 10} for seed in range(1, 4)]
    for text in ("1/3", "2/3"):
        command = ForkedCommand(batch(*rows), tmp_path)
        command.wait_for(text)
        command.wait_for("sampler 3/10")
        command.signal(signal.SIGKILL)
        assert command.end()[0] == -signal.SIGKILL
    assert main(batch(*rows)) == DONE
    out = tmp_path / "out"
    assert [seed_of(out / name) for name in made(out)] == [1, 2, 3]
    assert sum(attempts for *_, attempts, _ in journal_of(out)) == 5
    assert [path for path in (out / ".wanstream").rglob("*") if path.is_file()] == [
        out / ".wanstream" / "lock"
    ]


@pytest.mark.slow
@FORKED
@pytest.mark.parametrize(
    ("limit", "reason"), [(1, "lock"), (4000, "the journal"), (44_000, "could not be written")]
)
def test_a_full_disk_ends_the_batch_and_the_same_command_goes_on(
    batch: Batch, tmp_path: Path, limit: int, reason: str
) -> None:
    large = {"latent.width": 64, "latent.height": 64, "latent.frames": 9, "save.crf": 1}
    rows = [{"sampler.seed": seed, **large} for seed in (1, 2)]
    code, _, said = ForkedCommand(batch(*rows), tmp_path, largest_file=limit).end()
    assert code in {FAILED, INVALID}
    assert reason in said
    assert "File too large" in said
    assert f"free space in {tmp_path / 'out'}, then run the same command again to resume" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").glob("*.mp4"))
    assert main(batch(*rows)) == DONE
    assert made(tmp_path / "out") == ["00001.mp4", "00002.mp4"]


@pytest.mark.skipif(
    not hasattr(torch, "AcceleratorError"), reason="torch before 2.8 has no class for such errors"
)
def test_a_broken_device_ends_the_batch_and_fails_no_row(
    batch: Batch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(workflow: Workflow, **given: Any) -> Any:
        if workflow.verdict.prompt["sampler"]["inputs"]["seed"] == 1:
            return run_replaced(workflow, **given)
        cause = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        raise NodeFailedError("sampler", "WanStreamSampler", cause) from cause

    call = batch(*({"sampler.seed": seed} for seed in range(1, 5)))
    with monkeypatch.context() as patch:
        patch.setattr(Workflow, "run", run)
        assert main(call) == FAILED
    assert [state for _, _, state, _, _ in journal_of(tmp_path / "out")] == [
        "done",
        "posted",
        "waiting",
        "waiting",
    ]
    printed = capsys.readouterr().err
    assert (
        "failed: node sampler (WanStreamSampler): AcceleratorError: CUDA error: an illegal memory "
        "access" in printed
    )
    assert "run the same command again, with a new process, to resume" in printed
    monkeypatch.setattr(Workflow, "run", run_replaced)
    assert main(call) == DONE
