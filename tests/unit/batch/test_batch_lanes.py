"""`wanstream batch --share-weights` in this process: every row's video is the same as alone."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
SMALL = {"width": 32, "height": 32, "frames": 5, "steps": 2}

Batch = Callable[..., int]


@pytest.fixture
def batch(tmp_path: Path, sample_models: Path) -> Batch:
    """`batch(rows, *arguments, out="out", name="t2v")` runs rows into a folder.

    The workflow is a shipped one, made small. `run` receives the command line.
    """

    def batch(
        rows: list[dict[str, Any]],
        *arguments: str,
        out: str = "out",
        name: str = "t2v",
        run: Any = main,
    ) -> int:
        nodes = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
        for node in nodes.values():
            node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
        workflow, jobs = tmp_path / f"{name}.json", tmp_path / "jobs.jsonl"
        workflow.write_text(json.dumps(nodes), encoding="utf-8")
        jobs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        folders = [
            "--out",
            str(tmp_path / out),
            "--models",
            str(sample_models),
            "--input",
            str(tmp_path),
        ]
        return run(["batch", str(jobs), "--workflow", str(workflow), *folders, *arguments])

    return batch


def videos(folder: Path) -> dict[str, np.ndarray]:
    """Return each video's frames, by file name."""
    found = {}
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            found[path.name] = np.stack(
                [frame.to_ndarray().astype(int) for frame in container.decode(video=0)]
            )
    return found


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Difference between two videos: x264 may encode equal frames to different bits."""
    return float(abs(one - other).mean())


def prompt_ids(folder: Path) -> list[str]:
    """Return the last posted id for every row, in row order."""
    with sqlite3.connect(folder / "journal.sqlite") as connection:
        return [row[0] for row in connection.execute("SELECT prompt_id FROM rows ORDER BY line")]


@pytest.mark.slow  # runs a whole batch
def test_lanes_make_the_videos_of_single_runs(batch: Batch, tmp_path: Path) -> None:
    rows = [
        {"name": f"boat {n}", "text.positive": "a boat " * (n + 1), "sampler.seed": n}
        for n in range(2)
    ]
    assert batch(rows, "--share-weights", "4", out="together") == DONE
    assert batch(rows, out="alone") == DONE
    together, alone = videos(tmp_path / "together"), videos(tmp_path / "alone")
    assert sorted(together) == sorted(alone) == ["boat 0.mp4", "boat 1.mp4"]
    for name, video in together.items():
        assert apart(video, alone[name]) < 2
        assert all(apart(video, alone[other]) > 10 for other in alone if other != name)
    assert len(set(prompt_ids(tmp_path / "together"))) == 1, "all rows were lanes of one pass"
    assert len(set(prompt_ids(tmp_path / "alone"))) == 2


@pytest.mark.slow  # runs a whole batch
def test_more_lanes_than_rows_and_a_second_run_that_has_nothing_to_do(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"sampler.seed": 1}, {"sampler.seed": 2}]
    assert batch(rows, "--share-weights", "64") == DONE
    before = prompt_ids(tmp_path / "out")
    assert batch(rows, "--share-weights", "2") == DONE
    assert prompt_ids(tmp_path / "out") == before
    assert "alone" not in capsys.readouterr().err


@pytest.mark.slow
def test_rows_that_do_not_fit_together_are_told_and_made_all_the_same(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"sampler.seed": 1},
        {"sampler.seed": 2, "latent.width": 48},
        {"sampler.seed": 3},
        {"sampler.seed": 4, "sampler.steps": 3},
        {"experts.high_noise": "wan2.2_t2v_high_noise_14B_fp16.safetensors"},
    ]
    assert batch(rows, "--share-weights", "4") == DONE
    told = capsys.readouterr().err
    assert "line 2 runs alone: its latent.width is 48, that of line 1 is 32" in told
    assert "line 4 runs alone: its sampler.steps is 3, that of line 1 is 2" in told
    assert (
        "line 5 runs alone: its experts.high_noise is wan2.2_t2v_high_noise_14B_fp16.safetensors"
        in told
    )
    assert len(videos(tmp_path / "out")) == 5
    ids = prompt_ids(tmp_path / "out")
    assert ids[0] == ids[2]
    assert len(set(ids)) == 4


@pytest.mark.slow
def test_a_lane_that_fails_costs_the_others_nothing_but_time(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.png", "three.png"):
        Image.effect_noise((40, 40), 90).convert("RGB").save(tmp_path / name)
    (tmp_path / "two.png").write_bytes(b"no picture")
    rows = [{"name": name, "image.image": f"{name}.png"} for name in ("one", "two", "three")]
    assert batch(rows, "--share-weights", "3", name="i2v") == FAILED
    told = capsys.readouterr().err
    assert "3 rows that ran together failed and are retried one by one" in told
    assert "line 2" in told
    assert sorted(videos(tmp_path / "out")) == ["one.mp4", "three.mp4"]
    assert len(set(prompt_ids(tmp_path / "out"))) == 3


@pytest.mark.integration
def test_a_batch_that_is_killed_between_two_passes_goes_on_with_the_second(
    batch: Batch, tmp_path: Path
) -> None:
    rows = [{"name": str(n), "sampler.seed": n, "text.positive": f"boat {n}"} for n in range(4)]

    def killed_after_the_first_video(command: list[str]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "wanstream.cli", *command], stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not list((tmp_path / "out").glob("*.mp4")):
            time.sleep(0.02)
        process.kill()
        return process.wait()

    assert batch(rows, "--share-weights", "2", run=killed_after_the_first_video) == -signal.SIGKILL
    before = videos(tmp_path / "out")
    assert 0 < len(before) < len(rows)
    assert batch(rows, "--share-weights", "2") == DONE
    after = videos(tmp_path / "out")
    assert sorted(after) == [f"{n}.mp4" for n in range(4)]
    for name, video in before.items():
        assert apart(video, after[name]) == 0, "what was done stays"


def test_a_dry_run_says_how_many_passes_there_are(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*({"sampler.seed": seed} for seed in range(5)), {"sampler.steps": 3}]
    assert batch(rows, "--share-weights", "4", "--dry-run") == DONE
    printed = capsys.readouterr()
    assert "6 of 6 rows are valid, in 3 passes; nothing was queued" in printed.out
    assert "line 6 runs alone: its sampler.steps is 3" in printed.err


def test_more_lanes_than_a_pass_can_have_are_refused(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch([{}], "--share-weights", "1001") == INVALID
    assert "--share-weights 1001: give a number of rows from 1 to 1000" in capsys.readouterr().err


@pytest.mark.parametrize("lanes", ["0", "-2", "many"])
def test_no_lanes_are_refused(
    batch: Batch, tmp_path: Path, lanes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        batch([{}], "--share-weights", lanes)
    assert ended.value.code == INVALID
    assert "--share-weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
