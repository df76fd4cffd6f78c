"""Client for the parts of ComfyUI's HTTP API that a batch uses. Does not retry."""

from __future__ import annotations

import http.client
import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....schema import is_loopback
from .base import NoSuchFileError, UnreachableError

TIMEOUT_SECONDS = 60.0
_GATEWAY_ERRORS = (502, 503, 504)
_OK, _NOT_FOUND, _BROKEN = 200, 404, 500
_NEVER = (400, 403, _NOT_FOUND, 410)
"""Permanent error codes of `/view`, for which a retry is useless."""
_MOVED = (301, 302, 303, 307, 308)
_PIECE = 1 << 20


class NotComfyUIError(ValueError):
    """The address is not that of a ComfyUI server."""


class ComfyClient:
    """Client of one server. Every method raises UnreachableError if there is no complete response."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        """Create a client without sending anything. Raises NotComfyUIError for an invalid address."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as err:
            raise NotComfyUIError(f"--server {url}: {err}") from err
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise NotComfyUIError(f"--server {url}: write an address like http://127.0.0.1:8188")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # Proxies of the environment cannot reach this machine's loopback ports.
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
        self._opener = urllib.request.build_opener(_NoRedirect(), *handlers)

    def version(self) -> str:
        """Return ComfyUI's version. Raises NotComfyUIError for any other server."""
        status, answer = self._ask("/system_stats")
        if status >= _BROKEN:
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status in _MOVED:
            raise NotComfyUIError(f"{self.url} redirects to another address (status {status}): give that address")
        system = answer.get("system") if isinstance(answer, dict) else None
        if status != _OK or not isinstance(system, dict):
            raise NotComfyUIError(f"{self.url} answers, but not as a ComfyUI server does (status {status})")
        return str(system.get("comfyui_version", "unknown"))

    def object_info(self) -> dict[str, Any]:
        """Return the server's description of every node class."""
        return self._object("/object_info")

    def post_prompt(self, prompt_id: str, prompt: object) -> tuple[int, Any]:
        """Queue a workflow; return the status and the JSON response."""
        # Without a client_id, ComfyUI 0.18 omits outputs that it has cached from an earlier job from the history.
        return self._ask("/prompt", {"prompt": prompt, "prompt_id": prompt_id, "client_id": prompt_id})

    def job(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the server's `/api/jobs/ID`, None for an unknown id. Emulated on servers before 0.6.0."""
        status, answer = self._ask(f"/api/jobs/{prompt_id}")
        if status == _OK and isinstance(answer, dict) and "status" in answer:
            return answer
        if status == _NOT_FOUND and isinstance(answer, dict) and "error" in answer:
            return None
        if status != _NOT_FOUND:
            raise UnreachableError(f"{self.url}/api/jobs answers with status {status}")
        return self._job_of_older_server(prompt_id)

    def executed(self, prompt_id: str) -> tuple[dict[str, Any], set[str]] | None:
        """Return a workflow of the history and its executed output nodes, None if it is not in the history."""
        entry = self._object(f"/history/{prompt_id}").get(prompt_id)
        with self.shape("/history"):
            return None if entry is None else (entry["prompt"][2], set(entry["prompt"][4]))

    def download(self, filename: str, subfolder: str, part: Path) -> None:
        """Write a whole output file to `part`. Raises NoSuchFileError, or OSError if it cannot be written."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": "output"})
        with self._answer(urllib.request.Request(f"{self.url}/view?{query}")) as (status, body):
            if status in _NEVER:
                raise NoSuchFileError(
                    f"the server saved '{filename}' but does not return it (status {status}): if the file was removed, "
                    "restart the server, which otherwise returns cached results for the same workflow"
                )
            if status != _OK:
                raise UnreachableError(f"{self.url} does not send '{filename}' now (status {status})")
            expected = body.headers.get("Content-Length")
            with part.open("wb") as file:
                shutil.copyfileobj(_Body(body), file, _PIECE)
                received = file.tell()
        if expected is not None and received != int(expected):
            raise UnreachableError(f"{filename}: received {received} of {expected} bytes")

    def delete(self, prompt_id: str) -> None:
        """Remove a workflow from the queue, if it is waiting there."""
        self._command("/queue", {"delete": [prompt_id]})

    def interrupt(self, prompt_id: str) -> None:
        """Interrupt a workflow, if it is running."""
        self._command("/interrupt", {"prompt_id": prompt_id})

    @contextmanager
    def shape(self, route: str) -> Iterator[None]:
        """Translate errors of reading a JSON response into UnreachableError: its format is that of a proxy, say."""
        try:
            yield
        except (LookupError, AttributeError, TypeError, ValueError) as err:
            raise UnreachableError(f"{self.url}{route} answers, but not as ComfyUI does: {err!r}") from err

    def _command(self, route: str, body: object) -> None:
        """Send a command; with any status other than 200 it may not have been executed."""
        status, _ = self._ask(route, body)
        if status != _OK:
            raise UnreachableError(f"{self.url}{route} answers with status {status}")

    def _job_of_older_server(self, prompt_id: str) -> dict[str, Any] | None:
        # The queue before the history: a workflow that finishes between the two requests is found in the history.
        queue = self._object("/queue")
        with self.shape("/queue"):
            for key, status in (("queue_running", "in_progress"), ("queue_pending", "pending")):
                if any(item[1] == prompt_id for item in queue[key]):
                    return {"status": status}
        entry = self._object(f"/history/{prompt_id}").get(prompt_id)
        if entry is None:
            return None
        with self.shape("/history"):
            messages = dict(message[:2] for message in entry["status"]["messages"])
            if entry["status"]["status_str"] == "success":
                return {"status": "completed", "outputs": entry["outputs"]}
            status = "cancelled" if "execution_interrupted" in messages else "failed"
            return {"status": status, "execution_error": messages.get("execution_error", {})}

    def _object(self, route: str) -> dict[str, Any]:
        status, answer = self._ask(route)
        if status != _OK or not isinstance(answer, dict):
            raise UnreachableError(f"{self.url}{route} answers with status {status}")
        return answer

    def _ask(self, route: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the JSON response; None if it is not JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        with self._answer(urllib.request.Request(self.url + route, data, headers)) as (status, answer):
            content = _Body(answer).read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, None

    @contextmanager
    def _answer(self, request: urllib.request.Request) -> Iterator[tuple[int, Any]]:
        """Yield the status and the body of a response."""
        try:
            answer = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as err:
            answer = err
        except (OSError, http.client.HTTPException) as err:
            raise UnreachableError(f"no answer from {self.url}: {getattr(err, 'reason', None) or err}") from err
        with answer:
            if answer.status in _GATEWAY_ERRORS:
                raise UnreachableError(f"{self.url} answers with status {answer.status}")
            yield answer.status, answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would turn a redirected POST into a GET."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _Body:
    """Body of a response that raises UnreachableError, so that a lost connection differs from a full disk."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def read(self, length: int | None = None) -> bytes:
        try:
            piece: bytes = self._answer.read() if length is None else self._answer.read(length)
        except (OSError, http.client.HTTPException) as err:
            raise UnreachableError(f"the connection was lost: {err}") from err
        return piece
