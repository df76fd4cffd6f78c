"""`wanstream batch --server` against a real ComfyUI."""

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from wanstream.batch.journal.journal import Journal
from wanstream.batch.opening import JOURNAL
from wanstream.batch.output_store import OutputStore
from wanstream.batch.rows.continued import latent_name
from wanstream.batch.rows.rows import read_rows, workflow_digest
from wanstream.batch.servers.server_backend import ServerBackend
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INTERRUPTED
from wanstream.schema import VERSION
from wanstream.tests.integration.comfy.servers import latent_of, small, tapped
from wanstream.tests.support.batch.command import command_line, journal_rows
from wanstream.tests.support.host.shipped import node
from wanstream.tests.support.polling import eventually
from wanstream.wan.latents.file import read_latent

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX"),
]

SIZE = {"width": 8, "height": 8, "batch_size": 1}
PICTURE = {
    "1": node("EmptyImage", **SIZE, color=0),
    "2": node("SaveImage", images=["1", 0], filename_prefix="batch/picture"),
}
# Two pictures: one may be wrong and the other not.
TWO = {
    **PICTURE,
    "3": node("EmptyImage", **SIZE, color=1),
    "4": node("SaveImage", images=["3", 0], filename_prefix="batch/other"),
}
BROKEN = "line 1 failed: node 3 (EmptyImage): Value 0 smaller than min of 1: width"


@pytest.fixture
def batch(server, tmp_path):
    """`batch(*rows, workflow=PICTURE)`: a batch command line for the session's server."""

    def arguments(*rows, workflow=PICTURE):
        return command_line(tmp_path, workflow, *rows, options=["--server", server.url])

    return arguments


def colours(folder):
    """Each picture's colour by name."""
    found = {}
    for path in sorted((folder / "out").glob("*.png")):
        with Image.open(path) as picture:
            red, green, blue = picture.convert("RGB").getpixel((0, 0))
        found[path.name] = red << 16 | green << 8 | blue
    return found


def test_rows_have_their_files_or_the_words_of_the_server(batch, server, tmp_path, capsys):
    rows = [{"1.color": 70_000}, {"1.width": 0}, {"1.size": 8}, {"2.images": ["9", 0]}]
    assert main(batch(*rows, {"EmptyImage.color": 9, "name": "nine"})) == FAILED
    assert colours(tmp_path) == {"00001.png": 70_000, "nine.png": 9}
    printed = capsys.readouterr()
    assert printed.out.startswith(f"2 of 5 rows are done in {tmp_path / 'out'}; 3 failed: ")
    for words in (
        "line 2 failed: node 1 (EmptyImage): Value 0 smaller than min of 1: width",
        "line 3 failed: EmptyImage has no input size; did you mean batch_size? it has width, "
        "height, batch_size, color",
        "line 4 failed: node 2 (SaveImage)",
    ):
        assert words in printed.err
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}


def test_half_a_workflow_is_not_run(batch, server, tmp_path, capsys):
    """ComfyUI would run the valid output, and respond with 200."""
    half = {**TWO, "3": node("EmptyImage", width=0)}
    status, answer = server.post("/prompt", {"prompt": half})
    assert status == 200
    assert answer["node_errors"]
    rows = {"1.color": 3, "3.width": 0}, {"1.color": 4, "3.color": 5}
    assert main(batch(*rows, workflow=TWO)) == FAILED
    assert BROKEN in capsys.readouterr().err
    assert colours(tmp_path) == {"00002~1.png": 4, "00002~2.png": 5}


def test_posted_row_of_killed_client_is_not_posted_again(batch, server, tmp_path, capsys):
    """The first row's image is made, and the second one's workflow is half accepted."""
    for width, expected in ((8, DONE), (0, FAILED)):
        folder = tmp_path / str(width)
        folder.mkdir()
        call = command_line(folder, TWO, {"3.width": width}, options=["--server", server.url])
        (row,) = read_rows(folder / "jobs.jsonl")
        prompt_id = str(uuid.uuid4())
        OutputStore(folder / "out")
        with Journal(folder / "out" / JOURNAL, workflow=workflow_digest(TWO)) as journal:
            journal.enter([row], compared=list)
            journal.post({row.hash: None}, prompt_id, server.url)
        prompt = {**TWO, "3": node("EmptyImage", **{**SIZE, "width": width}, color=1)}
        assert server.post("/prompt", {"prompt": prompt, "prompt_id": prompt_id})[0] == 200
        server.wait(prompt_id)
        assert main(call) == expected
        assert len(colours(folder)) == (2 if width else 0)
    assert journal_rows(tmp_path / "8" / "out", "attempts") == [(1,)]
    assert BROKEN in capsys.readouterr().err


def test_files_of_remembered_rows(batch, server, tmp_path, capsys):
    """The server computes equal rows once, and names their file until it is removed."""
    saved = {"1.color": 321, "2.filename_prefix": "gone/x"}
    call = batch({**saved, "name": "one"}, {**saved, "name": "two"})
    for _ in range(2):
        assert main(call) == DONE
        assert colours(tmp_path) == {"one.png": 321, "two.png": 321}
        (tmp_path / "out" / "one.png").unlink()
    for path in (server.base / "output" / "gone").iterdir():
        path.unlink()
    assert main(call) == FAILED
    assert "saved 'x_00001_.png' but does not return it (status 404)" in capsys.readouterr().err


def test_picture_below_the_listed_folder(batch, server, tmp_path):
    folder = server.base / "input" / "below"
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (0, 0, 77)).save(folder / "blue.png")
    workflow = {**PICTURE, "1": node("LoadImage", image="below/blue.png")}
    assert main(batch({"2.filename_prefix": "batch/1"}, workflow=workflow)) == DONE
    assert colours(tmp_path) == {"00001.png": 77}


def test_server_reports_the_pack_and_its_process(server):
    first = ServerBackend(server.url).describe()
    second = ServerBackend(f"{server.url}/").describe()
    assert first.wanstream == VERSION
    assert first.instance == second.instance
    assert len(first.instance or "") == 36


def test_lanes_with_native_texts_are_single_runs(server, tmp_path):
    """ComfyUI's text and latent nodes feed our sampler, which moves the bytes of one run.

    Texts with more than 512 tokens keep their length.
    """
    kept = ("clip", "positive", "negative", "latent", "experts", "policy", "sampler")
    native = tapped(small("native_mixed"))
    workflow = {name: native[name] for name in (*kept, "tap")}
    rows = [
        {"name": f"row {number}", "positive.text": "boat " * count, "sampler.seed": number}
        for number, count in enumerate((1, 520))
    ]
    latents = []
    moved = []
    for lanes in (2, 1):
        before = server.get("/history")
        folder = tmp_path / str(lanes)
        folder.mkdir()
        options = ["--server", server.url, "--share-weights", lanes]
        assert main(command_line(folder, workflow, *rows, options=options)) == DONE
        entries = [entry for key, entry in server.get("/history").items() if key not in before]
        timelines = [entry["outputs"]["sampler"]["wanstream_timeline"][0] for entry in entries]
        moved.append([[step["bytes_moved"] for step in each["steps"]] for each in timelines])
        files = [folder / "out" / f"row {number}.latent" for number in (0, 1)]
        latents.append([load_file(file)["latent_tensor"] for file in files])
    assert moved[0] == moved[1][:1]
    assert sum(moved[0][0]) > 0
    (first, second), alone = latents
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])
    assert not torch.equal(first, second)


def test_ctrl_c_finishes_the_running_row(batch, server, tmp_path):
    gated = {**PICTURE, "gate": node("TestGate", file="")}
    gates = [tmp_path / name for name in ("first", "second", "third")]
    rows = [{"gate.file": str(gate), "1.color": at} for at, gate in enumerate(gates)]
    call = batch(*rows, workflow=gated)
    code = "import sys; from wanstream.cli import main; sys.exit(main())"
    client = subprocess.Popen([sys.executable, "-c", code, *call])
    try:
        assert eventually(lambda: len(server.get("/queue")["queue_pending"]) == 1)
        client.send_signal(signal.SIGINT)
        assert eventually(lambda: server.get("/queue")["queue_pending"] == [])
        assert len(server.get("/queue")["queue_running"]) == 1
        gates[0].touch()
        assert client.wait(30) == INTERRUPTED
    finally:
        client.kill()
        for gate in gates:
            gate.touch()
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}
    assert colours(tmp_path) == {"00001.png": 0}
    assert journal_rows(tmp_path / "out", "state") == [("done",), ("waiting",), ("waiting",)]
    assert main(call) == DONE
    assert colours(tmp_path) == {"00001.png": 0, "00002.png": 1, "00003.png": 2}


def test_rows_continue_each_other(batch, server, tmp_path):
    """A chain of rows has the latents of the `long_video` clips, sampled in one run.

    `tests/faults` kills servers and clients.
    """
    samplers = ("sampler", "sampler_2", "sampler_3")
    taps = {
        f"tap_{name}": node("SaveLatent", samples=[name, 0], filename_prefix=name)
        for name in samplers
    }
    history = server.run({**small("long_video", steps=2), **taps})
    expected = [latent_of(server, history, tap) for tap in taps]
    rows = [{"name": f"r{number}", "sampler.seed": 42 + number} for number in range(3)]
    for number, row in enumerate(rows[1:]):
        row["continues"] = f"r{number}"
    workflow = small("continue_video", steps=2)
    assert main(batch(*rows[::-1], workflow=workflow)) == DONE
    out = tmp_path / "out"
    made = {path.name for path in out.glob("r*")}
    assert made == {f"r{number}~{file}" for number in range(3) for file in ("1.latent", "2.mp4")}
    for number, latent in enumerate(expected):
        assert torch.equal(read_latent(out / f"r{number}~1.latent").samples, latent)
    known = {row.name: row.hash for row in read_rows(tmp_path / "jobs.jsonl")}
    digest = workflow_digest(workflow)
    copies = {path.name for path in (server.base / "output" / "continued").iterdir()}
    assert copies == {Path(latent_name(digest, known[f"r{number}"])).name for number in range(2)}
