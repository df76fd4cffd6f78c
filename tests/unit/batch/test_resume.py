"""Recovery in a batch with computing replaced: a damaged journal, finished videos, latents."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import av
import pytest
import torch

from wanstream.batch import spec as batch_module
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.host.embedded.run import NodeFailedError, Workflow
from wanstream.nodes.runs.video_file import write_video
from wanstream.tests.faults import replaced
from wanstream.tests.support.batch import foreign
from wanstream.tests.support.batch.command import command_line, journal_rows, shipped, videos
from wanstream.tests.support.marks import needs_device_errors

ROWS = [{"sampler.seed": 1}, {"sampler.seed": 2}, {"sampler.seed": 3, "name": "shot"}]
LANES = ("--share-weights", "3")


class Batch:
    """A batch in a folder, with the seeds of the videos in each workflow run."""

    def __init__(self, folder: Path) -> None:
        self.workflow = shipped()
        self.out = folder / "out"
        self.models = replaced.named_models(folder / "models", self.workflow)
        self.parts = self.out / ".wanstream" / "parts"
        self.journal = self.out / "journal.sqlite"
        self.copy = self.out / "journal.sqlite.before"
        self.runs: list[list[int]] = []

    def __call__(self, rows=ROWS, *options):
        self.runs.clear()
        options = ("--models", self.models, *options)
        return main(command_line(self.out.parent, self.workflow, *rows, options=options))

    def forget(self) -> None:
        """Remove the journal and its copy."""
        self.journal.unlink()
        self.copy.unlink()

    def everything(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.out.rglob("*") if path.is_file()}


@pytest.fixture
def batch(tmp_path):
    made = Batch(tmp_path)
    with replaced.computing_replaced():
        run = Workflow.run

        def count(workflow, **options):
            prompt = workflow.verdict.prompt
            savers = [name for name, node in prompt.items() if node["class_type"] == replaced.SAVE]
            made.runs.append([replaced.seed_behind(prompt, name) for name in savers])
            return run(workflow, **options)

        # Not by `monkeypatch`: it would end after this fixture, and bring the replacement back.
        with mock.patch.object(Workflow, "run", count):
            yield made


DAMAGES = {
    "whole": lambda path: None,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "overwritten": lambda path: path.write_text("no journal"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("damage", "copy"),
    [
        *(("cut", "whole"), ("overwritten", "overwritten"), ("zeros", "gone")),
        *(("empty", "whole"), ("gone", "overwritten")),
    ],
)
def test_the_same_command_goes_on_after_its_journal_was_damaged(batch, capsys, damage, copy):
    assert batch(ROWS[:2]) == DONE
    made = videos(batch.out)
    DAMAGES[damage](batch.journal)
    DAMAGES[copy](batch.copy)
    capsys.readouterr()
    assert batch() == DONE
    assert batch.runs == [[3]], "nothing is computed twice"
    assert videos(batch.out).items() >= made.items()
    assert journal_rows(batch.out) == [("00001", "done"), ("00002", "done"), ("shot", "done")]
    told = capsys.readouterr().err
    if damage not in {"empty", "gone"}:
        assert "is damaged" in told
        assert "it is kept as journal.sqlite.damaged; the batch resumes from" in told
        assert (batch.out / "journal.sqlite.damaged").is_file()
    if copy == "whole":
        assert "its last copy, journal.sqlite.before" in told
    journals = {f"journal.sqlite{end}" for end in ("", ".lock", ".before", ".damaged")}
    names = {path.name for path in batch.out.iterdir()}
    assert names <= {*videos(batch.out), ".wanstream", *journals}
    assert batch() == DONE
    assert batch.runs == []
    assert "damaged" not in capsys.readouterr().err


def test_a_row_runs_again_when_its_file_is_missing(batch, capsys):
    assert batch(ROWS[:2]) == DONE
    first = batch.out / "00001.mp4"
    made_at = first.stat().st_mtime_ns
    (batch.out / "00002.mp4").unlink()
    assert batch([ROWS[2], *ROWS[:2]]) == DONE
    assert batch.runs == [[3], [2]]
    assert journal_rows(batch.out, "stem") == [("shot",), ("00001",), ("00002",)]
    assert "line 3 runs again: its files are missing" in capsys.readouterr().err
    assert first.stat().st_mtime_ns == made_at


def test_videos_belong_to_their_rows_wherever_these_are_now(batch):
    assert batch() == DONE
    made = videos(batch.out)
    batch.forget()
    assert batch([{"sampler.seed": 9}, ROWS[1], ROWS[0], ROWS[2]]) == DONE
    assert batch.runs == [[9]]
    assert journal_rows(batch.out, "stem") == [("00005",), ("00002",), ("00001",), ("shot",)]
    assert videos(batch.out).items() >= made.items()


def test_a_video_of_another_workflow_is_never_taken_for_a_row(batch, capsys):
    assert batch() == DONE
    made = videos(batch.out)
    batch.journal.write_text("no journal")
    batch.copy.unlink()
    before = batch.everything()
    batch.workflow["sampler"]["inputs"]["steps"] = 3
    assert batch() == INVALID
    assert "which is not from this batch" in capsys.readouterr().err
    assert batch.everything() == before, "a refusal changes nothing"
    batch.workflow = shipped()
    (batch.out / "00002.mp4").unlink()
    assert batch() == DONE
    assert batch.runs == [[2]]
    assert videos(batch.out).keys() == made.keys()
    told = capsys.readouterr().err
    assert "line 1 does not run again: a finished file contains its workflow" in told
    assert "line 3 does not run again" in told
    assert "line 2 does not run again" not in told


def test_the_copy_of_another_batch_is_kept_and_not_used(batch, capsys):
    assert batch() == DONE
    made = videos(batch.out)
    copy = batch.copy.read_bytes()
    batch.journal.write_text("no journal")
    batch.workflow["sampler"]["inputs"]["steps"] = 3
    assert batch([{"sampler.seed": 7, "name": "x"}]) == DONE
    kept = "it is kept as journal.sqlite.damaged; the batch resumes from the finished videos in the"
    assert kept in capsys.readouterr().err
    assert videos(batch.out).items() >= made.items()
    assert journal_rows(batch.out) == [("x", "done")]
    assert (batch.out / "journal.sqlite.damaged.before").read_bytes() == copy


@pytest.mark.parametrize("journal", ["damaged", "whole"])
def test_a_refusal_of_names_moves_and_removes_nothing(batch, journal):
    assert batch() == DONE
    (batch.out / "00002.mp4").write_bytes(b"of somebody else")
    (batch.parts / "00001.mp4").write_bytes(b"half")
    (batch.out / "00001.mp4").rename(batch.parts / "00009.mp4")
    if journal == "damaged":
        batch.journal.write_text("no journal")
        batch.copy.unlink()
    before = batch.everything()
    assert batch() == INVALID
    changed = {name for name, _ in batch.everything().items() ^ before.items()}
    assert not [name for name in changed if journal == "damaged" or ".sqlite" not in name]


@pytest.mark.parametrize(
    ("place", "make"),
    [
        (".wanstream/mine", foreign.link),
        (".wanstream/lock-journal", foreign.names_the_victim),
        ("journal.sqlite.copy", foreign.link),
        ("journal.sqlite.lock", foreign.dangling),
        ("journal.sqlite.lock-journal", foreign.names_the_victim),
    ],
)
def test_a_foreign_thing_is_refused_before_anything_is_used(batch, capsys, tmp_path, place, make):
    assert batch(ROWS[:1]) == DONE
    outside = foreign.Outside(tmp_path / "outside")
    with foreign.foreign_thing(batch.out, place, make, outside) as path:
        assert batch() == INVALID
    assert path.name in capsys.readouterr().err
    assert outside.touched == []
    assert batch.runs == []


def test_files_of_the_journal_are_not_opened_at_the_start(batch, monkeypatch):
    assert batch() == DONE
    for name in ("mine.mp4", "00077.mp4", "1.mp4"):  # only the second may be of an unnamed row
        write_video(batch.out / name, replaced.frames_of(1), fps=16, crf=30, metadata={})
    read = mock.Mock(wraps=batch_module.stored_prompt)
    monkeypatch.setattr(batch_module, "stored_prompt", read)
    assert batch([*ROWS, {"sampler.seed": 4}]) == DONE
    opened = [call.args[0].name for call in read.call_args_list]
    assert [name for name in opened if name.endswith(".mp4")] == ["00077.mp4"]


def pictures(folder: Path) -> list[bytes]:
    """Return each video's frames, in the order of names."""
    found = []
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray().tobytes() for frame in container.decode(video=0)]
        found.append(b"".join(frames))
    return found


def test_videos_of_lanes_belong_to_their_rows(batch):
    assert batch(ROWS, *LANES) == DONE
    assert batch.runs == [[1, 2, 3]]
    made = videos(batch.out)
    shown = pictures(batch.out)
    batch.forget()
    (batch.out / "00002.mp4").unlink()
    rows = [{"sampler.seed": 9}, ROWS[1], ROWS[0], ROWS[2], {"sampler.steps": 3}]
    assert batch(rows, *LANES) == DONE
    assert batch.runs == [[9, 2], [42]], "what is there is not computed again"
    assert videos(batch.out).items() >= {(name, made[name]) for name in ("00001.mp4", "shot.mp4")}
    stems = [stem for (stem,) in journal_rows(batch.out, "stem")]
    found = dict(zip(videos(batch.out), pictures(batch.out), strict=True))
    by_row = [found[f"{stem}.mp4"] for stem in stems]
    assert by_row[1:4] == [shown[1], shown[0], shown[2]], "every row has its own lane's video"
    batch.forget()
    assert batch(rows) == DONE
    assert batch.runs == []


def test_rows_with_several_files_are_known_when_all_are_there(batch):
    batch.workflow["more"] = batch.workflow["save"]
    assert batch() == DONE
    made = videos(batch.out)
    assert len(made) == 6
    # Half a video hides no whole ones of its name.
    (batch.out / "00001.mp4").write_bytes(made["00001~1.mp4"][:-40])
    batch.forget()
    assert (batch(), batch.runs) == (DONE, [])
    (batch.out / "00001.mp4").unlink()
    batch.forget()
    # As after a kill between the two renames.
    (batch.out / "shot~2.mp4").rename(batch.parts / "shot~2.mp4")
    assert (batch(), batch.runs) == (DONE, [])
    assert videos(batch.out) == made
    batch.forget()
    for name in ("00001~1", "00001~2", "shot~2"):
        (batch.out / f"{name}.mp4").unlink()
    (batch.out / "shot~1.mp4").rename(batch.parts / "shot~1.mp4")
    assert (batch(), batch.runs) == (DONE, [[1, 1], [3, 3]])
    assert videos(batch.out).keys() == made.keys()


def test_half_a_video_is_made_again(batch):
    assert batch() == DONE
    made = videos(batch.out)
    batch.forget()
    (batch.out / "00001.mp4").rename(batch.parts / "00001.mp4")
    (batch.out / "00002.mp4").unlink()
    (batch.parts / "00002.mp4").write_bytes(made["00002.mp4"][:-40])
    assert (batch(), batch.runs) == (DONE, [[2]])
    assert videos(batch.out) == made


def latent_of(batch: Batch, prompt_id: str) -> Path:
    path = batch.parts.parent / "made" / prompt_id / "latents" / "x.latent"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_latents_of_killed_rows_go_when_the_rows_are_done(batch, capsys, monkeypatch):
    inner = Workflow.run
    left = list[Path]()

    def killed(workflow, **options):
        seed = workflow.verdict.prompt["sampler"]["inputs"]["seed"]
        left.append(latent_of(batch, workflow.folders.output.name))
        if seed == 1 and len(left) == 1:
            raise SystemExit(9)
        if seed == 2:
            raise NodeFailedError("frames", "WanStreamVAEDecode", ValueError("no room"))
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", killed)
    with pytest.raises(SystemExit):
        batch()
    assert [path.exists() for path in left] == [True]
    stranger = latent_of(batch, "an-id-of-nobody")
    capsys.readouterr()
    assert batch() == FAILED
    assert [path.exists() for path in left] == [False, False, True, False]
    told = capsys.readouterr().err
    for path, whose in {left[2]: "line 2", stranger: "a row that is not in the batch"}.items():
        assert f"the latent of {whose}, which is not done, is kept in {path}" in told
    assert told.count("is kept in") == 2
    monkeypatch.setattr(Workflow, "run", inner)
    assert batch() == DONE
    assert [left[2].exists(), stranger.exists()] == [False, True]


def test_a_video_without_a_workflow_in_the_way_is_refused(batch, capsys):
    batch.out.mkdir()
    bad = {"prompt": "[" * 50}
    write_video(batch.out / "00001.mp4", replaced.frames_of(1), fps=16, crf=30, metadata=bad)
    assert batch() == INVALID
    assert "contains 00001.mp4, which is not from this batch" in capsys.readouterr().err


@needs_device_errors
def test_a_broken_device_ends_the_batch_and_fails_no_row(batch, capsys, monkeypatch):
    """A row that breaks the device each time does not keep the others from running."""
    inner = Workflow.run

    def run(workflow, **options):
        if workflow.verdict.prompt["sampler"]["inputs"]["seed"] == 2:
            error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            raise NodeFailedError("sampler", "WanStreamSampler", error) from error
        return inner(workflow, **options)

    monkeypatch.setattr(Workflow, "run", run)
    assert batch() == FAILED
    assert journal_rows(batch.out, "state") == [("done",), ("posted",), ("waiting",)]
    printed = capsys.readouterr().err
    device = "AcceleratorError: CUDA error: an illegal memory access"
    assert f"failed: node sampler (WanStreamSampler): {device}" in printed
    assert "run the same command again, with a new process, to resume" in printed
    assert [batch(), batch()] == [FAILED, FAILED]
    assert journal_rows(batch.out, "state") == [("done",), ("posted",), ("done",)]
    monkeypatch.setattr(Workflow, "run", inner)
    assert batch() == DONE
