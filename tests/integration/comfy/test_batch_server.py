"""`wanstream batch --server` against a real ComfyUI.

Most rows are one-colour pictures. They are videos where all is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from wanstream.batch.opening import JOURNAL
from wanstream.batch.rows.continued import latent_name
from wanstream.batch.rows.rows import read_rows, workflow_digest
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED, INVALID
from wanstream.tools.comfyui import PACK, ROOT, ComfyUI, Server, free_port, running_server
from wanstream.wan.latents.file import read_latent

pytestmark = pytest.mark.comfy

PICTURE: dict[str, Any] = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
    },
    "2": {
        "class_type": "SaveImage",
        "inputs": {"images": ["1", 0], "filename_prefix": "batch/picture"},
    },
}
# Two pictures: one may be wrong and the other not.
TWO: dict[str, Any] = {
    **PICTURE,
    "3": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 1},
    },
    "4": {
        "class_type": "SaveImage",
        "inputs": {"images": ["3", 0], "filename_prefix": "batch/other"},
    },
}

Batch = Callable[..., list[str]]


def command_line(folder: Path, url: str, rows: Sequence[object], workflow: object) -> list[str]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    files = [
        str(folder / "jobs.jsonl"),
        "--workflow",
        str(folder / "workflow.json"),
        "--out",
        str(folder / "out"),
    ]
    return ["batch", *files, "--server", url]


@pytest.fixture
def batch(server: Server, tmp_path: Path) -> Batch:
    """`batch(*rows, workflow=PICTURE, more=())`: a batch command line for the session's server."""

    def arguments(*rows: object, workflow: object = PICTURE, more: Sequence[str] = ()) -> list[str]:
        return [*command_line(tmp_path, server.url, rows, workflow), *more]

    return arguments


def colours(folder: Path) -> dict[str, int]:
    """Each picture's colour by name."""
    found = {}
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as picture:
            red, green, blue = picture.convert("RGB").getpixel((0, 0))
        found[path.name] = red << 16 | green << 8 | blue
    return found


def rows_in(folder: Path, columns: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(folder / JOURNAL)
    rows = connection.execute(f"SELECT {columns} FROM rows ORDER BY line").fetchall()
    connection.close()
    return rows


def test_every_row_has_its_own_checked_file(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"1.color": colour} for colour in (5, 500, 70_000)]
    assert main(batch(*rows, {"EmptyImage.color": 9, "name": "nine"})) == DONE
    assert capsys.readouterr().out == f"4 of 4 rows are done in {tmp_path / 'out'}\n"
    assert colours(tmp_path / "out") == {
        "00001.png": 5,
        "00002.png": 500,
        "00003.png": 70_000,
        "nine.png": 9,
    }
    assert rows_in(tmp_path / "out", "state, attempts") == [("done", 1)] * 4


def test_rows_that_the_server_refuses_fail_in_its_words(
    batch: Batch, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[object] = [
        {"1.color": 1},
        {"1.width": 0},
        {"1.size": 8},
        "{",
        {"7.color": 1},
        {"1.width": "wide"},
    ]
    assert main(batch(*rows, {"2.images": ["9", 0]}, {"1.color": 2})) == FAILED
    assert list(colours(tmp_path / "out").values()) == [1, 2]
    output = capsys.readouterr().err
    for words in [
        "line 2 failed: node 1 (EmptyImage): Value 0 smaller than min of 1: width",
        "line 3 failed: EmptyImage has no input size; did you mean batch_size? it has width, "
        "height, batch_size, color",
        "line 4 failed: this is not JSON",
        "line 5 failed: 7.color: no such node; the workflow has 1, 2",
        'line 6 failed: 1.width is INT, but "wide" is not a whole number: write one, such as 4',
        "line 7 failed: node 2 (SaveImage)",
    ]:
        assert words in output
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}


def test_half_a_workflow_is_none(
    batch: Batch, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ComfyUI would run the valid output, and respond with 200."""
    status, answer = server.post(
        "/prompt", {"prompt": {**TWO, "3": {**TWO["3"], "inputs": {"width": 0}}}}
    )
    assert status == 200
    assert answer["node_errors"]
    assert (
        main(batch({"1.color": 3, "3.width": 0}, {"1.color": 4, "3.color": 5}, workflow=TWO))
        == FAILED
    )
    assert (
        "line 1 failed: node 3 (EmptyImage): Value 0 smaller than min of 1: width"
        in capsys.readouterr().err
    )
    assert colours(tmp_path / "out") == {"00002~1.png": 4, "00002~2.png": 5}


def id_in(folder: Path) -> str:
    """Return a test's prompt id. Newer servers take canonical UUIDs only."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, folder.name))


def posted(batch: Batch, tmp_path: Path, *rows: object, workflow: object = PICTURE) -> list[str]:
    """Leave the state of a client killed while posting the first row. Return the command line."""
    from wanstream.batch.journal.journal import Journal
    from wanstream.batch.output_store import OutputStore

    call = batch(*rows, workflow=workflow)
    found = read_rows(tmp_path / "jobs.jsonl")
    OutputStore(tmp_path / "out")
    with Journal(tmp_path / "out" / JOURNAL, workflow=workflow_digest(workflow)) as journal:
        journal.enter(found, compared=list)
        journal.post({found[0].hash: None}, id_in(tmp_path), call[call.index("--server") + 1])
    return call


def test_what_was_posted_is_asked_for_before_it_is_posted_again(
    batch: Batch, server: Server, tmp_path: Path
) -> None:
    call = posted(batch, tmp_path, {"1.color": 11}, {"1.color": 12})
    body = {
        "prompt": {
            **PICTURE,
            "1": {**PICTURE["1"], "inputs": {**PICTURE["1"]["inputs"], "color": 11}},
        }
    }
    assert server.post("/prompt", {**body, "prompt_id": id_in(tmp_path)})[0] == 200
    assert main(call) == DONE
    assert colours(tmp_path / "out") == {"00001.png": 11, "00002.png": 12}
    assert rows_in(tmp_path / "out", "attempts") == [(1,), (1,)]


def test_what_never_arrived_is_posted_again(batch: Batch, tmp_path: Path) -> None:
    assert main(posted(batch, tmp_path, {"1.color": 13})) == DONE
    assert colours(tmp_path / "out") == {"00001.png": 13}
    assert rows_in(tmp_path / "out", "attempts") == [(2,)]


def test_a_client_that_never_heard_of_node_errors_finds_out(
    batch: Batch, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = posted(batch, tmp_path, {"3.width": 0}, workflow=TWO)
    broken = {**TWO, "3": {**TWO["3"], "inputs": {**TWO["3"]["inputs"], "width": 0}}}
    assert server.post("/prompt", {"prompt": broken, "prompt_id": id_in(tmp_path)})[0] == 200
    server.wait(id_in(tmp_path))
    assert main(call) == FAILED
    assert (
        "line 1 failed: node 3 (EmptyImage): Value 0 smaller than min of 1"
        in capsys.readouterr().err
    )
    assert colours(tmp_path / "out") == {}


def test_a_dry_run_queues_nothing(
    batch: Batch, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.get("/history")
    rows = [{"1.color": 1}, {"1.color": -1}, {"2.images": ["1", 1]}, {"2.filename_prefix": 5}]
    assert main(batch(*rows, more=["--dry-run"])) == INVALID
    printed = capsys.readouterr()
    assert printed.out == "2 of 4 rows are valid; nothing was queued\n"
    assert "line 2: node 1 (EmptyImage): Value -1 smaller than min of 0: color" in printed.err
    assert "'images' is linked to output 1 of node '1' (EmptyImage), which has 1" in printed.err
    assert server.get("/history") == before
    assert not (tmp_path / "out").exists()


def test_a_workflow_with_nodes_that_the_server_lacks(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow = {**PICTURE, "5": {"class_type": "NobodysNode", "inputs": {}}}
    assert main(batch({"1.color": 1}, workflow=workflow)) == INVALID
    output = capsys.readouterr().err
    assert "cannot run on http://127.0.0.1" in output
    assert "node 5: unknown class NobodysNode" in output


def test_a_workflow_that_only_shows_its_picture(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preview = {**PICTURE, "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    assert main(batch({"1.color": 1}, workflow=preview)) == FAILED
    assert "no file was saved" in capsys.readouterr().err


def test_a_file_that_was_removed_from_the_server(
    batch: Batch, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(batch({"1.color": 321, "2.filename_prefix": "gone/x"})) == DONE
    for path in (server.base / "output" / "gone").iterdir():
        path.unlink()
    (tmp_path / "out" / "00001.png").unlink()
    assert main(batch({"1.color": 321, "2.filename_prefix": "gone/x"})) == FAILED
    assert "saved 'x_00001_.png' but does not return it (status 404)" in capsys.readouterr().err


def client(call: Sequence[str], log: Path, before: str = "") -> subprocess.Popen[bytes]:
    code = f"{before}\nimport sys; from wanstream.cli import main; sys.exit(main())"
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-c", code, *call], stdout=out, stderr=out)


def wait_until(true: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_ctrl_c_takes_back_what_waits_and_finishes_what_runs(
    batch: Batch, server: Server, tmp_path: Path
) -> None:
    gated = {**PICTURE, "gate": {"class_type": "TestGate", "inputs": {"file": ""}}}
    gates = [tmp_path / name for name in ("first", "second", "third")]
    call = batch(
        *({"gate.file": str(gate), "1.color": at} for at, gate in enumerate(gates)), workflow=gated
    )
    log = tmp_path / "log"
    process = client(call, log)
    try:
        wait_until(lambda: len(server.get("/queue")["queue_pending"]) == 1, 30, log)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/queue")["queue_pending"] == [], 30, log)
        assert len(server.get("/queue")["queue_running"]) == 1
        gates[0].touch()
        assert process.wait(30) == INTERRUPTED
    finally:
        process.kill()
        for gate in gates:
            gate.touch()
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}
    assert colours(tmp_path / "out") == {"00001.png": 0}
    assert rows_in(tmp_path / "out", "state") == [("done",), ("waiting",), ("waiting",)]
    assert main(call) == DONE
    assert colours(tmp_path / "out") == {"00001.png": 0, "00002.png": 1, "00003.png": 2}


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_full_disk_ends_the_batch_and_the_same_command_goes_on(
    batch: Batch, tmp_path: Path
) -> None:
    """A file size limit stands for a full disk: room for the journal, but not for the picture."""
    call = batch({"1.color": 1}, {"1.color": 77, "1.width": 4096, "1.height": 4096}, {"1.color": 3})
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"
    log = tmp_path / "log"
    assert client(call, log, before=limit).wait(60) == FAILED
    output = log.read_text(encoding="utf-8")
    assert "File too large" in output
    assert f"free space in {tmp_path / 'out'}, then run the same command again to resume" in output
    assert "Traceback" not in output
    assert colours(tmp_path / "out") == {"00001.png": 1}
    assert main(call) == DONE
    assert colours(tmp_path / "out") == {"00001.png": 1, "00002.png": 77, "00003.png": 3}
    # The server had made the second and the third one already.
    assert rows_in(tmp_path / "out", "attempts") == [(1,), (1,), (1,)]


JOBS = 20
KILLS = ("server", "server", "client", "client", "client")


@pytest.fixture
def video_base(tmp_path: Path, sample_models: Path) -> Path:
    """A base directory with this pack and the test model, for a server to be killed."""
    base = tmp_path / "base"
    for folder in ("custom_nodes", "input", "output"):
        (base / folder).mkdir(parents=True)
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    (base / "models").symlink_to(sample_models, target_is_directory=True)
    return base


def tiny_video() -> dict[str, Any]:
    workflow: dict[str, Any] = json.loads(
        (ROOT / "workflows" / "api" / "t2v.json").read_text(encoding="utf-8")
    )
    workflow["latent"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    workflow["sampler"]["inputs"] |= {"steps": 2}
    return workflow


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("seed", [0])
def test_server_and_client_are_killed_at_random(
    comfyui: ComfyUI, video_base: Path, tmp_path: Path, seed: int
) -> None:
    """Twenty videos.

    The server is killed twice, the client three times, wherever the seed wants it.
    """
    chance = random.Random(seed)
    kills = zip(
        sorted(chance.sample(range(1, JOBS - 5), len(KILLS))),
        chance.sample(KILLS, len(KILLS)),
        strict=True,
    )
    port, log, out = free_port(), tmp_path / "client.log", tmp_path / "out"
    rows = [{"sampler.seed": 1000 + number} for number in range(JOBS)]
    call = command_line(tmp_path, f"http://127.0.0.1:{port}", rows, tiny_video())
    with ExitStack() as ending:
        server = ending.enter_context(running_server(comfyui, video_base, port=port))
        process = client(call, log)
        ending.callback(lambda: process.kill())
        for count, whom in kills:
            wait_until(lambda count=count: len([*out.glob("*.mp4")]) >= count, 300, log)
            time.sleep(chance.uniform(0, 1))
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            if whom == "server":
                os.kill(server.process_id, signal.SIGKILL)
                time.sleep(chance.uniform(0, 2))
                server = ending.enter_context(running_server(comfyui, video_base, port=port))
            else:
                process.kill()
                process.wait()
                written = log.stat().st_size
                process = client(call, log)
                # A client refuses a server that is absent at the start.
                wait_until(lambda at=written: b"batch:" in log.read_bytes()[at:], 300, log)
        assert process.wait(600) == DONE, log.read_text(errors="replace")[-4000:]
        assert main(call) == DONE, "the same command again"
    check_videos(out, video_base / "output")


def check_videos(out: Path, served: Path) -> None:
    """One checked file per row, with that row's seed, and nothing else.

    The journal agrees.
    """
    made = {
        path.name: path
        for path in out.iterdir()
        if path.is_file() and not path.name.startswith("journal.")
    }
    assert sorted(made) == [f"{number:05}.mp4" for number in range(1, JOBS + 1)]
    for number, path in enumerate((made[name] for name in sorted(made)), 1):
        with av.open(str(path)) as container:
            graph = json.loads(container.metadata["prompt"])
            assert sum(1 for _ in container.decode(video=0)) == 5
        assert graph["sampler"]["inputs"]["seed"] == 1000 + number - 1
    known = rows_in(out, "state, stem, files, attempts")
    assert len(known) == JOBS
    for state, stem, files, _ in known:
        (file,) = json.loads(files)
        content = made[f"{stem}.mp4"].read_bytes()
        assert (state, file["name"], file["size"]) == ("done", f"{stem}.mp4", len(content))
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
    # Jobs lost with the server ran again. Jobs posted by a killed client did not.
    again = sum(attempts - 1 for *_, attempts in known)
    assert 1 <= again <= 2 * len(KILLS)
    assert len([*served.rglob("*.mp4")]) >= JOBS


def clip_workflow(name: str) -> dict[str, Any]:
    """A clip workflow, small enough for a test."""
    workflow: dict[str, Any] = json.loads(
        (ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8")
    )
    workflow["start"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    for node in workflow.values():
        if node["class_type"] == "WanStreamContinueVideo":
            node["inputs"]["frames"] = 9  # more than the 5 shared by clips
        if node["class_type"] == "WanStreamSampler":
            node["inputs"]["steps"] = 2
    return workflow


def latents_of_one_run(server: Server) -> list[torch.Tensor]:
    """Latents for the three `long_video` clips, sampled in one run."""
    workflow = clip_workflow("long_video")
    samplers = ("sampler", "sampler_2", "sampler_3")
    for name in samplers:
        workflow[f"tap_{name}"] = {
            "class_type": "SaveLatent",
            "inputs": {"samples": [name, 0], "filename_prefix": f"taps/{name}"},
        }
    shown = server.run(workflow)["outputs"]
    taps = [shown[f"tap_{name}"]["latents"][0] for name in samplers]
    return [
        read_latent(server.base / "output" / tap["subfolder"] / tap["filename"]).samples
        for tap in taps
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_rows_continue_each_other_on_a_killed_server(
    comfyui: ComfyUI, video_base: Path, tmp_path: Path
) -> None:
    """Eight rows in a chain. Server and client are killed once each.

    The first three are the `long_video` clips.
    """
    Image.linear_gradient("L").convert("RGB").save(video_base / "input" / "example.png")
    port, log, out = free_port(), tmp_path / "client.log", tmp_path / "out"
    rows: list[dict[str, Any]] = [
        {"name": f"r{number}", "sampler.seed": 42 + number} for number in range(8)
    ]
    for number, row in enumerate(rows[1:]):
        row["continues"] = f"r{number}"
    call = command_line(
        tmp_path, f"http://127.0.0.1:{port}", rows[::-1], clip_workflow("continue_video")
    )
    with ExitStack() as ending:
        server = ending.enter_context(running_server(comfyui, video_base, port=port))
        expected = latents_of_one_run(server)
        process = client(call, log)
        ending.callback(lambda: process.kill())
        wait_until(lambda: (out / "r1~2.mp4").exists(), 300, log)
        process.kill()
        process.wait()
        process = client(call, log)
        wait_until(lambda: (out / "r4~2.mp4").exists(), 300, log)
        os.kill(server.process_id, signal.SIGKILL)
        server = ending.enter_context(running_server(comfyui, video_base, port=port))
        assert process.wait(400) == DONE, log.read_text(errors="replace")[-4000:]
        assert main(call) == DONE, "the same command again"
    made = {
        path.name
        for path in out.iterdir()
        if path.is_file() and not path.name.startswith("journal.")
    }
    assert made == {f"r{number}~{file}" for number in range(8) for file in ("1.latent", "2.mp4")}
    for number, latent in enumerate(expected):
        assert torch.equal(read_latent(out / f"r{number}~1.latent").samples, latent)
    assert rows_in(out, "state") == [("done",)] * 8
    copies = {path.name for path in (video_base / "output" / "continued").iterdir()}
    known = {row.name: row.hash for row in read_rows(tmp_path / "jobs.jsonl")}
    digest = workflow_digest(clip_workflow("continue_video"))
    assert copies == {Path(latent_name(digest, known[f"r{number}"])).name for number in range(7)}


def test_a_picture_that_is_not_in_the_list_but_in_a_folder_of_the_server_is_taken(
    batch: Batch, server: Server, tmp_path: Path
) -> None:
    folder = server.base / "input" / "below"
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (0, 0, 77)).save(folder / "blue.png")
    workflow = {**PICTURE, "1": {"class_type": "LoadImage", "inputs": {"image": "below/blue.png"}}}
    rows = [{"2.filename_prefix": f"batch/{number}"} for number in (1, 2)]
    assert main(batch(*rows, workflow=workflow)) == DONE
    assert colours(tmp_path / "out") == {"00001.png": 77, "00002.png": 77}
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}
