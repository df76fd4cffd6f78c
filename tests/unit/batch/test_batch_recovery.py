"""Recovery in a batch with computing replaced: a damaged journal, finished videos, latents."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import pytest
import torch

from wanstream.batch import spec as batch_module
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.host.embedded.run import NodeFailedError, Workflow
from wanstream.nodes.runs.video_file import write_video
from wanstream.tests.faults.replaced import computing_replaced, frames_of, named_models

T2V = Path(__file__).parents[3] / "workflows" / "api" / "t2v.json"
ROWS = [{"sampler.seed": 1}, {"sampler.seed": 2}, {"sampler.seed": 3, "name": "shot"}]

Batch = Callable[..., int]


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    """`batch(rows=ROWS, *more)` runs a batch into `out`."""
    workflow = json.loads(T2V.read_text(encoding="utf-8"))
    (tmp_path / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    models = named_models(tmp_path / "models", workflow)

    def run(rows: list[dict[str, object]] = ROWS, *more: str) -> int:
        (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        files = [str(tmp_path / "jobs.jsonl"), "--workflow", str(tmp_path / "workflow.json")]
        return main(
            ["batch", *files, "--out", str(tmp_path / "out"), "--models", str(models), *more]
        )

    with computing_replaced():
        yield run


@pytest.fixture
def computed(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list with the seeds computed so far."""
    seeds: list[int] = []
    inner = Workflow.run

    def counted(workflow: Workflow, **options: object) -> object:
        seeds.append(workflow.verdict.prompt["sampler"]["inputs"]["seed"])
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", counted)
    return seeds


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.mp4"))}


def states(folder: Path) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "journal.sqlite")
    rows = connection.execute("SELECT stem, state FROM rows ORDER BY line").fetchall()
    connection.close()
    return rows


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "overwritten": lambda path: path.write_text("no journal"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("copy", ["whole", "damaged", "gone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_same_command_goes_on_after_its_journal_was_damaged(
    batch: Batch,
    computed: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    copy: str,
) -> None:
    assert batch(ROWS[:2]) == DONE
    out = tmp_path / "out"
    made = contents(out)
    DAMAGES[damage](out / "journal.sqlite")
    if copy != "whole":
        DAMAGES["overwritten" if copy == "damaged" else "gone"](out / "journal.sqlite.before")
    computed.clear()
    capsys.readouterr()
    assert batch() == DONE
    assert computed == [3], "nothing is computed twice"
    assert {name: contents(out)[name] for name in made} == made
    assert states(out) == [("00001", "done"), ("00002", "done"), ("shot", "done")]
    told = capsys.readouterr().err
    if damage not in {"empty", "gone"}:
        assert "is damaged" in told
        assert "it is kept as journal.sqlite.damaged; the batch resumes from" in told
        assert (out / "journal.sqlite.damaged").is_file()
    if copy == "whole":
        assert "its last copy, journal.sqlite.before" in told
    assert {path.name for path in out.iterdir()} <= {
        *(
            "00001.mp4",
            "00002.mp4",
            "shot.mp4",
            ".wanstream",
            "journal.sqlite",
            "journal.sqlite.lock",
        ),
        *("journal.sqlite.before", "journal.sqlite.damaged"),
    }
    assert batch() == DONE
    assert computed == [3]
    assert "damaged" not in capsys.readouterr().err


def test_videos_are_known_by_their_workflow_wherever_their_rows_are_now(
    batch: Batch, computed: list[int], tmp_path: Path
) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    made = contents(out)
    for path in out.glob("journal.sqlite*"):
        path.unlink()
    computed.clear()
    assert batch([{"sampler.seed": 9}, ROWS[1], ROWS[0], ROWS[2]]) == DONE
    assert computed == [9]
    assert states(out) == [
        ("00005", "done"),
        ("00002", "done"),
        ("00001", "done"),
        ("shot", "done"),
    ]
    assert {name: contents(out)[name] for name in made} == made


def test_a_video_of_another_workflow_is_never_taken_for_a_row(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    made = contents(out)
    (out / "journal.sqlite").write_text("no journal")
    (out / "journal.sqlite.before").unlink()
    before = {path.name for path in out.iterdir()}
    workflow = json.loads((tmp_path / "workflow.json").read_text())
    workflow["sampler"]["inputs"]["steps"] = 3
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    assert batch() == INVALID
    assert "which is not from this batch" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == before, "a refusal changes nothing"
    assert contents(out) == made
    workflow["sampler"]["inputs"]["steps"] = 20
    (tmp_path / "workflow.json").write_text(T2V.read_text(encoding="utf-8"))
    assert batch() == DONE
    assert contents(out) == made


def test_a_copy_of_another_batch_is_kept_and_not_gone_on_from(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    made, copy = contents(out), (out / "journal.sqlite.before").read_bytes()
    (out / "journal.sqlite").write_text("no journal")
    workflow = json.loads((tmp_path / "workflow.json").read_text())
    workflow["sampler"]["inputs"]["steps"] = 3
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    assert batch([{"sampler.seed": 7, "name": "x"}]) == DONE
    told = capsys.readouterr().err
    assert "is damaged" in told
    assert (
        "it is kept as journal.sqlite.damaged; the batch resumes from the finished videos in the "
        "folder" in told
    )
    assert {name: contents(out)[name] for name in made} == made
    assert states(out) == [("x", "done")]
    assert (out / "journal.sqlite.damaged.before").read_bytes() == copy


def test_recovery_names_the_rows_that_it_has_found(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    (out / "journal.sqlite").write_text("no journal")
    (out / "journal.sqlite.before").unlink()
    (out / "00002.mp4").unlink()
    capsys.readouterr()
    assert batch() == DONE
    told = capsys.readouterr().err
    assert "line 1 does not run again: a finished file contains its workflow" in told
    assert "line 3 does not run again" in told
    assert "line 2 is not made again" not in told


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("journal", ["damaged", "whole"])
def test_a_refusal_of_names_moves_and_removes_nothing(
    batch: Batch, tmp_path: Path, journal: str
) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    (out / "00002.mp4").write_bytes(b"of somebody else")
    (out / ".wanstream" / "parts" / "00001.mp4").write_bytes(b"half")
    (out / "00001.mp4").rename(out / ".wanstream" / "parts" / "00009.mp4")
    if journal == "damaged":
        (out / "journal.sqlite").write_text("no journal")
        (out / "journal.sqlite.before").unlink()
    before = everything(out)
    assert batch() == INVALID
    assert {
        name: content for name, content in everything(out).items() if ".sqlite" not in name
    } == {name: content for name, content in before.items() if ".sqlite" not in name}
    if journal == "damaged":
        assert everything(out) == before


def test_files_that_the_journal_has_are_not_opened_at_the_start(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch() == DONE
    for name in (
        "mine.mp4",
        "00077.mp4",
        "1.mp4",
    ):  # only the second one may belong to an unnamed row
        write_video(tmp_path / "out" / name, frames_of(1), fps=16, crf=30, metadata={})
    opened: list[str] = []
    inner = batch_module.stored_prompt

    def counted(path: Path) -> tuple[object, object]:
        opened.append(path.name)
        return inner(path)

    monkeypatch.setattr(batch_module, "stored_prompt", counted)
    assert batch([*ROWS, {"sampler.seed": 4}]) == DONE
    assert [name for name in opened if name.endswith(".mp4")] == ["00077.mp4"]


@pytest.fixture
def runs(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list with the number of videos in each workflow run."""
    saved: list[int] = []
    inner = Workflow.run

    def counted(workflow: Workflow, **options: object) -> object:
        saved.append(
            sum(
                node["class_type"] == "WanStreamSaveVideo"
                for node in workflow.verdict.prompt.values()
            )
        )
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", counted)
    return saved


def forget(out: Path) -> None:
    for path in out.glob("journal.sqlite*"):
        path.unlink()


def pictures(folder: Path) -> dict[str, bytes]:
    """Return each video's frames, by file name."""
    found = {}
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            found[path.name] = b"".join(
                frame.to_ndarray().tobytes() for frame in container.decode(video=0)
            )
    return found


def test_videos_of_lanes_are_known_by_their_lane(
    batch: Batch, runs: list[int], tmp_path: Path
) -> None:
    assert batch(ROWS, "--share-weights", "3") == DONE
    out = tmp_path / "out"
    made = contents(out)
    first, second, shot = pictures(out).values()
    assert runs == [3]
    forget(out)
    (out / "00002.mp4").unlink()
    runs.clear()
    rows = [{"sampler.seed": 9}, ROWS[1], ROWS[0], ROWS[2]]
    assert batch(rows, "--share-weights", "3") == DONE
    assert runs == [2], "what is there is not computed again"
    assert {name: contents(out)[name] for name in ("00001.mp4", "shot.mp4")} == {
        name: made[name] for name in ("00001.mp4", "shot.mp4")
    }
    by_row = [pictures(out)[f"{stem}.mp4"] for stem, _ in states(out)]
    assert by_row[1:] == [second, first, shot], "every row has its own lane's video"
    forget(out)
    runs.clear()
    assert batch(rows) == DONE
    assert runs == []


def test_rows_with_several_files_are_known_when_all_are_there(
    batch: Batch, runs: list[int], tmp_path: Path
) -> None:
    workflow = json.loads((tmp_path / "workflow.json").read_text())
    workflow["more"] = workflow["save"]
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    assert batch(ROWS) == DONE
    out, parts = tmp_path / "out", tmp_path / "out" / ".wanstream" / "parts"
    made = contents(out)
    assert len(made) == 6
    forget(out)
    (out / "shot~2.mp4").rename(parts / "shot~2.mp4")  # as after a kill between the two renames
    runs.clear()
    assert batch(ROWS) == DONE
    assert runs == []
    assert contents(out) == made
    forget(out)
    (out / "00001~1.mp4").unlink()
    (out / "00001~2.mp4").unlink()
    (out / "shot~1.mp4").rename(parts / "shot~1.mp4")
    (out / "shot~2.mp4").unlink()
    assert batch(ROWS) == DONE
    assert runs == [2, 2]
    assert contents(out).keys() == made.keys()


def test_half_a_video_hides_no_whole_ones_of_its_name(
    batch: Batch, runs: list[int], tmp_path: Path
) -> None:
    workflow = json.loads((tmp_path / "workflow.json").read_text())
    workflow["more"] = workflow["save"]
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    assert batch(ROWS) == DONE
    out = tmp_path / "out"
    (out / "00001.mp4").write_bytes((out / "00001~1.mp4").read_bytes()[:-40])
    forget(out)
    runs.clear()
    assert batch(ROWS) == DONE
    assert runs == []


def test_half_a_video_is_made_again(batch: Batch, computed: list[int], tmp_path: Path) -> None:
    assert batch() == DONE
    out = tmp_path / "out"
    made = contents(out)
    for path in out.glob("journal.sqlite*"):
        path.unlink()
    (out / "00001.mp4").rename(out / ".wanstream" / "parts" / "00001.mp4")
    (out / "00002.mp4").unlink()
    (out / ".wanstream" / "parts" / "00002.mp4").write_bytes(made["00002.mp4"][:-40])
    computed.clear()
    assert batch() == DONE
    assert computed == [2]
    assert contents(out) == made


def latent_of(out: Path, prompt_id: str) -> Path:
    path = out / ".wanstream" / "made" / prompt_id / "latents" / "x.latent"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_latents_of_killed_rows_go_when_the_rows_are_done_and_others_are_named(
    batch: Batch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    inner = Workflow.run
    left: list[Path] = []

    def killed(workflow: Workflow, **options: object) -> object:
        prompt = workflow.verdict.prompt
        left.append(latent_of(out, workflow.folders.output.name))
        if prompt["sampler"]["inputs"]["seed"] == 1 and len(left) == 1:
            raise SystemExit(9)
        if prompt["sampler"]["inputs"]["seed"] == 2:
            raise NodeFailedError("frames", "WanStreamVAEDecode", ValueError("no room"))
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", killed)
    with pytest.raises(SystemExit):
        batch()
    assert [path.exists() for path in left] == [True]
    stranger = latent_of(out, "an-id-of-nobody")
    capsys.readouterr()
    assert batch() == FAILED
    assert [path.exists() for path in left] == [False, False, True, False]
    told = capsys.readouterr().err
    assert f"the latent of line 2, which is not done, is kept in {left[2]}" in told
    assert (
        f"the latent of a row that is not in the batch, which is not done, is kept in {stranger}"
        in told
    )
    assert told.count("is kept in") == 2
    monkeypatch.setattr(Workflow, "run", inner)
    assert batch() == DONE
    assert not left[2].exists()
    assert stranger.exists()


def test_a_video_without_a_workflow_in_the_way_is_refused_as_before(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    write_video(
        tmp_path / "out" / "00001.mp4", frames_of(1), fps=16, crf=30, metadata={"prompt": "[" * 50}
    )
    assert batch() == INVALID
    assert "contains 00001.mp4, which is not from this batch" in capsys.readouterr().err


@pytest.mark.skipif(
    not hasattr(torch, "AcceleratorError"), reason="torch before 2.8 has no such class"
)
def test_a_row_that_breaks_the_device_each_time_does_not_keep_the_others_from_running(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Workflow.run

    def run(workflow: Workflow, **options: object) -> object:
        if workflow.verdict.prompt["sampler"]["inputs"]["seed"] == 1:
            error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            raise NodeFailedError("sampler", "WanStreamSampler", error) from error
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", run)
    assert [batch() for _ in range(3)] == [FAILED] * 3
    assert states(tmp_path / "out") == [("00001", "posted"), ("00002", "done"), ("shot", "done")]
