"""Small server with the part of ComfyUI's HTTP API used by a batch.

It computes nothing, and can be in trouble. As in ComfyUI, a restart loses queue and history, and
files in the output folder stay.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.workflow.graph import nodes_by_id
from wanstream.host.files import SAVING_NODE
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.runs.video_file import write_video
from wanstream.schema import VERSION
from wanstream.tests.faults.replaced import SAVE, frames_of, seed_behind
from wanstream.tests.support.host.embedded import embedded_host

COMMANDS = ("drop", "late drop", "500", "502", "cut")
"""Troubles: closed before or after handling the request, errors after it, half a response."""


@dataclass
class State:
    """Queue, history and output folder."""

    output: Path
    models: Path
    seconds: float = 0.0
    comfyui: str = "0.18.1"
    about: dict[str, str] = field(
        default_factory=lambda: {"version": VERSION, "instance": str(uuid.uuid4())}
    )
    pending: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    running: str | None = None
    stopped: set[str] = field(default_factory=set)
    history: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        """Run the queued workflows until `closed` is set."""
        while not self.closed.is_set():
            with self.lock:
                prompt_id, prompt = self.pending.pop(0) if self.pending else (None, {})
                self.running = prompt_id
            if prompt_id is None:
                time.sleep(0.005)
                continue
            entry = self._run(prompt_id, prompt)
            with self.lock:
                self.history[prompt_id] = entry
                self.running = None

    def _run(self, prompt_id: str, prompt: dict[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for node_id in (node_id for node_id, node in prompt.items() if node["class_type"] == SAVE):
            time.sleep(self.seconds)
            if prompt_id in self.stopped:
                messages = [["execution_interrupted", {}]]
                return {"status": {"status_str": "error", "messages": messages}}
            name = f"video_{len([*self.output.glob('*.mp4')]) + 1:05}_.mp4"
            frames = frames_of(seed_behind(prompt, node_id))
            metadata = {"prompt": prompt, SAVING_NODE: node_id}
            write_video(self.output / name, frames, fps=16, crf=30, metadata=metadata)
            outputs[node_id] = {"images": [{"filename": name, "subfolder": "", "type": "output"}]}
        status = {"status_str": "success", "messages": []}
        ran = [0, prompt_id, prompt, {}, [*outputs]]
        return {"prompt": ran, "outputs": outputs, "status": status}

    def answer(self, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Return the status, and JSON or bytes."""
        if route == "/system_stats":
            return 200, {"system": {"comfyui_version": self.comfyui}}
        if route == "/wanstream/about":
            return (200, self.about) if self.about else (404, b"")
        if route == "/object_info":
            return 200, object_info(self.models)
        if route == "/view":
            path = self.output / Path(query["filename"]).name
            return (200, path.read_bytes()) if path.is_file() else (404, b"")
        with self.lock:
            if route == "/prompt":
                self.pending.append((body["prompt_id"], body["prompt"]))
                return 200, {"prompt_id": body["prompt_id"], "number": 1, "node_errors": {}}
            if route.startswith("/history/"):
                prompt_id = route.rpartition("/")[2]
                found = {prompt_id: self.history[prompt_id]} if prompt_id in self.history else {}
                return 200, found
            if route == "/queue" and body is None:
                running = [[0, self.running]] if self.running else []
                pending = [[0, queued] for queued, _ in self.pending]
                return 200, {"queue_running": running, "queue_pending": pending}
            if route == "/queue":
                self.pending = [item for item in self.pending if item[0] not in body["delete"]]
            if route == "/interrupt" and body["prompt_id"] == self.running:
                self.stopped.add(body["prompt_id"])
        return 200, b""


_DESCRIBING = threading.Lock()


def object_info(models: Path) -> dict[str, Any]:
    """Return the nodes as described by a ComfyUI with this pack alone."""
    info = {}
    with _DESCRIBING, embedded_host.opened(Folders(models=models, output=models, input=models)):
        for name, node in nodes_by_id(asyncio.run(WanStreamExtension().get_node_list())).items():
            schema = node.define_schema()
            kinds = {kind: each for kind, each in node.INPUT_TYPES().items() if kind != "hidden"}
            outputs = [output.io_type for output in schema.outputs]
            info[name] = {"input": kinds, "output": outputs, "output_node": schema.is_output_node}
        return json.loads(json.dumps(info, default=str))


def handler_of(state: State, share: float = 0.0, seed: int = 0) -> type[BaseHTTPRequestHandler]:
    """Return the handler for a server with a share of requests in trouble."""
    chance = random.Random(seed)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            parts = urllib.parse.urlsplit(self.path)
            kind = chance.choice(COMMANDS) if chance.random() < share else ""
            if parts.path in {"/system_stats", "/object_info", "/wanstream/about"}:
                kind = ""  # Without a server at its start, a command runs nothing and exits with 2.
            if kind == "drop":
                return
            query = dict(urllib.parse.parse_qsl(parts.query))
            status, answer = state.answer(parts.path, query, body)
            if kind == "late drop":
                return
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(int(kind) if kind.isdigit() else status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if kind == "cut" else data)

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None: ...

    return Handler


def forked_server(port, output, models, *, seconds=0.0, **trouble):
    """Start a server in a separate process, and return the process id as soon as it listens."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.set_num_threads(1)  # it lacks any torch threads in this process
            state = State(output, models, seconds)
            threading.Thread(target=state.work, daemon=True).start()
            handler = handler_of(state, **trouble)
            ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever(poll_interval=0.05)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return pid
        except OSError:
            time.sleep(0.01)
    raise TimeoutError(f"no server at port {port}")


@contextmanager
def running_server(port: int, output: Path, models: Path, **settings: Any) -> Iterator[int]:
    """Run a server in a separate process, and kill it at the end."""
    pid = forked_server(port, output, models, **settings)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
