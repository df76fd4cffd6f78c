"""Report files on a working disk and on a full one."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.bench import Report, Trial, Variant
from wanstream.host.folders import OutputFile
from wanstream.nodes.runs.benchmark import ReportFileError, ReportFiles
from wanstream.schema.records import StepRecord, Timeline

STEP = StepRecord.of(
    index=0, expert="high", sigma=1.0, wall_s=2.0, compute_s=2.0, stall_s=0.0, bytes_moved=5
)
TIMELINE = Timeline(kind="measured", steps=(STEP,))


def report(trials: int) -> Report:
    made = tuple(Trial(timeline=TIMELINE, latents="ab") for _ in range(trials))
    return Report(
        title="A benchmark",
        variants=(Variant(name="a", settings={}, trials=made),),
        method={},
        machine={},
        planned=3,
        finished=trials == 3,
    )


def files(folder: Path) -> ReportFiles:
    return ReportFiles(
        OutputFile(path=folder / "a_00001_.json", filename="a_00001_.json", subfolder="sub")
    )


def test_the_last_report_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    place = files(tmp_path)
    for trials in (0, 1, 2):
        place.save(report(trials))
        assert json.loads((tmp_path / "a_00001_.json").read_text())["done"] == trials
    assert [path.name for path in tmp_path.iterdir()] == ["a_00001_.json"]
    chart = place.finish(report(3))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".html", ".json", ".png"]
    assert chart.mode == "RGB"
    assert place.chart_preview() == {
        "filename": "a_00001_.png",
        "subfolder": "sub",
        "type": "output",
    }
    assert place.traces() == tmp_path / "a_00001_traces"
    assert not place.traces().exists()


def test_a_file_name_in_another_encoding_spoils_no_report(tmp_path: Path) -> None:
    """Linux file names may hold bytes outside UTF-8: Python decodes them to lone surrogates."""
    (variant,) = report(3).variants
    named = replace(variant, name="caf\udce9", settings={"Experts": "caf\udce9.safetensors"})
    files(tmp_path).finish(replace(report(3), variants=(named,)))
    assert "caf?.safetensors" in (tmp_path / "a_00001_.html").read_text(encoding="utf-8")
    assert "caf?" in (tmp_path / "a_00001_.csv").read_text(encoding="utf-8")


def test_what_a_stopped_benchmark_has_measured_is_left_in_all_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), files(tmp_path) as place:
        place.save(report(2))
        raise KeyboardInterrupt
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".html", ".json", ".png"]
    assert "Unfinished: 2 of 3 runs were made." in (tmp_path / "a_00001_.html").read_text()


@pytest.mark.parametrize("error", [None, ReportFileError(errno.ENOSPC, "full")])
def test_nothing_more_is_written_without_an_error_or_on_a_full_disk(
    tmp_path: Path, error: OSError | None
) -> None:
    with (
        nullcontext() if error is None else pytest.raises(ReportFileError, match="full"),
        files(tmp_path) as place,
    ):
        place.save(report(2))
        if error is not None:
            raise error
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_what_cannot_be_left_does_not_hide_why_the_benchmark_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), files(tmp_path) as place:
        place.save(report(2))
        (tmp_path / "a_00001_.csv").mkdir()
        raise ZeroDivisionError
    assert "a_00001_.csv could not be written" in caplog.text


def test_a_folder_that_is_gone_is_told_by_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ReportFileError, match=r"gone/a_00001_\.json could not be written: No such file"
    ):
        files(tmp_path / "gone").save(report(0))


# A limit on the file size acts like a full disk: the write fails in the same way.
WRITE_WITH_LITTLE_ROOM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_report_files import files, report

folder, room = Path(sys.argv[2]), int(sys.argv[3])
place = files(folder)
place.save(report(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    place.save(report(2)) if sys.argv[4] == "save" else place.finish(report(3))
except OSError as err:
    print(type(err).__name__, err.errno, err)
"""


def write_with_little_room(folder: Path, room: int, what: str) -> str:
    arguments = [str(Path(__file__).parent), str(folder), str(room), what]
    command = [sys.executable, "-B", "-c", WRITE_WITH_LITTLE_ROOM, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.integration
def test_a_full_disk_costs_the_last_run_and_leaves_those_before(tmp_path: Path) -> None:
    said = write_with_little_room(tmp_path, 100, "save")
    assert said.startswith(f"ReportFileError {errno.EFBIG} ")
    assert f"{tmp_path / 'a_00001_.json'} could not be written: File too large" in said
    assert f"All runs before are in {tmp_path / 'a_00001_.json'}: make room on the disk" in said
    assert [path.name for path in tmp_path.iterdir()] == ["a_00001_.json"]
    assert json.loads((tmp_path / "a_00001_.json").read_text())["done"] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.integration
def test_a_disk_that_is_full_at_the_end_has_everything_that_was_measured(tmp_path: Path) -> None:
    """Room for the JSON and the CSV, not for the page."""
    said = write_with_little_room(tmp_path, 5_000, "finish")
    assert said.startswith(f"ReportFileError {errno.EFBIG} ")
    assert "a_00001_.html could not be written" in said
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json"]
    assert json.loads((tmp_path / "a_00001_.json").read_text())["finished"]
