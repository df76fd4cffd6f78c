"""Calls of ComfyUI's HTTP API for a job, with Python's standard library only.

Copy and change it as needed.

The environment variable `COMFYUI_URL` sets the server; default: http://127.0.0.1:8188.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

URL = os.environ.get("COMFYUI_URL", "http://127.0.0.1:8188")

Prompt = dict[str, dict[str, Any]]
"""A workflow in API format: `{node id: {"class_type": ..., "inputs": {...}}}`."""


class PromptRefusedError(ValueError):
    """The server refused the workflow; the message has one line per error."""


class FailedError(OSError):
    """A job ended without its result, or the server does not know it."""


def read_workflow(file: str) -> Prompt:
    prompt: Prompt = json.loads(Path(file).read_text(encoding="utf-8"))
    return prompt


def call(route: str, body: object = None) -> Any:
    """Send a GET request, or a POST request if `body` is given.

    Return the JSON response, or None if it is empty.
    """
    data = None if body is None else json.dumps(body).encode()
    return json.loads(
        _send(urllib.request.Request(URL + route, data, {"Content-Type": "application/json"}))
        or "null"
    )


def queue(prompt: Prompt, *, client_id: str = "") -> str:
    """Queue a workflow and return the id of the job.

    Raises PromptRefusedError if any part of it is invalid.

    Events of the job go to the websocket of `client_id`. Without one, the id of the job is used:
    ComfyUI needs an id to list cached files in the history.
    """
    # With our own id, /history can be polled for the job even if the response to this call is lost.
    prompt_id = str(uuid.uuid4())
    try:
        answer = call(
            "/prompt",
            {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id or prompt_id},
        )
    except urllib.error.HTTPError as err:
        if err.code != 400:
            raise
        raise PromptRefusedError("\n".join(_complaints(json.loads(err.read())))) from None
    if answer["node_errors"]:
        # ComfyUI accepts such a job, computes the valid outputs and silently skips the others.
        cancel(prompt_id)
        raise PromptRefusedError("\n".join(_complaints(answer)))
    return prompt_id


def wait(prompt_id: str) -> dict[str, Any]:
    """Wait for a job and return its history entry.

    Raises FailedError if the job failed or is unknown.
    """
    while True:
        # /queue comes first: a job that ends between the two calls is then found in the history.
        queued = any(prompt_id == item[1] for items in call("/queue").values() for item in items)
        if entry := call(f"/history/{prompt_id}").get(prompt_id):
            break
        if not queued:
            raise FailedError(
                f"the server does not know job {prompt_id}: was it cancelled, or the server "
                "restarted?"
            )
        time.sleep(0.5)
    if entry["status"]["status_str"] != "success":
        raise FailedError(_reason(entry["status"]["messages"]))
    found: dict[str, Any] = entry
    return found


def download(entry: dict[str, Any], folder: Path) -> list[Path]:
    """Download the files that a job wrote to the server's output folder.

    Return their paths in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_fetch(file, folder) for file in _files(entry)]


def upload(image: Path) -> str:
    """Put an image into the server's input folder and return the name for LoadImage.

    The server overwrites no file: a different image of that name gets a number, an identical one is
    reused.
    """
    boundary = uuid.uuid4().hex
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; '
        f'filename="{image.name}"\r\n\r\n'
    )
    body = head.encode() + image.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    answer = json.loads(_send(urllib.request.Request(f"{URL}/upload/image", body, kind)))
    return "/".join(part for part in (answer["subfolder"], answer["name"]) if part)


def cancel(prompt_id: str) -> None:
    """Cancel a queued or running job; other jobs are not affected."""
    call("/queue", {"delete": [prompt_id]})
    call("/interrupt", {"prompt_id": prompt_id})


def _send(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
    return data


def _complaints(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the errors of a refused workflow: those of the whole, then those of each node."""
    if error := answer.get("error"):
        yield error["message"] if isinstance(error, dict) else error
    for node, found in (answer.get("node_errors") or {}).items():
        for error in found["errors"]:
            yield f"{node} ({found['class_type']}): {error['message']}: {error['details']}"


def _reason(messages: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the reason for the end of a job from its events in the history."""
    event, data = messages[-1]
    if event == "execution_error":
        return f"{data['node_id']} ({data['node_type']}): {data['exception_message'].strip()}"
    return "the job was cancelled"


def _files(entry: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the files of all output nodes.

    Each kind of node has its own key for them, next to other output.
    """
    for shown in entry["outputs"].values():
        for values in shown.values():
            for value in values:
                if isinstance(value, dict) and value.get("type") == "output":
                    yield {name: value[name] for name in ("filename", "subfolder", "type")}


def _fetch(file: dict[str, str], folder: Path) -> Path:
    path = folder / Path(file["filename"]).name
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(
        _send(urllib.request.Request(f"{URL}/view?{urllib.parse.urlencode(file)}"))
    )
    return unfinished.replace(path)
