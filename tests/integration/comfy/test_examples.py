"""Every example in `docs/examples/` and command in `docs/api.md`, unchanged on a real server."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image

from wanstream.tests.integration.comfy.servers import ROOT, small
from wanstream.tests.support.host.shipped import node

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(
        not (shutil.which("curl") and shutil.which("jq")), reason="NO CURL OR NO JQ: install them"
    ),
]

EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="ascii")
SECONDS = 180
T2V = "workflows/api/t2v.json"
EXPERTS = ["high"] * 3 + ["low"]
"""Experts of the steps in a small `t2v`."""


@pytest.fixture
def desk(tmp_path):
    """A folder that looks like the repository to an example.

    The workflows are small enough for a CPU.
    """
    (tmp_path / "workflows" / "api").mkdir(parents=True)
    (tmp_path / "docs").symlink_to(ROOT / "docs", target_is_directory=True)
    for name in ("t2v", "i2v"):
        set_workflow(tmp_path, small(name), name)
    return tmp_path


def set_workflow(desk, prompt, name="t2v"):
    (desk / "workflows" / "api" / f"{name}.json").write_text(json.dumps(prompt))


@pytest.fixture
def run(comfyui, server, desk):
    """`run(*command, url=None)` runs a command on the desk. Python is ComfyUI's own."""

    def run(*command, url=None):
        # No proxy stands between a test and its own machine.
        own = {"COMFYUI_URL": url or server.url, "NO_PROXY": "*", "no_proxy": "*"}
        given = {"cwd": desk, "env": {**comfyui.environment(), **own}, "timeout": SECONDS}
        return subprocess.run(command, capture_output=True, text=True, check=False, **given)

    return run


@pytest.fixture
def example(comfyui, run):
    """`example("one_job.py", *arguments, fails=False, url=None)` runs an example on the desk."""

    def example(name, *arguments, fails=False, url=None):
        run_by = "bash" if name.endswith(".sh") else str(comfyui.python)
        done = run(run_by, f"docs/examples/{name}", *arguments, url=url)
        assert done.returncode in ((1, 7) if fails else (0,)), done.stderr
        assert "Traceback" not in done.stderr
        return done

    return example


@pytest.fixture(params=["sh", "py"])
def kind(request):
    return request.param


def wait_until_idle(server):
    while server.get("/prompt")["exec_info"]["queue_remaining"]:
        time.sleep(0.1)


def saved(server):
    """Contents of all videos saved by the server."""
    return {file.read_bytes() for file in (server.base / "output").rglob("*.mp4")}


def test_every_example_is_run_here():
    names = ("one_job", "many_jobs", "upload_image", "cancel", "comfy_http")
    tested = {f"{name}.{kind}" for name in names for kind in ("sh", "py")}
    of_engine = {"minimal_streaming.py"}  # runs in the unit suite
    there = {file.name for file in EXAMPLES.iterdir() if file.is_file()} - of_engine
    assert there == tested | {"progress.py"}
    assert there == {*re.findall(r"\]\(examples/(\w+\.\w+)\)", PAGE)}


def test_one_job_and_the_same_again(server, example, desk, kind):
    set_workflow(desk, small("t2v", sampler={"flow_shift": 11.0 if kind == "sh" else 10.0}))
    done = example(f"one_job.{kind}", T2V, "videos")
    file, *steps = done.stdout.splitlines()
    before = saved(server)
    assert (desk / file).read_bytes() in before
    assert [file] == [str(path.relative_to(desk)) for path in (desk / "videos").iterdir()]
    shown = [f"step {number} ({expert})" for number, expert in enumerate(EXPERTS)]
    assert [line.split(":")[0] for line in steps] == shown
    *_, last = server.get("/history").values()
    assert last["prompt"][2]["sampler"]["inputs"]["seed"] == 7
    assert "lighthouse" in last["prompt"][2]["text"]["inputs"]["positive"]
    again = example(f"one_job.{kind}", T2V, "again")
    assert Path(again.stdout.splitlines()[0]).name == Path(file).name
    assert saved(server) == before


def test_many_jobs(server, example, desk, kind):
    example(f"many_jobs.{kind}", T2V, "videos", "a red fox", "a kite")
    files = {file.read_bytes() for file in (desk / "videos").iterdir()}
    assert len(files) == 2
    assert files <= saved(server)


TEXTS = {"one_job": (), "many_jobs": ("a red fox", "a kite")}


@pytest.mark.parametrize("name", TEXTS)
def test_refused_job(example, desk, kind, name):
    set_workflow(desk, small("t2v", sampler={"steps": 2000}, latent={"frames": -3}))
    done = example(f"{name}.{kind}", T2V, "videos", *TEXTS[name], fails=True)
    for words in ("2000", "sampler", "-3", "latent"):
        assert words in done.stderr


@pytest.mark.parametrize("name", TEXTS)
def test_failing_job_stops_no_other(example, desk, kind, name):
    files = small("i2v")["experts"]["inputs"]
    without_image = {name: files[name] for name in ("high_noise", "low_noise")}
    set_workflow(desk, small("t2v", experts=without_image))
    done = example(f"{name}.{kind}", T2V, "videos", *TEXTS[name], fails=True)
    assert done.stderr.count("sampler (WanStreamSampler): ") == max(1, len(TEXTS[name]))


def test_partly_wrong_job_is_not_left_to_run(server, example, desk, kind):
    """The server accepts it, and answers 200."""
    wrong = node("WanStreamSaveVideo", images=["frames", 0], fps=0, filename_prefix="x", crf=18)
    set_workflow(desk, {**small("t2v", sampler={"steps": 1000}), "again": wrong})
    before = server.get("/history")
    done = example(f"one_job.{kind}", T2V, "videos", fails=True)
    assert "again" in done.stderr
    assert "0.01" in done.stderr
    wait_until_idle(server)
    entries = server.get("/history").items()
    statuses = {entry["status"]["status_str"] for key, entry in entries if key not in before}
    assert statuses <= {"error"}


def test_wrong_address(example, kind):
    done = example(f"one_job.{kind}", T2V, "videos", fails=True, url="http://127.0.0.1:9")
    assert re.search("refused|connect", done.stderr)


def test_image_upload_writes_over_none(server, example, desk, kind):
    picture = f"my portrait {kind}.png"
    videos = set()
    shades = (60, 180, 180)
    for shade in shades:
        Image.new("RGB", (80, 60), (shade, 90, 30)).save(desk / picture)
        done = example(f"upload_image.{kind}", "workflows/api/i2v.json", picture, f"videos{shade}")
        videos.add((desk / done.stdout.splitlines()[0]).read_bytes())
    assert len(videos) == 2
    assert videos <= saved(server)
    uploaded = sorted((server.base / "input").glob(f"my portrait {kind}*"))
    assert [file.name for file in uploaded] == [f"my portrait {kind} (1).png", picture]
    assert [Image.open(file).getpixel((0, 0))[0] for file in uploaded] == [180, 60]


def test_progress_of_every_node_and_step(example, desk):
    set_workflow(desk, small("t2v", sampler={"seed": time.time_ns()}))
    done = example("progress.py", T2V)
    lines = done.stdout.splitlines()
    assert lines[-1] == "execution_success"
    # ComfyUI drops events that follow too quickly.
    assert [line for line in lines if line.startswith("sampler: ")][-1] == "sampler: 4 of 4"
    steps = [line.split(":")[0] for line in lines if line.startswith("step ")]
    assert steps == [f"step {number} of 4 ({expert})" for number, expert in enumerate(EXPERTS, 1)]
    assert lines.index("sampler (WanStreamSampler)") < lines.index("frames (WanStreamVAEDecode)")
    set_workflow(desk, small("t2v", sampler={"steps": 2000}))
    assert "sampler" in example("progress.py", T2V, fails=True).stderr


def _queued(server, seed, steps):
    sampler = {"seed": seed + time.time_ns() % 2**32, "steps": steps}
    return server.queue(small("t2v", sampler=sampler))


def test_cancel_ends_no_other_job(server, example, kind):
    running, waiting = (_queued(server, seed, 1000) for seed in (1, 2))
    other = _queued(server, 3, 2)
    while not any(running == item[1] for item in server.get("/queue")["queue_running"]):
        time.sleep(0.1)
    example(f"cancel.{kind}", waiting, running)
    assert server.wait(running)["status"]["messages"][-1][0] == "execution_interrupted"
    assert server.wait(other)["status"]["status_str"] == "success"
    assert server.get(f"/history/{waiting}") == {}
    shown = server.get("/wanstream/runs")["runs"]
    (last,) = (each for each in shown if each["prompt_id"] == other)
    assert (last["steps"], len(last["experts"]), last["error"]) == (2, 2, None)
    assert len(last["timeline"]["steps"]) == 2


def test_waiting_for_a_lost_job_ends(comfyui, run):
    shell = ". docs/examples/comfy_http.sh; wait_for no-such-job"
    code = "import sys; sys.path.append('docs/examples'); import comfy_http as c; "
    code += "c.wait('no-such-job')"
    for command in (("bash", "-c", shell), (str(comfyui.python), "-c", code)):
        done = run(*command)
        assert done.returncode == 1
        assert "does not know job no-such-job" in done.stderr


def test_commands_of_the_page_in_order(server, run, desk):
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 5
    commands = "\n".join(["set -euo pipefail", *blocks])
    assert commands.count("http://127.0.0.1:8188") == 1
    Image.new("RGB", (80, 60)).save(desk / "portrait.png")
    done = run("bash", "-c", commands.replace("http://127.0.0.1:8188", server.url))
    assert done.returncode == 0, done.stderr
    answer, status, *steps, errors = done.stdout.splitlines()
    assert json.loads(answer)["node_errors"] == {}
    assert status == '"success"'
    assert [line.split()[0] for line in steps] == EXPERTS
    assert errors == "{}"
    assert (desk / "video.mp4").read_bytes() in saved(server)
    wait_until_idle(server)
