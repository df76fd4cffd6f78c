"""ComfyUI server as a batch backend: the used parts of the HTTP API, and `/object_info`.

Nothing is retried here. A node's own checks run only on the server, except in this pack's classes.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from httpx import codes

from ...host.embedded import Prompt, Sockets, described_sockets, faults_elsewhere, refusal_text
from ...schema import is_loopback
from ...schema.text import format_size
from .. import backend
from ..backend import BatchBackend
from ..errors import (
    ForeignResponseError,
    NoSuchFileError,
    RefusedError,
    SetupError,
    UnreachableError,
    UnsuitableError,
)

TIMEOUT_SECONDS = 60.0
"""Seconds without a byte in either direction before an upload, a workflow or the node list
counts as lost."""
STATUS_SECONDS = 10.0
"""The same for a connection, a server's state and a file, however long the whole file takes.
ComfyUI answers in milliseconds, or after some seconds while it loads a model. A slower one
hangs, and counts as gone."""
_SLOW = ("/object_info", "/prompt")
"""Routes that read folders or run node checks before the answer. A long wait there does not mean
a hung server."""
_GATEWAY_ERRORS = (502, 503, 504)
_NEVER = (400, 403, 404, 410)
"""Permanent error codes from `/view`. A retry is useless."""
_MOVED = (301, 302, 303, 307, 308)
_PIECE = 1 << 20
MAX_BODY_BYTES = 256 << 20
"""Size limit for a JSON response after decompression. A queue has all users' graphs, a few 100
KB each."""
MAX_FILE_BYTES = 8 << 30
"""Size limit for a file from a server. Without one, it could fill the disk."""
_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Accepted content encodings. Nested ones can expand a small body without a limit."""
ANY_FILE = {"WanStreamContinueVideo": "previous_file", "WanStreamLoadLatent": "file"}
"""Inputs of this pack's nodes that take any file below the server's folders. Their choices are
only some of the files."""


_UNKNOWN_VERSION = "(a version that does not report itself)"


class NotComfyUIError(ForeignResponseError):
    """The address does not belong to a ComfyUI server."""


class OversizedResponseError(NoSuchFileError, ForeignResponseError):
    """A response is larger than the limit."""


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """Server description."""

    url: str
    comfyui: str
    """ComfyUI's version."""
    wanstream: str | None
    """This pack's version; None without it."""
    instance: str | None
    """Id of the server's process; None if the pack is missing or older than the route."""
    sockets: Sockets


class ServerBackend(BatchBackend):
    """Backend on a server.

    One workflow runs while another one waits, so the server is never idle. Every method raises
    UnreachableError without a complete response.
    """

    window = 2

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        """Create a backend without sending anything.

        Raises NotComfyUIError for an invalid address.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            host = parts.hostname
            # `urlsplit` does not check the port: only the property raises ValueError.
            _ = parts.port
        except ValueError as err:
            raise NotComfyUIError(f"--server {url}: {err}") from err
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise NotComfyUIError(f"--server {url}: write an address like http://127.0.0.1:8188")
        self.url = url.rstrip("/")
        self.name = _normalised(parts)
        # Both names are one address in the journal.
        self.address = re.sub("//localhost(?=[:/]|$)", "//127.0.0.1", self.name)
        self._status_s = min(STATUS_SECONDS, timeout_s)
        try:
            self._client = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(timeout_s, connect=self._status_s),
                # The system's certificates instead of httpx's own list.
                verify=ssl.create_default_context(),
                # A restart of the server closes kept connections, and the next request would be
                # lost.
                limits=httpx.Limits(max_keepalive_connections=0),
                # Otherwise httpx also offers br and zstd if packages for them are installed.
                headers={"Accept-Encoding": "gzip, deflate"},
                # Not from the environment: `_proxy` chooses one, see there.
                trust_env=False,
                proxy=None if is_loopback(host) else _proxy(parts),
            )
        # A proxy with an unknown scheme, or one that needs another package.
        except (ValueError, ImportError, httpx.InvalidURL) as err:
            raise NotComfyUIError(f"--server {url}: {err}") from err
        self._info: Mapping[str, Mapping[str, Any]] = {}
        self.sockets: Sockets = {}
        self._whole: set[str] = set()
        self._uploaded: set[str] = set()
        self.faults_of_server: Callable[[ServerReport], Sequence[str]] = lambda report: ()
        """Returns the reasons why the server cannot run the batch; used by `check`."""

    def version(self) -> str:
        """Return ComfyUI's version. Raises NotComfyUIError for any other server."""
        status, answer = self._ask("/system_stats")
        if codes.is_server_error(status):
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status in _MOVED:
            raise NotComfyUIError(
                f"{self.url} redirects to another address (status {status}): give that address"
            )
        system = (answer or {}).get("system")
        if status != codes.OK or not isinstance(system, dict):
            raise NotComfyUIError(
                f"{self.url} answers, but not as a ComfyUI server does (status {status})"
            )
        return str(system.get("comfyui_version", "unknown"))

    def read_nodes(self) -> None:
        """Read the server's description of every node class."""
        self._info = self._accepted("/object_info")
        with self._shape("/object_info"):
            self.sockets = described_sockets(self._info)

    def describe(self) -> ServerReport:
        """Return the server's versions and nodes.

        Raises NotComfyUIError for any other server.
        """
        version = self.version()
        self.read_nodes()
        status, about = self._ask("/wanstream/about")
        # Not the same as a missing route: then the server would count as unsuitable for good.
        if codes.is_server_error(status):
            raise UnreachableError(f"{self.url} answers with status {status}")
        known = about or {}
        has_pack = not backend.own_nodes().keys().isdisjoint(self.sockets)
        return ServerReport(
            url=self.url,
            comfyui=version,
            wanstream=str(known.get("version", _UNKNOWN_VERSION)) if has_pack else None,
            instance=str(known["instance"]) if "instance" in known else None,
            sockets=self.sockets,
        )

    def check(self) -> None:
        faults = self.faults_of_server(self.describe())
        if faults:
            raise UnsuitableError("\n".join(faults))

    def connect(self, workflow: Prompt) -> None:
        """Prepare for a workflow.

        Raises ValueError without a ComfyUI server, or if it lacks a node in the workflow.
        """
        try:
            version = self.version()
            self.read_nodes()
        except UnreachableError as err:
            raise SetupError(f"--server {self.url}: {err}; is ComfyUI running there?") from err
        backend.check_classes(
            workflow, self._info, f"the workflow cannot run on {self.url} (ComfyUI {version}):"
        )

    def faults(self, prompt: Prompt) -> list[str]:
        return faults_elsewhere(prompt, self._info, backend.own_nodes(), ANY_FILE)

    def unchecked(self, prompt: Prompt) -> str:
        others = sorted(
            {node["class_type"] for node in prompt.values()} - backend.own_nodes().keys()
        )
        if not others:
            return ""
        return (
            f"only types, ranges and choices of {', '.join(others)} were checked: a node's own "
            "checks run only on the server"
        )

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        """Upload the latent into the server's output folder, once.

        An earlier run may have left a copy there. ComfyUI truncates a file before it writes it,
        while another workflow may be reading it.
        """
        if name in self._uploaded:
            return
        subfolder, _, filename = name.rpartition("/")
        about = {"type": "output", "subfolder": subfolder, "overwrite": "true"}
        with latent.open("rb") as content:
            sent = {
                "data": about,
                "files": {"image": (filename, content, "application/octet-stream")},
            }
            # This route is for images, but ComfyUI stores any content, such as a latent.
            with self._answer("POST", "/upload/image", **sent) as answer:
                status = answer.status_code
        if status == codes.REQUEST_ENTITY_TOO_LARGE:
            size = format_size(latent.stat().st_size)
            raise RefusedError(
                f"{self.url} refuses {latent.name} ({size}) as too large: start it with a higher "
                "--max-upload-size"
            )
        if codes.is_server_error(status):
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status != codes.OK:
            raise NotComfyUIError(f"{self.url} does not accept files (status {status})")
        self._uploaded.add(name)

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow, and cancel it if the server drops some outputs as invalid."""
        # Without a client_id, the history in ComfyUI 0.18 omits outputs cached from an earlier job.
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": prompt_id}
        status, answer = self._ask("/prompt", body)
        if codes.is_server_error(status):
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status not in {codes.OK, codes.BAD_REQUEST, codes.REQUEST_ENTITY_TOO_LARGE}:
            raise NotComfyUIError(f"{self.url} does not accept workflows (status {status})")
        if status == codes.OK and answer is None:
            raise UnreachableError(f"the response of {self.url} to a workflow is incomplete")
        response = answer or {}
        if status == codes.OK:
            if response.get("prompt_id") != prompt_id:
                # The server has queued the workflow under another id.
                self.withdraw(str(response.get("prompt_id")))
                raise NotComfyUIError(
                    f"{self.url} ignores prompt ids: a batch needs ComfyUI 0.3.64 or later"
                )
            if not response.get("node_errors"):
                self._whole.add(prompt_id)
                return
            self.withdraw(prompt_id)
            self.interrupt(prompt_id)
        with self._shape("/prompt"):
            faults = refusal_text(response)
        raise RefusedError(faults or f"the server refuses it with status {status}")

    def outcome(self, prompt_id: str) -> backend.Outcome:
        # The queue before the history: a workflow that finishes between the two requests is found
        # in the history.
        queue = self._accepted("/queue")
        with self._shape("/queue"):
            for items, begun in ((queue["queue_running"], True), (queue["queue_pending"], False)):
                if any(item[1] == prompt_id for item in items):
                    return backend.UnderWay(begun=begun)
        entry = self._accepted(f"/history/{prompt_id}").get(prompt_id)
        with self._shape("/history"):
            if entry is None:
                return backend.Unknown()
            return self._outcome(prompt_id, entry)

    def fetch(self, file: backend.MadeFile, part: Path) -> None:
        filename = file.filename
        query = {"filename": filename, "subfolder": file.subfolder, "type": "output"}
        with self._answer("GET", "/view", params=query, timeout=self._status_s) as answer:
            status = answer.status_code
            if status in _NEVER:
                raise NoSuchFileError(
                    f"the server saved '{filename}' but does not return it (status {status}): if "
                    "the file was removed, restart the server, which otherwise returns cached "
                    "results for the same workflow"
                )
            if status != codes.OK:
                raise UnreachableError(
                    f"{self.url} does not send '{filename}' now (status {status})"
                )
            # A new file: an existing one could be a link.
            part.unlink(missing_ok=True)
            with part.open("xb") as written:
                for piece in self._pieces(answer, MAX_FILE_BYTES):
                    written.write(piece)

    def withdraw(self, prompt_id: str) -> None:
        self._accepted("/queue", {"delete": [prompt_id]})

    def interrupt(self, prompt_id: str) -> None:
        self._accepted("/interrupt", {"prompt_id": prompt_id})

    def release(self, prompt_id: str) -> None:
        self._whole.discard(prompt_id)

    def _outcome(self, prompt_id: str, entry: Mapping[str, Any]) -> backend.Outcome:
        """Return a workflow's outcome from the history entry."""
        messages = dict(message[:2] for message in entry["status"]["messages"])
        if "execution_interrupted" in messages:
            return backend.Interrupted()
        if entry["status"]["status_str"] != "success":
            return backend.JobFailed(reason=_failure(messages.get("execution_error", {})))
        # A queue item is number, id, prompt, extra data, and ids of the outputs to execute.
        prompt = entry["prompt"][2]
        executed = set(entry["prompt"][4])
        wanted = {
            node
            for node in prompt
            if self._info.get(prompt[node]["class_type"], {}).get("output_node")
        }
        # If the post's response was lost, the server may have dropped outputs.
        if prompt_id not in self._whole and executed != wanted:
            return backend.Unknown()
        return backend.Ended(files=backend.output_files(entry["outputs"]))

    @contextmanager
    def _shape(self, route: str) -> Iterator[None]:
        """Translate errors in reading a JSON response into UnreachableError.

        A proxy, for example, may answer in another format.
        """
        try:
            yield
        except (LookupError, AttributeError, TypeError, ValueError) as err:
            raise UnreachableError(
                f"{self.url}{route} answers, but not as ComfyUI does: {err!r}"
            ) from err

    def _accepted(self, route: str, body: object = None) -> Any:
        """Return the JSON object in a response, or nothing if `body` is a command.

        Only status 200 means that a command was executed.
        """
        status, answer = self._ask(route, body)
        if status != codes.OK or (body is None and answer is None):
            raise UnreachableError(f"{self.url}{route} answers with status {status}")
        return answer

    def _ask(self, route: str, body: object = None) -> tuple[int, dict[str, Any] | None]:
        """Return a response's status and JSON object, or None for anything else."""
        # Not `json=body`: it refuses NaN, and ComfyUI accepts it.
        method = "GET"
        sent: dict[str, Any] = {}
        if body is not None:
            method = "POST"
            sent = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        if route not in _SLOW:
            sent["timeout"] = self._status_s
        with self._answer(method, route, **sent) as answer:
            content = b"".join(self._pieces(answer, MAX_BODY_BYTES))
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        return answer.status_code, found if isinstance(found, dict) else None

    def _pieces(self, answer: httpx.Response, most: int) -> Iterator[bytes]:
        """Return a decompressed body in pieces.

        Raises OversizedResponseError for more than `most` bytes.
        """
        total = 0
        for piece in answer.iter_bytes(_PIECE):
            total += len(piece)
            if total > most:
                raise OversizedResponseError(
                    f"{self.url} sends more than {format_size(most)} for "
                    f"{answer.request.url.path}, the limit here"
                )
            yield piece

    @contextmanager
    def _answer(self, method: str, route: str, **sent: Any) -> Iterator[httpx.Response]:
        """Yield a response. The body may be read inside the `with`."""
        try:
            with self._client.stream(method, route, **sent) as answer:
                if answer.status_code in _GATEWAY_ERRORS:
                    raise UnreachableError(f"{self.url} answers with status {answer.status_code}")
                encoding = answer.headers.get("Content-Encoding", "").strip().lower()
                if encoding not in _ENCODINGS:
                    raise ForeignResponseError(
                        f"{self.url} answers in the encoding {encoding:.40}: give its own address"
                    )
                yield answer
        except httpx.HTTPError as err:
            # Without the "[Errno 104]" or "[SSL: ...]" in front, and the OpenSSL line number
            # behind.
            reason = re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", str(err))
            raise UnreachableError(f"no complete answer from {self.url}{route}: {reason}") from err


def _normalised(parts: urllib.parse.SplitResult) -> str:
    """Return an address in a form that is equal for equal addresses."""
    # `hostname` is in lower case, and lacks the brackets of an IPv6 address.
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = ""
    if parts.port not in {None, {"http": 80, "https": 443}[parts.scheme]}:
        port = f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def _proxy(address: urllib.parse.SplitResult) -> str | None:
    """Return the system's proxy for a server.

    httpx itself would use ALL_PROXY, even for hosts in NO_PROXY.
    """
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy is None or urllib.request.proxy_bypass(address.netloc):
        return None
    if "://" in proxy:
        return proxy
    return f"http://{proxy}"


def _failure(error: Mapping[str, Any]) -> str:
    message = str(error.get("exception_message", "the server returned no reason")).strip()
    if "node_id" not in error:
        return message
    return f"node {error['node_id']} ({error.get('node_type')}): {message}"
