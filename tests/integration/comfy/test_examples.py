"""Every example in `docs/examples/` and command in `docs/api.md`, unchanged on a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from wanstream.tools.comfyui import PACK, ComfyUI, Server
from wanstream.tools.templates import TITLES, template

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(
        not (shutil.which("curl") and shutil.which("jq")), reason="NO CURL OR NO JQ: install them"
    ),
]

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="ascii")
SECONDS = 180
KINDS = pytest.mark.parametrize("kind", ["sh", "py"])

Done = subprocess.CompletedProcess[str]
Example = Callable[..., Done]


@pytest.fixture(scope="module")
def api(stocked_server: Server) -> Server:
    return stocked_server


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder that looks like the repository to an example.

    The workflows are small enough for a CPU.
    """
    (tmp_path / "workflows" / "api").mkdir(parents=True)
    (tmp_path / "docs").symlink_to(ROOT / "docs", target_is_directory=True)
    for name in ("t2v", "i2v"):
        prompt = json.loads(
            (ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8")
        )
        for node in prompt.values():
            small = {"width": 64, "height": 48, "frames": 9, "steps": 4}
            node["inputs"] |= {key: value for key, value in small.items() if key in node["inputs"]}
        (tmp_path / "workflows" / "api" / f"{name}.json").write_text(json.dumps(prompt))
    return tmp_path


def set_inputs(desk: Path, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """Change inputs in a desk workflow, by node, and add missing nodes.

    Returns the workflow.
    """
    file = desk / "workflows" / "api" / f"{name}.json"
    prompt: dict[str, Any] = json.loads(file.read_text())
    for node, inputs in changes.items():
        prompt.setdefault(node, {"class_type": inputs.pop("class_type", None), "inputs": {}})[
            "inputs"
        ] |= inputs
    file.write_text(json.dumps(prompt))
    return prompt


@pytest.fixture
def example(comfyui: ComfyUI, api: Server, desk: Path) -> Example:
    """`example("one_job.py", *arguments, url=None)` runs an example on the desk.

    Python is ComfyUI's own.
    """

    def run(name: str, *arguments: str, url: str | None = None) -> Done:
        run_by = "bash" if name.endswith(".sh") else str(comfyui.python)
        return _run([run_by, f"docs/examples/{name}", *arguments], comfyui, desk, url or api.url)

    return run


def _run(command: list[str], comfyui: ComfyUI, desk: Path, url: str) -> Done:
    # No proxy stands between a test and its own machine.
    environment = {**comfyui.environment(), "COMFYUI_URL": url, "NO_PROXY": "*", "no_proxy": "*"}
    return subprocess.run(
        command,
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def saved(api: Server) -> set[bytes]:
    """Contents of all videos saved by the server."""
    return {file.read_bytes() for file in (api.base / "output").rglob("*.mp4")}


def history(api: Server) -> dict[str, Any]:
    found: dict[str, Any] = api.get("/history")
    return found


def test_every_example_is_run_here() -> None:
    tested = {
        f"{name}.{kind}"
        for name in ("one_job", "many_jobs", "upload_image", "cancel")
        for kind in ("sh", "py")
    }
    of_engine = {"minimal_streaming.py"}  # runs in the unit suite
    there = {file.name for file in EXAMPLES.iterdir() if file.is_file()} - of_engine
    assert there == tested | {"progress.py", "comfy_http.sh", "comfy_http.py"}
    assert there == {*re.findall(r"\]\(examples/(\w+\.\w+)\)", PAGE)}


@KINDS
def test_one_job(api: Server, example: Example, desk: Path, kind: str) -> None:
    set_inputs(desk, "t2v", sampler={"flow_shift": 11.0 if kind == "sh" else 10.0})
    done = example(f"one_job.{kind}", "workflows/api/t2v.json", "videos")
    assert done.returncode == 0, done.stderr
    file, *steps = done.stdout.splitlines()
    assert (desk / file).read_bytes() in saved(api)
    assert [file] == [str(path.relative_to(desk)) for path in (desk / "videos").iterdir()]
    assert [line.split(":")[0] for line in steps] == [
        f"step {i} ({e})" for i, e in enumerate(["high"] * 3 + ["low"])
    ]
    *_, last = history(api).values()
    assert last["prompt"][2]["sampler"]["inputs"]["seed"] == 7
    assert "lighthouse" in last["prompt"][2]["text"]["inputs"]["positive"]


@KINDS
def test_the_same_job_again_computes_nothing_and_names_the_same_file(
    api: Server, example: Example, desk: Path, kind: str
) -> None:
    first = example(f"one_job.{kind}", "workflows/api/t2v.json", "videos")
    before = saved(api)
    again = example(f"one_job.{kind}", "workflows/api/t2v.json", "again")
    assert again.returncode == 0, again.stderr
    file = again.stdout.splitlines()[0]
    assert Path(file).name == Path(first.stdout.splitlines()[0]).name
    assert saved(api) == before


@KINDS
def test_many_jobs_give_a_file_each(api: Server, example: Example, desk: Path, kind: str) -> None:
    done = example(
        f"many_jobs.{kind}", "workflows/api/t2v.json", "videos", "a red fox", "a kite", "a well"
    )
    assert done.returncode == 0, done.stderr
    files = sorted((desk / "videos").iterdir())
    assert len({file.read_bytes() for file in files}) == 3
    assert {file.read_bytes() for file in files} <= saved(api)


@KINDS
@pytest.mark.parametrize("name", ["one_job", "many_jobs"])
def test_a_job_that_is_refused_is_told_in_words(
    example: Example, desk: Path, name: str, kind: str
) -> None:
    set_inputs(desk, "t2v", sampler={"steps": 2000}, latent={"frames": -3})
    done = example(
        f"{name}.{kind}", "workflows/api/t2v.json", "videos", *["a fox"] * (name == "many_jobs")
    )
    assert done.returncode == 1
    assert "2000" in done.stderr
    assert "sampler" in done.stderr
    assert "-3" in done.stderr
    assert "latent" in done.stderr
    assert "Traceback" not in done.stderr


@KINDS
def test_a_job_that_fails_is_told_in_words_and_stops_no_other(
    example: Example, desk: Path, kind: str
) -> None:
    without_image = {
        f"{noise}_noise": f"wan2.2_i2v_{noise}_noise_14B_fp8_scaled.safetensors"
        for noise in ("high", "low")
    }
    set_inputs(desk, "t2v", experts=without_image)
    done = example(f"one_job.{kind}", "workflows/api/t2v.json", "videos")
    assert done.returncode == 1
    assert "sampler (WanStreamSampler): " in done.stderr
    assert "Traceback" not in done.stderr
    done = example(f"many_jobs.{kind}", "workflows/api/t2v.json", "videos", "a red fox", "a kite")
    assert done.returncode == 1
    assert done.stderr.count("sampler (WanStreamSampler): ") == 2


@KINDS
def test_a_job_of_which_a_part_is_wrong_is_not_left_to_run(
    api: Server, example: Example, desk: Path, kind: str
) -> None:
    """The server accepts it, and answers 200."""
    wrong = {
        "class_type": "WanStreamSaveVideo",
        "images": ["frames", 0],
        "fps": 0,
        "filename_prefix": "x",
        "crf": 18,
    }
    set_inputs(desk, "t2v", again=wrong, sampler={"steps": 1000})
    before = {*history(api)}
    done = example(f"one_job.{kind}", "workflows/api/t2v.json", "videos")
    assert done.returncode == 1
    assert "again" in done.stderr
    assert "0.01" in done.stderr
    assert api.get("/prompt")["exec_info"]["queue_remaining"] <= 1
    while api.get("/prompt")["exec_info"]["queue_remaining"]:
        time.sleep(0.1)
    statuses = {
        entry["status"]["status_str"] for id, entry in history(api).items() if id not in before
    }
    assert statuses <= {"error"}


@KINDS
def test_a_wrong_address_is_told_in_words(example: Example, kind: str) -> None:
    done = example(f"one_job.{kind}", "workflows/api/t2v.json", "videos", url="http://127.0.0.1:9")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search("refused|connect", done.stderr)


@KINDS
def test_an_image_is_uploaded_and_none_is_written_over(
    api: Server, example: Example, desk: Path, kind: str
) -> None:
    folder, videos = api.base / "input", set()
    for shade in (60, 180):
        Image.new("RGB", (80, 60), (shade, 90, 30)).save(desk / f"my portrait {kind}.png")
        done = example(
            f"upload_image.{kind}",
            "workflows/api/i2v.json",
            f"my portrait {kind}.png",
            f"videos{shade}",
        )
        assert done.returncode == 0, done.stderr
        videos.add((desk / done.stdout.strip()).read_bytes())
    assert len(videos) == 2
    assert videos <= saved(api)
    uploaded = sorted(folder.glob(f"my portrait {kind}*"))
    assert [file.name for file in uploaded] == [
        f"my portrait {kind} (1).png",
        f"my portrait {kind}.png",
    ]
    assert {Image.open(file).getpixel((0, 0)) for file in uploaded} == {(60, 90, 30), (180, 90, 30)}
    again = example(
        f"upload_image.{kind}", "workflows/api/i2v.json", f"my portrait {kind}.png", "again"
    )
    assert again.returncode == 0, again.stderr
    assert sorted(folder.glob(f"my portrait {kind}*")) == uploaded


def test_progress_tells_every_node_and_step(example: Example, desk: Path) -> None:
    set_inputs(desk, "t2v", sampler={"seed": time.time_ns()})
    done = example("progress.py", "workflows/api/t2v.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "execution_success"
    # ComfyUI drops events that follow too quickly.
    assert [line for line in lines if line.startswith("sampler: ")][-1] == "sampler: 4 of 4"
    steps = [line.split(":")[0] for line in lines if line.startswith("step ")]
    assert steps == [
        f"step {n} of 4 ({expert})" for n, expert in enumerate(["high"] * 3 + ["low"], 1)
    ]
    assert lines.index("sampler (WanStreamSampler)") < lines.index("frames (WanStreamVAEDecode)")


def test_progress_tells_how_a_job_failed_to_start(example: Example, desk: Path) -> None:
    set_inputs(desk, "t2v", sampler={"steps": 2000})
    done = example("progress.py", "workflows/api/t2v.json")
    assert done.returncode == 1
    assert "sampler" in done.stderr
    assert "Traceback" not in done.stderr


@KINDS
def test_cancel_ends_the_jobs_it_is_told_and_no_other(
    api: Server, example: Example, desk: Path, kind: str
) -> None:
    running, waiting, other = (
        _queued(api, desk, seed, steps) for seed, steps in ((1, 1000), (2, 1000), (3, 2))
    )
    while not any(running == item[1] for item in api.get("/queue")["queue_running"]):
        time.sleep(0.1)
    done = example(f"cancel.{kind}", waiting, running)
    assert done.returncode == 0, done.stderr
    assert api.wait(running)["status"]["messages"][-1][0] == "execution_interrupted"
    assert api.wait(other)["status"]["status_str"] == "success"
    assert api.get(f"/history/{waiting}") == {}


def _queued(api: Server, desk: Path, seed: int, steps: int) -> str:
    return api.queue(
        set_inputs(desk, "t2v", sampler={"seed": seed + time.time_ns() % 2**32, "steps": steps})
    )


@KINDS
def test_waiting_for_a_job_that_is_gone_ends(
    comfyui: ComfyUI, api: Server, desk: Path, kind: str
) -> None:
    wait = {
        "sh": ["bash", "-c", ". docs/examples/comfy_http.sh; wait_for no-such-job"],
        "py": [str(comfyui.python), "-c", "import comfy_http as c; c.wait('no-such-job')"],
    }
    folder = desk if kind == "sh" else EXAMPLES
    done = _run(wait[kind], comfyui, folder, api.url)
    assert done.returncode == 1
    assert "does not know job no-such-job" in done.stderr


def test_the_commands_of_the_page_run_in_their_order(
    comfyui: ComfyUI, api: Server, desk: Path
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 5
    commands = "\n".join(["set -euo pipefail", *blocks])
    assert commands.count("http://127.0.0.1:8188") == 1
    Image.new("RGB", (80, 60)).save(desk / "portrait.png")
    script = commands.replace("http://127.0.0.1:8188", api.url)
    done = _run(["bash", "-c", script], comfyui, desk, api.url)
    assert done.returncode == 0, done.stderr
    answer, status, *steps, errors = done.stdout.splitlines()
    assert json.loads(answer)["node_errors"] == {}
    assert status == '"success"'
    assert [line.split()[0] for line in steps] == ["high"] * 3 + ["low"]
    assert errors == "{}"
    assert (desk / "video.mp4").read_bytes() in saved(api)


def test_the_last_runs_are_listed_for_who_comes_later(api: Server, desk: Path) -> None:
    prompt_id = _queued(api, desk, seed=4, steps=2)
    api.wait(prompt_id)
    (run,) = (run for run in api.get("/wanstream/runs")["runs"] if run["prompt_id"] == prompt_id)
    assert (run["steps"], len(run["experts"]), run["error"]) == (2, 2, None)
    assert len(run["timeline"]["steps"]) == 2


def test_every_shipped_workflow_is_served_as_a_template(api: Server) -> None:
    """ComfyUI takes templates from one folder of a pack: `examples` would hide `workflows`."""
    assert sorted(api.get("/api/workflow_templates")[PACK]) == sorted(TITLES.values())
    for name, title in TITLES.items():
        served = api.get(f"/api/workflow_templates/{PACK}/{quote(title)}.json")
        assert served == template(name)
