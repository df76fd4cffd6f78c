"""Real ComfyUI server for development, in a separate base directory.

`COMFYUI_PATH` names the checkout (default `~/ComfyUI`), `COMFYUI_PYTHON` the Python for it (default
the checkout's `.venv`). This Python needs the packages in this pack's `requirements.txt`.
`COMFYUI_FRONTEND` names another frontend folder, the `static` in a `comfyui-frontend-package`.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..nodes.runs import write_video
from ..testing import model_names, write_tiny_model
from .model_files import MODEL_FILES
from .thumbnails import landscape

ROOT = Path(__file__).parent.parent
PACK = "WanStream"
"""Name of the pack's folder, and section title in the template browser."""


def populate(base: Path, *, workflows: Iterable[str] | None = None) -> None:
    """Put this pack, the test model, a picture and a video into a base directory.

    Args:
        workflows: shipped workflows to run. The test model then has only their files. None: all
            files.
    """
    for folder in ("custom_nodes", "input", "output"):
        (base / folder).mkdir()
    # A link, so the server runs the checkout as it is.
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    names = None if workflows is None else names_of_workflows(workflows)
    # With the 40 blocks of the real model a step takes ten times as long.
    write_tiny_model(base / "models", layers=4, names=names)
    name_model_files(base / "models")
    landscape(832, 480).save(base / "input" / "example.png")
    write_video(
        base / "input" / "example.mp4", [torch.zeros(480, 832, 3)], fps=16, crf=30, metadata={}
    )


def names_of_workflows(workflows: Iterable[str]) -> set[str]:
    """Return the names of model files in these shipped workflows."""
    files = [ROOT / "workflows" / "api" / f"{name}.json" for name in workflows]
    return {
        name for file in files for name in model_names(json.loads(file.read_text(encoding="utf-8")))
    }


def name_model_files(models: Path) -> None:
    """Write empty files with the names of the workflows' missing models, for loader lists."""
    for file in MODEL_FILES.values():
        path = models / file.directory / file.name
        path.parent.mkdir(exist_ok=True)
        # The test model has written some of these files.
        if not path.exists():
            path.touch()


START_SECONDS = 240
RUN_SECONDS = 240
POLL_SECONDS = 0.1

# Prints the packages in this pack's requirements.txt that a Python lacks.
MISSING = """
from importlib.util import find_spec
needed = ("torch", "diffusers", "transformers", "sentencepiece", "safetensors", "psutil", "av",
          "numpy", "PIL", "ftfy", "platformdirs", "httpx", "tqdm")
print(*(name for name in needed if find_spec(name) is None))
"""


class NoComfyUIError(OSError):
    """No ComfyUI that can run this pack was found. The message says what to set or install."""


class ComfyUI(NamedTuple):
    """ComfyUI checkout with its Python."""

    path: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Return this process's environment without Python settings.

        Bytecode stays in the checkout, as after any start of ComfyUI: compiling takes seconds.
        """
        # ComfyUI's Python would be misled by this Python's PYTHONPATH and VIRTUAL_ENV.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        return {**kept, "OMP_NUM_THREADS": "1"}

    def version(self) -> tuple[int, ...]:
        """Return the version, for example (0, 3, 64)."""
        text = (self.path / "comfyui_version.py").read_text(encoding="utf-8")
        # The last line is `__version__ = "0.3.64"`.
        return tuple(int(part) for part in text.split('"')[-2].split("."))


def find_comfyui() -> ComfyUI:
    """Return this machine's ComfyUI. Raises NoComfyUIError."""
    path = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
    folder, name = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    python = Path(os.environ.get("COMFYUI_PYTHON", path / ".venv" / folder / name))
    if not (path / "main.py").is_file() or not python.is_file():
        raise NoComfyUIError(
            f"NO COMFYUI: {path} run by {python} does not exist; set COMFYUI_PATH and "
            "COMFYUI_PYTHON"
        )
    missing = subprocess.run(
        [python, "-c", MISSING], capture_output=True, text=True, timeout=START_SECONDS, check=False
    ).stdout
    # With nothing missing, only a line end is printed. No output means that Python did not run.
    if missing != "\n":
        raise NoComfyUIError(
            f"COMFYUI WITHOUT {missing.strip()}: install this pack's requirements.txt with "
            f"{python} -m pip"
        )
    return ComfyUI(path, python)


class Server(NamedTuple):
    """Running ComfyUI with base directory and process id."""

    url: str
    base: Path
    process_id: int

    def get(self, route: str) -> Any:
        return self._send(urllib.request.Request(self.url + route))[1]

    def post(self, route: str, body: object) -> tuple[int, Any]:
        """Send JSON. Return the status and the JSON response (None if it is empty)."""
        data = json.dumps(body).encode()
        return self._send(
            urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        )

    def run(self, prompt: dict[str, Any], **extra_data: Any) -> dict[str, Any]:
        """Run a workflow to the end and return the history.

        Raises AssertionError if it is refused or fails.
        """
        entry = self.wait(self.queue(prompt, **extra_data))
        assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
        return entry

    def queue(self, prompt: dict[str, Any], **extra_data: Any) -> str:
        """Queue a valid workflow and return the id."""
        status, answer = self.post("/prompt", {"prompt": prompt, "extra_data": extra_data})
        assert (status, answer.get("node_errors")) == (200, {}), answer
        prompt_id: str = answer["prompt_id"]
        return prompt_id

    def wait(self, prompt_id: str) -> dict[str, Any]:
        """Wait for a queued workflow to end, successful or not, and return the history."""
        deadline = time.monotonic() + RUN_SECONDS
        # The history contains a workflow only when it has ended.
        while not (history := self.get(f"/history/{prompt_id}")):
            assert time.monotonic() < deadline, f"still running after {RUN_SECONDS} s"
            time.sleep(POLL_SECONDS)
        entry: dict[str, Any] = history[prompt_id]
        return entry

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block the queue: workflows posted inside wait, and are deleted on exit without running.

        The base directory's `custom_nodes/` must hold the node `TestGate`, which ends once `file`
        exists.
        """
        gate = self.base / "gate"
        status, _ = self.post(
            "/prompt", {"prompt": {"1": {"class_type": "TestGate", "inputs": {"file": str(gate)}}}}
        )
        assert status == 200
        try:
            yield
        finally:
            # The queue is cleared first: waiting workflows would run as soon as the gate opens.
            self.post("/queue", {"clear": True})
            gate.touch()
            while self.get("/prompt")["exec_info"]["queue_remaining"]:
                time.sleep(POLL_SECONDS)
            gate.unlink()

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        # A proxy in the environment must not be used for loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as answer:
            # A refusal has a JSON body too, with the reasons by node.
            return answer.code, json.loads(answer.read() or b"null")


@contextmanager
def running_server(
    comfyui: ComfyUI, base: Path, *flags: str, cpu: bool = True, port: int | None = None
) -> Iterator[Server]:
    """Run a ComfyUI server that writes only bytecode outside `base`, and end it on exit.

    The output is written to `base / "server.log"`.

    Args:
        flags: further command line flags.
        cpu: compute on the CPU. False: on ComfyUI's choice of device.
        port: port on loopback. None: a free one.
    """
    port = port or free_port()
    # The database is in memory, because the default one is a file in the checkout.
    frontend = os.environ.get("COMFYUI_FRONTEND")
    command = [
        *(str(comfyui.python), "main.py", "--base-directory", str(base), "--listen", "127.0.0.1"),
        *("--port", str(port), "--database-url", "sqlite:///:memory:", "--disable-api-nodes"),
        *(["--cpu"] if cpu else []),
        *(["--front-end-root", frontend] if frontend else []),
        *flags,
    ]
    log = base / "server.log"
    with log.open("wb") as out:
        # The output goes to a file: a full pipe without a reader would stop the server.
        process = subprocess.Popen(
            command, cwd=comfyui.path, env=comfyui.environment(), stdout=out, stderr=out
        )
    try:
        yield _started(Server(f"http://127.0.0.1:{port}", base, process.pid), process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(server: Server, process: subprocess.Popen[bytes], log: Path) -> Server:
    """Wait until the server responds, and check by the command line that it is this one."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        # An early exit is reported with the log, rather than after the whole wait.
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, (
            f"no answer after {START_SECONDS} s: {log.read_text(errors='replace')[-4000:]}"
        )
        try:
            argv = server.get("/system_stats")["system"]["argv"]
        except (
            urllib.error.URLError,
            ConnectionError,
        ):  # the second from another process that had the port before
            time.sleep(POLL_SECONDS)
            continue
        assert str(server.base) in argv, f"another server listens at {server.url}: {argv}"
        return server


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
