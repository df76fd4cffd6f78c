"""ComfyUI's HTTP interface, as far as a batch needs it. Knows routes and shapes; decides nothing, retries nothing."""

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
"""Answers of `/view` that stay the same however often the file is requested."""
_MOVED = (301, 302, 303, 307, 308)
_PIECE = 1 << 20


class NotComfyUIError(ValueError):
    """The address is no ComfyUI server's."""


class ComfyClient:
    """One server, by its address. Every method raises UnreachableError when no whole answer comes."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        """Nothing is sent yet. Raises NotComfyUIError for what is no address at all."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as err:
            raise NotComfyUIError(f"--server {url}: {err}") from err
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise NotComfyUIError(f"--server {url}: write an address like http://127.0.0.1:8188")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # A proxy of the environment has no way to this machine's own ports.
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
        self._opener = urllib.request.build_opener(_NoRedirect(), *handlers)

    def version(self) -> str:
        """ComfyUI's version, as it tells it. Raises NotComfyUIError if something else answers."""
        status, answer = self._ask("/system_stats")
        if status >= _BROKEN:
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status in _MOVED:
            raise NotComfyUIError(f"{self.url} sends its callers elsewhere (status {status}): give that address")
        system = answer.get("system") if isinstance(answer, dict) else None
        if status != _OK or not isinstance(system, dict):
            raise NotComfyUIError(f"{self.url} answers, but not as a ComfyUI server does (status {status})")
        return str(system.get("comfyui_version", "unknown"))

    def object_info(self) -> dict[str, Any]:
        """What the server says of every class of nodes."""
        return self._object("/object_info")

    def post_prompt(self, prompt_id: str, prompt: object) -> tuple[int, Any]:
        """Queue a workflow; the status and what the server says."""
        # With no client_id, ComfyUI 0.18 leaves outputs that it remembers from an earlier job out of the history.
        return self._ask("/prompt", {"prompt": prompt, "prompt_id": prompt_id, "client_id": prompt_id})

    def job(self, prompt_id: str) -> dict[str, Any] | None:
        """The server's `/api/jobs/ID`, None if it knows no such workflow. Before 0.6.0 it is put together of others."""
        status, answer = self._ask(f"/api/jobs/{prompt_id}")
        if status == _OK and isinstance(answer, dict) and "status" in answer:
            return answer
        if status == _NOT_FOUND and isinstance(answer, dict) and "error" in answer:
            return None
        if status != _NOT_FOUND:
            raise UnreachableError(f"{self.url}/api/jobs answers with status {status}")
        return self._job_of_older_server(prompt_id)

    def executed(self, prompt_id: str) -> tuple[dict[str, Any], set[str]] | None:
        """A workflow of the history and the output nodes that it was run for, None if it is not there."""
        entry = self._object(f"/history/{prompt_id}").get(prompt_id)
        with self.shape("/history"):
            return None if entry is None else (entry["prompt"][2], set(entry["prompt"][4]))

    def download(self, filename: str, subfolder: str, part: Path) -> None:
        """Write an output file to `part`, all of it. Raises NoSuchFileError, or OSError where it cannot be written."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": "output"})
        with self._answer(urllib.request.Request(f"{self.url}/view?{query}")) as (status, body):
            if status in _NEVER:
                raise NoSuchFileError(
                    f"the server made '{filename}' but does not give it (status {status}): if it was removed there, "
                    "restart the server, which makes the same workflow from its cache otherwise"
                )
            if status != _OK:
                raise UnreachableError(f"{self.url} does not send '{filename}' now (status {status})")
            promised = body.headers.get("Content-Length")
            with part.open("wb") as file:
                shutil.copyfileobj(_Pieces(body), file, _PIECE)
                got = file.tell()
        if promised is not None and got != int(promised):
            raise UnreachableError(f"{filename}: {got} of {promised} bytes came")

    def delete(self, prompt_id: str) -> None:
        """Take a workflow out of the queue, if it is waiting there."""
        self._order("/queue", {"delete": [prompt_id]})

    def interrupt(self, prompt_id: str) -> None:
        """Interrupt a workflow, if it is the one that runs."""
        self._order("/interrupt", {"prompt_id": prompt_id})

    @contextmanager
    def shape(self, route: str) -> Iterator[None]:
        """Take a JSON answer apart inside; one of another shape is that of a proxy, or of half a server."""
        try:
            yield
        except (LookupError, AttributeError, TypeError, ValueError) as err:
            raise UnreachableError(f"{self.url}{route} answers, but not as ComfyUI does: {err!r}") from err

    def _order(self, route: str, body: object) -> None:
        """Send an order; any status but 200 means that it may not have been followed."""
        status, _ = self._ask(route, body)
        if status != _OK:
            raise UnreachableError(f"{self.url}{route} answers with status {status}")

    def _job_of_older_server(self, prompt_id: str) -> dict[str, Any] | None:
        # The queue first: what leaves it in between is in the history then.
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
        """The status and the JSON answer; None where there is no JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        with self._answer(urllib.request.Request(self.url + route, data, headers)) as (status, answer):
            content = _Pieces(answer).read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, None

    @contextmanager
    def _answer(self, request: urllib.request.Request) -> Iterator[tuple[int, Any]]:
        """The status and the body of an answer."""
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
    """Follows to nowhere: what is posted would arrive there as a question."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _Pieces:
    """The body of an answer; a connection that breaks is told apart from a disk that is full."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def read(self, length: int | None = None) -> bytes:
        try:
            piece: bytes = self._answer.read() if length is None else self._answer.read(length)
        except (OSError, http.client.HTTPException) as err:
            raise UnreachableError(f"the answer broke off: {err}") from err
        return piece
