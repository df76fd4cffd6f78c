"""A real ComfyUI: where it is, one isolated server for the session, and a way to ask its Python.

`COMFYUI_PATH` names the checkout (default `~/ComfyUI`), `COMFYUI_PYTHON` the Python that runs it (default the
checkout's `.venv`); that Python needs what this pack's `requirements.txt` lists. Without both, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
PACK = "ComfyUI-WanStream.test-1"
"""The folder name of the pack: a dot and a dash, which no Python name may have."""

START_SECONDS = 120
RUN_SECONDS = 240
POLL_SECONDS = 0.1

# What of this pack's requirements.txt a Python lacks.
MISSING = """
from importlib.util import find_spec
needed = ("torch", "diffusers", "transformers", "sentencepiece", "safetensors", "psutil", "av", "numpy", "PIL", "ftfy")
print(*(name for name in needed if find_spec(name) is None))
"""

# A node for the tests alone: it keeps the server busy until a file appears.
GATE = """
import pathlib, time

class TestGate:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "wait", True, "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {})}}

    def wait(self, file):
        while not pathlib.Path(file).exists():
            time.sleep(0.02)
        return ()

NODE_CLASS_MAPPINGS = {"TestGate": TestGate}
"""

# ComfyUI's own modules, imported in the order in which its main.py does.
IMPORTS = """
import json, sys
arguments, sys.argv = json.loads(sys.argv[1]), ["main.py", "--cpu", "--base-directory", sys.argv[2]]
sys.path.insert(0, ".")
import comfy.options
comfy.options.enable_args_parsing()
import utils.extra_config
import folder_paths, nodes
from comfy_api.latest import io, ui
"""


class ComfyUI(NamedTuple):
    """A checkout of ComfyUI and the Python that runs it."""

    path: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """The test's own environment, without the Python that runs the tests."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


class Server(NamedTuple):
    """A running ComfyUI and its base directory."""

    url: str
    base: Path

    def get(self, route: str) -> Any:
        return self._send(urllib.request.Request(self.url + route))[1]

    def post(self, route: str, body: object) -> tuple[int, Any]:
        """The status and the JSON answer, None if the answer is empty."""
        data = json.dumps(body).encode()
        return self._send(urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"}))

    def run(self, prompt: dict[str, Any], **extra_data: Any) -> dict[str, Any]:
        """Run a workflow to its end and return its history; fails the test if it was refused or did not end well."""
        entry = self.wait(self.queue(prompt, **extra_data))
        assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
        return entry

    def queue(self, prompt: dict[str, Any], **extra_data: Any) -> str:
        """Queue a valid workflow and return its id."""
        status, answer = self.post("/prompt", {"prompt": prompt, "extra_data": extra_data})
        assert (status, answer.get("node_errors")) == (200, {}), answer
        prompt_id: str = answer["prompt_id"]
        return prompt_id

    def wait(self, prompt_id: str) -> dict[str, Any]:
        """The history of a queued workflow, once it has ended in one way or another."""
        deadline = time.monotonic() + RUN_SECONDS
        while not (history := self.get(f"/history/{prompt_id}")):
            assert time.monotonic() < deadline, f"still running after {RUN_SECONDS} s"
            time.sleep(POLL_SECONDS)
        entry: dict[str, Any] = history[prompt_id]
        return entry

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing that is posted inside run: it waits behind a closed gate and is then thrown away."""
        gate = self.base / "gate"
        status, _ = self.post("/prompt", {"prompt": {"1": {"class_type": "TestGate", "inputs": {"file": str(gate)}}}})
        assert status == 200
        try:
            yield
        finally:
            self.post("/queue", {"clear": True})
            gate.touch()
            while self.get("/prompt")["exec_info"]["queue_remaining"]:
                time.sleep(POLL_SECONDS)
            gate.unlink()

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        # No proxy stands between a test and its own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as answer:
            return answer.code, json.loads(answer.read() or b"null")


@pytest.fixture(scope="session")
def comfyui() -> ComfyUI:
    path = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
    folder, name = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    python = Path(os.environ.get("COMFYUI_PYTHON", path / ".venv" / folder / name))
    if not (path / "main.py").is_file() or not python.is_file():
        pytest.skip(f"NO COMFYUI: {path} run by {python} does not exist; set COMFYUI_PATH and COMFYUI_PYTHON")
    missing = subprocess.run([python, "-c", MISSING], capture_output=True, text=True, timeout=START_SECONDS).stdout
    if missing != "\n":
        pytest.skip(f"COMFYUI WITHOUT {missing.strip()}: install this pack's requirements.txt with {python} -m pip")
    return ComfyUI(path, python)


@pytest.fixture(scope="session")
def base(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with this pack, the gate, the names of a few models and a picture in it."""
    base = tmp_path_factory.mktemp("comfyui")
    for folder in ("custom_nodes", "input", "output", "models/diffusion_models", "models/diffusers/wan/transformer"):
        (base / folder).mkdir(parents=True)
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes" / "gate.py").write_text(GATE)
    for name in ("high.safetensors", "low.safetensors", "pickle.pt"):
        (base / "models" / "diffusion_models" / name).touch()
    for name in ("model_index.json", "transformer/config.json"):
        (base / "models" / "diffusers" / "wan" / name).touch()
    (base / "input" / "picture.png").touch()
    return base


@pytest.fixture(scope="session")
def ask(comfyui: ComfyUI, base: Path) -> Callable[..., Any]:
    """`ask(code, *arguments)` runs code in ComfyUI's Python and returns the JSON value of its variable `answer`.

    The code sees `arguments`, `folder_paths`, `nodes`, `io` and `ui`.
    """

    def ask(code: str, *arguments: object) -> Any:
        script = f"{IMPORTS}\n{code}\nprint(json.dumps(answer))"
        command = [str(comfyui.python), "-c", script, json.dumps(arguments), str(base)]
        done = subprocess.run(
            command, cwd=comfyui.path, env=comfyui.environment(), capture_output=True, text=True, timeout=START_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture(scope="session")
def server(comfyui: ComfyUI, base: Path) -> Iterator[Server]:
    """A ComfyUI server of the session's own: CPU, a free port of the loopback, nothing outside its base directory."""
    port = _free_port()
    command = [
        *(str(comfyui.python), "main.py", "--cpu", "--base-directory", str(base), "--listen", "127.0.0.1"),
        *("--port", str(port), "--database-url", "sqlite:///:memory:", "--disable-api-nodes"),
    ]
    log = base / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=comfyui.path, env=comfyui.environment(), stdout=out, stderr=out)
    try:
        yield _started(Server(f"http://127.0.0.1:{port}", base), process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(server: Server, process: subprocess.Popen[bytes], log: Path) -> Server:
    """The server once it answers, and certainly this one: its command line names our base directory."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, (
            f"no answer after {START_SECONDS} s: {log.read_text(errors='replace')[-4000:]}"
        )
        try:
            argv = server.get("/system_stats")["system"]["argv"]
        except urllib.error.URLError:
            time.sleep(POLL_SECONDS)
            continue
        assert str(server.base) in argv, f"another server listens at {server.url}: {argv}"
        return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
