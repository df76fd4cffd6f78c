"""ComfyUI server as a batch backend: the parts of its HTTP API that a batch uses, and its `/object_info`.

Nothing is retried here. Own checks of nodes run only on the server, except those of this pack's classes, which can run
here. The faults found here are a subset of the server's: a value that an own check might accept is not refused here.
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
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import httpx
import torch

from ...host.embedded import EmbeddedHost, Folders, NodeRules, Prompt, Verdict, sockets_of, validate_nodes
from ...schema import format_size, is_loopback
from ..arguments import ArgumentError
from ..inputs import Sockets
from .backend import (
    BatchBackend,
    Ended,
    ForeignResponseError,
    Interrupted,
    JobFailed,
    MadeFile,
    NoSuchFileError,
    Outcome,
    RefusedError,
    UnderWay,
    Unknown,
    UnreachableError,
    UnsuitableError,
    check_classes,
    output_files,
    own_nodes,
)

ObjectInfo: TypeAlias = Mapping[str, Mapping[str, Any]]
"""A server's description of every node class."""

TIMEOUT_SECONDS = 60.0
"""Seconds without a byte in either direction after which an upload, a workflow or the list of nodes counts as lost."""
STATUS_SECONDS = 10.0
"""The same for a connection, the state of a server and a file, however long the whole file takes. ComfyUI answers in
milliseconds, or after some seconds while it loads a model; one that needs longer hangs, and counts as gone."""
_SLOW = ("/object_info", "/prompt")
"""Routes that read folders or run checks of nodes before the answer: a long wait for one is not a server that hangs."""
_GATEWAY_ERRORS = (502, 503, 504)
_OK, _BAD_REQUEST, _NOT_FOUND, _TOO_LARGE, _BROKEN = 200, 400, 404, 413, 500
_NEVER = (400, 403, _NOT_FOUND, 410)
"""Permanent error codes of `/view`, for which a retry is useless."""
_MOVED = (301, 302, 303, 307, 308)
_PIECE = 1 << 20
MAX_BODY_BYTES = 256 << 20
"""Size limit for a JSON response after decompression. A queue has all users' graphs, a few 100 KB each."""
MAX_FILE_BYTES = 8 << 30
"""Size limit for a file from a server, which could otherwise fill the disk."""
_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Accepted content encodings. Nested ones can expand a small body without a limit."""
ANY_FILE = {"WanStreamContinueVideo": "previous_file", "WanStreamLoadLatent": "file"}
"""Inputs of this pack's nodes that take any file below the server's folders, of which their choices are some."""


_UNKNOWN_VERSION = "(a version that does not report itself)"


class NotComfyUIError(ForeignResponseError):
    """The address is not that of a ComfyUI server."""


class OversizedResponseError(NoSuchFileError, ForeignResponseError):
    """A response is larger than the limit."""


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """Description of a server."""

    url: str
    comfyui: str
    """Version of ComfyUI."""
    wanstream: str | None
    """Version of this pack; None without it."""
    instance: str | None
    """Id of the process; None if the pack is missing or older than the route."""
    sockets: Sockets


class ServerBackend(BatchBackend):
    """Backend on a server. One workflow runs while another one waits, so that the server is never idle.

    Every method raises UnreachableError if there is no complete response.
    """

    window = 2

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        """Create a backend without sending anything. Raises NotComfyUIError for an invalid address."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as err:
            raise NotComfyUIError(f"--server {url}: {err}") from err
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise NotComfyUIError(f"--server {url}: write an address like http://127.0.0.1:8188")
        self.url = url.rstrip("/")
        self.name = _normalised(parts)
        self.address = re.sub("//localhost(?=[:/]|$)", "//127.0.0.1", self.name)
        self._status_s = min(STATUS_SECONDS, timeout_s)
        try:
            self._client = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(timeout_s, connect=self._status_s),
                verify=ssl.create_default_context(),
                # A connection that is kept is lost in a restart of the server, and the next request with it.
                limits=httpx.Limits(max_keepalive_connections=0),
                headers={"Accept-Encoding": "gzip, deflate"},
                trust_env=False,
                proxy=None if is_loopback(host) else _proxy(parts),
            )
        except (
            ValueError,
            ImportError,
            httpx.InvalidURL,
        ) as err:  # a proxy with an unknown scheme, or one that needs another package
            raise NotComfyUIError(f"--server {url}: {err}") from err
        self._info: ObjectInfo = {}
        self.sockets: Sockets = {}
        self._whole: set[str] = set()
        self._uploaded: set[str] = set()
        self.faults_of_server: Callable[[ServerReport], Sequence[str]] = lambda report: ()
        """Returns the reasons why the server cannot run the batch; used by `check`."""

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

    def read_nodes(self) -> None:
        """Read the server's description of every node class."""
        self._info = self._accepted("/object_info")
        with self._shape("/object_info"):
            self.sockets = {name: sockets_of(node.get("input") or {}) for name, node in self._info.items()}

    def describe(self) -> ServerReport:
        """Return the versions and nodes of the server. Raises NotComfyUIError for any other server."""
        version = self.version()
        self.read_nodes()
        status, about = self._ask("/wanstream/about")
        if status >= _BROKEN:  # not the same as no such route: the server counts as unsuitable for good then
            raise UnreachableError(f"{self.url} answers with status {status}")
        known = about if isinstance(about, dict) else {}
        has_pack = not own_nodes().keys().isdisjoint(self.sockets)
        return ServerReport(
            url=self.url,
            comfyui=version,
            wanstream=str(known.get("version", _UNKNOWN_VERSION)) if has_pack else None,
            instance=str(known["instance"]) if "instance" in known else None,
            sockets=self.sockets,
        )

    def check(self) -> None:
        if faults := self.faults_of_server(self.describe()):
            raise UnsuitableError("\n".join(faults))

    def connect(self, workflow: Prompt) -> None:
        """Prepare for a workflow. Raises ValueError without a ComfyUI server, or if it lacks a node of the workflow."""
        try:
            version = self.version()
            self.read_nodes()
        except UnreachableError as err:
            raise ArgumentError(f"--server {self.url}: {err}; is ComfyUI running there?") from err
        check_classes(workflow, self._info, f"the workflow cannot run on {self.url} (ComfyUI {version}):")

    def faults(self, prompt: Prompt) -> list[str]:
        # Checks of output names need a folder: the server's is not accessible, so an empty one replaces it. The
        # server's GPUs are not known either; the device is a CPU, for which no check limits the number of workers.
        with TemporaryDirectory() as temporary:
            empty = Path(temporary).resolve()
            folders = Folders(models=empty, output=empty, input=empty)
            with EmbeddedHost().opened(folders, device=torch.device("cpu")):
                rules = {name: self._rules(name) for name in {node["class_type"] for node in prompt.values()}}
                if not any(each.is_output for each in rules.values()):
                    return ["the workflow has no node that saves or shows anything"]
                lines = validate_nodes(prompt, rules).lines()
            return [line.replace(str(empty), "output") for line in lines]

    def unchecked(self, prompt: Prompt) -> str:
        others = sorted({node["class_type"] for node in prompt.values()} - own_nodes().keys())
        if not others:
            return ""
        return (
            f"only types, ranges and choices of {', '.join(others)} were checked: a node's own checks run only on the "
            "server"
        )

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        """Upload the latent into the server's output folder, once: an earlier run may have left another copy there.

        ComfyUI truncates a file before it writes it, and another workflow may be reading it.
        """
        if name in self._uploaded:
            return
        subfolder, _, filename = name.rpartition("/")
        about = {"type": "output", "subfolder": subfolder, "overwrite": "true"}
        with latent.open("rb") as content:
            sent = {"data": about, "files": {"image": (filename, content, "application/octet-stream")}}
            with self._answer("POST", "/upload/image", **sent) as answer:
                status = answer.status_code
        if status == _TOO_LARGE:
            size = format_size(latent.stat().st_size)
            raise RefusedError(
                f"{self.url} refuses {latent.name} ({size}) as too large: start it with a higher --max-upload-size"
            )
        if status >= _BROKEN:
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status != _OK:
            raise NotComfyUIError(f"{self.url} does not accept files (status {status})")
        self._uploaded.add(name)

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow, and cancel it if the server drops some of its outputs as invalid."""
        # Without a client_id, ComfyUI 0.18 omits outputs that it has cached from an earlier job from the history.
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": prompt_id}
        status, answer = self._ask("/prompt", body)
        if status >= _BROKEN:
            raise UnreachableError(f"{self.url} answers with status {status}")
        if status not in {_OK, _BAD_REQUEST, _TOO_LARGE}:
            raise NotComfyUIError(f"{self.url} does not accept workflows (status {status})")
        if status == _OK and not isinstance(answer, dict):
            raise UnreachableError(f"the response of {self.url} to a workflow is incomplete")
        response = answer if isinstance(answer, dict) else {}
        if status == _OK and response.get("prompt_id") != prompt_id:
            self.withdraw(str(response.get("prompt_id")))
            raise NotComfyUIError(f"{self.url} ignores prompt ids: a batch needs ComfyUI 0.3.64 or later")
        if status == _OK and not response.get("node_errors"):
            self._whole.add(prompt_id)
            return
        if status == _OK:
            self.withdraw(prompt_id)
            self.interrupt(prompt_id)
        with self._shape("/prompt"):
            faults = _describe_faults(response)
        raise RefusedError(faults or f"the server refuses it with status {status}")

    def outcome(self, prompt_id: str) -> Outcome:
        # The queue before the history: a workflow that finishes between the two requests is found in the history.
        queue = self._accepted("/queue")
        with self._shape("/queue"):
            for items, begun in ((queue["queue_running"], True), (queue["queue_pending"], False)):
                if any(item[1] == prompt_id for item in items):
                    return UnderWay(begun=begun)
        entry = self._accepted(f"/history/{prompt_id}").get(prompt_id)
        with self._shape("/history"):
            return Unknown() if entry is None else self._outcome(prompt_id, entry)

    def fetch(self, file: MadeFile, part: Path) -> None:
        filename = file.filename
        query = {"filename": filename, "subfolder": file.subfolder, "type": "output"}
        with self._answer("GET", "/view", params=query, timeout=self._status_s) as answer:
            status = answer.status_code
            if status in _NEVER:
                raise NoSuchFileError(
                    f"the server saved '{filename}' but does not return it (status {status}): if the file was removed, "
                    "restart the server, which otherwise returns cached results for the same workflow"
                )
            if status != _OK:
                raise UnreachableError(f"{self.url} does not send '{filename}' now (status {status})")
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

    def _rules(self, class_type: str) -> NodeRules:
        info, sockets, own = self._info[class_type], self.sockets[class_type], own_nodes().get(class_type)
        here = sockets_of(own.INPUT_TYPES()) if own is not None else {}
        return NodeRules(
            sockets=sockets,
            outputs=["COMBO" if isinstance(kind, list) else str(kind) for kind in info.get("output") or ()],
            is_output=bool(info.get("output_node")),
            own=own,
            elsewhere=frozenset(
                name
                for name in here.keys() & sockets.keys()
                if sockets[name].options.get("options") != here[name].options.get("options")
            ),
            unchecked=frozenset({ANY_FILE[class_type]} if class_type in ANY_FILE else ()),
            others_refused=False,
        )

    def _outcome(self, prompt_id: str, entry: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a workflow by its entry in the history."""
        messages = dict(message[:2] for message in entry["status"]["messages"])
        if "execution_interrupted" in messages:
            return Interrupted()
        if entry["status"]["status_str"] != "success":
            return JobFailed(reason=_failure(messages.get("execution_error", {})))
        prompt, executed = entry["prompt"][2], set(entry["prompt"][4])
        wanted = {node for node in prompt if self._info.get(prompt[node]["class_type"], {}).get("output_node")}
        # If the response to the post was lost, the server may have dropped outputs.
        if prompt_id not in self._whole and executed != wanted:
            return Unknown()
        return Ended(files=output_files(entry["outputs"]))

    @contextmanager
    def _shape(self, route: str) -> Iterator[None]:
        """Translate errors of reading a JSON response into UnreachableError: its format is that of a proxy, say."""
        try:
            yield
        except (LookupError, AttributeError, TypeError, ValueError) as err:
            raise UnreachableError(f"{self.url}{route} answers, but not as ComfyUI does: {err!r}") from err

    def _accepted(self, route: str, body: object = None) -> Any:
        """Return the JSON response: an object, unless `body` is a command, which is executed only with status 200."""
        status, answer = self._ask(route, body)
        if status != _OK or (body is None and not isinstance(answer, dict)):
            raise UnreachableError(f"{self.url}{route} answers with status {status}")
        return answer

    def _ask(self, route: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the JSON response; None if it is not JSON."""
        # Not `json=body`, which refuses NaN; ComfyUI accepts it.
        sent: dict[str, Any] = {}
        if body is not None:
            sent = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        method = "POST" if sent else "GET"
        if route not in _SLOW:
            sent["timeout"] = self._status_s
        with self._answer(method, route, **sent) as answer:
            content = b"".join(self._pieces(answer, MAX_BODY_BYTES))
        try:
            return answer.status_code, json.loads(content)
        except (ValueError, RecursionError):
            return answer.status_code, None

    def _pieces(self, answer: httpx.Response, most: int) -> Iterator[bytes]:
        """Return the pieces of a decompressed body. Raises OversizedResponseError for more than `most` bytes."""
        total = 0
        for piece in answer.iter_bytes(_PIECE):
            total += len(piece)
            if total > most:
                raise OversizedResponseError(
                    f"{self.url} sends more than {format_size(most)} for {answer.request.url.path}, the limit here"
                )
            yield piece

    @contextmanager
    def _answer(self, method: str, route: str, **sent: Any) -> Iterator[httpx.Response]:
        """Yield a response, whose body may be read inside the `with`."""
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
            # Without the "[Errno 104]" or "[SSL: ...]" in front, and the line of OpenSSL's module behind.
            reason = re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", str(err))
            raise UnreachableError(f"no complete answer from {self.url}{route}: {reason}") from err


def _normalised(parts: urllib.parse.SplitResult) -> str:
    """Return an address in the form that is equal for equal addresses."""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = "" if parts.port in {None, {"http": 80, "https": 443}[parts.scheme]} else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def _proxy(address: urllib.parse.SplitResult) -> str | None:
    """Return the system's proxy for a server: httpx itself would use ALL_PROXY, even for the hosts of NO_PROXY."""
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy is None or urllib.request.proxy_bypass(address.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _describe_faults(answer: Mapping[str, Any]) -> str:
    """Return the faults of the nodes or, if there are none, that of the workflow."""
    error = answer.get("error")
    if error is not None and not isinstance(error, dict):
        return str(error)
    node_errors = answer.get("node_errors") or {}
    return "; ".join(Verdict(prompt={}, error=error, node_errors=node_errors).lines())


def _failure(error: Mapping[str, Any]) -> str:
    message = str(error.get("exception_message", "the server returned no reason")).strip()
    if "node_id" not in error:
        return message
    return f"node {error['node_id']} ({error.get('node_type')}): {message}"
