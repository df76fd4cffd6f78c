"""HTTP client against a server with canned responses that a real ComfyUI rarely gives."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.client import parse_headers
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.backend import (
    Ended,
    Interrupted,
    JobFailed,
    MadeFile,
    UnderWay,
    Unknown,
)
from wanstream.batch.errors import (
    ForeignResponseError,
    NoSuchFileError,
    RefusedError,
    UnreachableError,
)
from wanstream.batch.servers import server_backend
from wanstream.batch.servers.server_backend import NotComfyUIError, ServerBackend

Answer = tuple[int, Any] | None
"""Status and body (JSON, or bytes as they are); None closes the connection without a response."""


class Canned:
    """Canned responses by route, and the received requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, Any]] = []
        self.promise: int | None = None
        self.encoding = ""
        self.url = ""


@pytest.fixture
def canned() -> Iterator[Canned]:
    state = Canned()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            # An upload comes in pieces, without a length.
            chunked = self.headers.get("Transfer-Encoding") == "chunked"
            sent = self._pieces() if chunked else self.rfile.read(length)
            form = self.headers.get("Content-Type", "").startswith("multipart/")
            body = sent if form else json.loads(sent) if sent else None
            route = self.path.partition("?")[0]
            state.asked.append((self.path, body))
            found = state.answers.get(route, (404, b"404: Not Found"))
            if found is None:
                return
            status, content = found
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            if state.encoding:
                self.send_header("Content-Encoding", state.encoding)
            self.send_header(
                "Content-Length", str(len(data) if state.promise is None else state.promise)
            )
            self.end_headers()
            self.wfile.write(data)

        def _pieces(self) -> bytes:
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


INFO = {"Save": {"output_node": True}, "Load": {}}
PROMPT = {"1": {"class_type": "Load"}, "2": {"class_type": "Save"}, "3": {"class_type": "Save"}}


def host_of(canned: Canned) -> ServerBackend:
    backend = ServerBackend(canned.url)
    canned.answers["/object_info"] = (200, INFO)
    backend.read_nodes()
    return backend


def made(filename: str, subfolder: str = "") -> MadeFile:
    return MadeFile(node_id="2", filename=filename, subfolder=subfolder)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_a_proxy_of_the_environment_has_no_part_in_calls_to_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.7:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    assert not any(ServerBackend(f"http://{host}:8188")._client._mounts.values())
    assert any(ServerBackend("http://192.0.2.8:8188")._client._mounts.values())


@pytest.mark.parametrize(
    ("settings", "proxied"),
    [
        ({}, False),
        ({"all_proxy": "socks5://127.0.0.1:1080"}, False),
        ({"http_proxy": "192.0.2.7:3128"}, True),
        ({"http_proxy": "http://192.0.2.7:3128", "no_proxy": "192.0.2.8,[::1],fe80::/10"}, False),
        ({"https_proxy": "http://192.0.2.7:3128", "no_proxy": "::1"}, False),
    ],
)
def test_the_proxy_of_a_server_is_the_systems(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], proxied: bool
) -> None:
    for name in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert any(ServerBackend("http://192.0.2.8:8188")._client._mounts.values()) == proxied


@pytest.mark.parametrize(
    "url",
    [
        *(
            "127.0.0.1:8188",
            "ftp://127.0.0.1",
            "http://",
            "http://x:port",
            "file:///etc/passwd",
            "http://x/?a=1",
            "",
        ),
        *("http://192.168.1.300:8188", "http://m\u00fcnchen-:8188"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(NotComfyUIError, match="--server"):
        ServerBackend(url)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        UnreachableError, match=f"no complete answer from http://127.0.0.1:{port}/.*: .*refused"
    ):
        ServerBackend(f"http://127.0.0.1:{port}").version()


@pytest.mark.parametrize(
    "answer", [(404, b"no"), (200, b"<html>"), (200, []), (200, {"system": 1}), (403, b"")]
)
def test_somebody_else_listens(canned: Canned, answer: Answer) -> None:
    canned.answers["/system_stats"] = answer
    with pytest.raises(NotComfyUIError, match="answers, but not as a ComfyUI server does"):
        ServerBackend(canned.url).version()


def test_an_address_may_have_a_path_and_a_slash(canned: Canned) -> None:
    canned.answers["/comfy/system_stats"] = (200, {"system": {"comfyui_version": "0.3.64"}})
    assert ServerBackend(f"{canned.url}/comfy/").version() == "0.3.64"


@pytest.mark.parametrize("answer", [None, (502, b"bad gateway"), (503, b""), (504, b"")])
def test_a_gateway_without_a_server_is_silence(canned: Canned, answer: Answer) -> None:
    canned.answers |= dict.fromkeys(("/system_stats", "/queue", "/prompt", "/view"), answer)
    client = ServerBackend(canned.url)
    for call in (client.version, lambda: client.outcome("x"), lambda: client.post("x", {})):
        with pytest.raises(UnreachableError):
            call()


def test_silence_after_a_while(canned: Canned) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ServerBackend(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(UnreachableError, match="timed out"):
            client.version()


def test_a_download_that_breaks_off_is_silence_and_not_a_file(
    canned: Canned, tmp_path: Path
) -> None:
    canned.answers |= dict.fromkeys(("/view", "/object_info"), (200, b"12345"))
    client = ServerBackend(canned.url)
    client.fetch(made("a b_.png", "sub/folder"), tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"12345"
    assert canned.asked[-1][0] == "/view?filename=a+b_.png&subfolder=sub%2Ffolder&type=output"
    canned.promise = 9
    with pytest.raises(UnreachableError, match=r"received 5 bytes, expected 9"):
        client.fetch(made("a.png"), tmp_path / "part")
    with pytest.raises(UnreachableError, match=r"received 5 bytes, expected 9"):
        client.read_nodes()


def test_a_file_that_the_server_does_not_give(canned: Canned, tmp_path: Path) -> None:
    with pytest.raises(
        NoSuchFileError, match=r"saved 'a\.png' but does not return it \(status 404\)"
    ):
        ServerBackend(canned.url).fetch(made("a.png"), tmp_path / "part")
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("status", [500, 501, 408, 429, 301])
def test_a_file_that_the_server_cannot_send_now_is_asked_for_again(
    canned: Canned, tmp_path: Path, status: int
) -> None:
    canned.answers["/view"] = (status, b"Internal Server Error")
    with pytest.raises(UnreachableError, match=f"a.png.*status {status}"):
        ServerBackend(canned.url).fetch(made("a.png"), tmp_path / "part")
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_file_that_the_server_refuses_costs_its_row(
    canned: Canned, tmp_path: Path, status: int
) -> None:
    canned.answers["/view"] = (status, b"")
    with pytest.raises(NoSuchFileError, match=f"status {status}"):
        ServerBackend(canned.url).fetch(made("a.png"), tmp_path / "part")


@pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
def test_a_body_without_an_end_is_refused(
    canned: Canned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(server_backend, "MAX_BODY_BYTES", 100_000)
    monkeypatch.setattr(server_backend, "MAX_FILE_BYTES", 100_000)
    pack = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    canned.encoding = encoding
    for size, fits in ((100_000, True), (100_001, False)):
        text = b'{"a": "' + b"x" * (size - 9) + b'"}'
        canned.answers |= {"/view": (200, pack(text)), "/queue": (200, pack(text))}
        client = ServerBackend(canned.url)
        if fits:
            client.fetch(made("a.png"), tmp_path / "part")
            assert (tmp_path / "part").read_bytes() == text
            client.withdraw("id")
            continue
        with pytest.raises(NoSuchFileError, match=r"sends more than .* for /view"):
            client.fetch(made("a.png"), tmp_path / "part")
        with pytest.raises(ForeignResponseError, match=r"sends more than .* for /queue"):
            client.withdraw("id")


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd", "gzip,deflate"])
def test_encodings_that_expand_without_a_limit_are_refused(canned: Canned, encoding: str) -> None:
    canned.encoding = encoding
    canned.answers["/queue"] = (200, gzip.compress(gzip.compress(b"{}")))
    with pytest.raises(ForeignResponseError, match="in the encoding"):
        ServerBackend(canned.url).withdraw("id")


def test_a_download_replaces_a_link_and_does_not_follow_it(canned: Canned, tmp_path: Path) -> None:
    canned.answers["/view"] = (200, b"12345")
    (tmp_path / "victim").write_text("of somebody else")
    (tmp_path / "part").symlink_to(tmp_path / "victim")
    ServerBackend(canned.url).fetch(made("a.png"), tmp_path / "part")
    assert (tmp_path / "victim").read_text() == "of somebody else"
    assert (tmp_path / "part").read_bytes() == b"12345"


def test_a_queue_that_answers_with_an_error_has_not_taken_a_row_out(canned: Canned) -> None:
    """A row taken back while the server still runs it would be computed twice."""
    canned.answers |= {"/queue": (500, b""), "/interrupt": (500, b"")}
    client = ServerBackend(canned.url)
    for call in (client.withdraw, client.interrupt):
        with pytest.raises(UnreachableError, match="status 500"):
            call("id")


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_that_is_in_trouble_is_not_taken_for_another_program(
    canned: Canned, status: int
) -> None:
    canned.answers["/system_stats"] = (status, b"oops")
    with pytest.raises(UnreachableError, match=f"status {status}"):
        ServerBackend(canned.url).version()


def test_half_an_answer_to_a_post_is_asked_about_again(canned: Canned) -> None:
    canned.answers |= {"/prompt": (200, b'{"prompt_id": "id", "numb'), "/queue": (200, b"")}
    with pytest.raises(UnreachableError, match="incomplete"):
        host_of(canned).post("id", PROMPT)


@pytest.mark.parametrize(
    "answer", [{}, {"queue_running": [], "queue_pending": [3]}, {"queue_running": None}]
)
def test_an_answer_of_another_shape_is_no_answer(canned: Canned, answer: object) -> None:
    canned.answers |= {"/queue": (200, answer), "/history/x": (200, {"x": {"status": 1}})}
    with pytest.raises(UnreachableError, match="not as ComfyUI does"):
        ServerBackend(canned.url).outcome("x")


def test_a_file_that_cannot_be_written_is_no_silence(canned: Canned, tmp_path: Path) -> None:
    canned.answers["/view"] = (200, b"12345")
    with pytest.raises(OSError, match="No such file") as refused:
        ServerBackend(canned.url).fetch(made("a.png"), tmp_path / "none" / "part")
    assert not isinstance(refused.value, UnreachableError)


def test_a_post_in_all_its_ways(canned: Canned) -> None:
    host = host_of(canned)

    def post(answer: Answer) -> None:
        canned.answers |= {"/prompt": answer, "/queue": (200, b""), "/interrupt": (200, b"")}
        canned.asked.clear()
        host.post("id", PROMPT)

    post((200, {"prompt_id": "id", "number": 1, "node_errors": {}}))
    assert canned.asked == [("/prompt", {"prompt": PROMPT, "prompt_id": "id", "client_id": "id"})]
    faults = {
        "2": {
            "class_type": "Save",
            "errors": [{"type": "t", "message": "Too big", "details": "fps"}],
        }
    }
    with pytest.raises(RefusedError, match=r"node 2 \(Save\): Too big: fps"):
        post((200, {"prompt_id": "id", "number": 1, "node_errors": faults}))
    # The remaining outputs must not run.
    assert canned.asked[1:] == [("/queue", {"delete": ["id"]}), ("/interrupt", {"prompt_id": "id"})]
    with pytest.raises(RefusedError, match="No outputs: none"):
        post(
            (
                400,
                {
                    "error": {"type": "t", "message": "No outputs", "details": "none"},
                    "node_errors": {},
                },
            )
        )
    with pytest.raises(RefusedError, match="busy"):
        post((400, {"error": "busy"}))
    with pytest.raises(RefusedError, match="status 413"):
        post((413, b"too large"))
    with pytest.raises(UnreachableError, match="status 500"):
        post((500, b"oops"))
    with pytest.raises(NotComfyUIError, match=r"does not accept workflows \(status 403"):
        post((403, b""))
    with pytest.raises(NotComfyUIError, match=r"ComfyUI 0\.3\.64 or later"):
        post((200, {"prompt_id": "another", "node_errors": {}}))
    assert ("/queue", {"delete": ["another"]}) in canned.asked


def history(
    outputs: dict[str, Any], *, executed: list[str], status: str = "success"
) -> dict[str, Any]:
    messages: list[Any] = [["execution_start", {}]]
    if status in {"error", "interrupted"}:
        error = {"node_id": "2", "node_type": "Save", "exception_message": "disk full\n"}
        messages.append(
            ["execution_error" if status == "error" else "execution_interrupted", error]
        )
    entry = {
        "prompt": [1, "id", PROMPT, {}, executed],
        "outputs": outputs,
        "status": {
            "status_str": "success" if status == "success" else "error",
            "messages": messages,
        },
    }
    return {"id": entry}


IDLE: dict[str, Any] = {"queue_running": [], "queue_pending": []}
SAVED = {
    "3": {
        "images": [{"filename": "b.png", "subfolder": "x", "type": "output"}],
        "animated": [True],
    },
    "2": {
        "gifs": [{"filename": "a.mp4", "type": "output"}, {"filename": "p.png", "type": "temp"}],
        "text": ["hello"],
    },
}


def test_a_server_is_asked_for_its_queue_and_history(canned: Canned) -> None:
    host = host_of(canned)
    item = [1, "id", PROMPT, {}, ["2", "3"]]
    canned.answers |= {"/queue": (200, IDLE), "/history/id": (200, {})}
    assert host.outcome("id") == Unknown()
    canned.answers["/queue"] = (200, {**IDLE, "queue_pending": [item]})
    assert host.outcome("id") == UnderWay(begun=False)
    canned.answers["/queue"] = (200, {**IDLE, "queue_running": [item]})
    assert host.outcome("id") == UnderWay(begun=True)
    canned.answers["/queue"] = (200, IDLE)
    for status, outcome in [
        ("error", JobFailed(reason="node 2 (Save): disk full")),
        ("unexplained", JobFailed(reason="the server returned no reason")),
        ("interrupted", Interrupted()),
    ]:
        canned.answers["/history/id"] = (200, history({}, executed=["2", "3"], status=status))
        assert host.outcome("id") == outcome
    canned.answers["/history/id"] = (200, history(SAVED, executed=["2", "3"]))
    ended = host.outcome("id")
    assert isinstance(ended, Ended)
    assert [(file.node_id, file.subfolder, file.filename) for file in ended.files] == [
        ("2", "", "a.mp4"),
        ("3", "x", "b.png"),
    ]


def test_a_workflow_whose_post_was_not_answered_counts_only_if_nothing_of_it_was_dropped(
    canned: Canned,
) -> None:
    """A client killed during a post has not received `node_errors`."""
    canned.answers["/queue"] = (200, IDLE)
    canned.answers["/history/id"] = (200, history(SAVED, executed=["2"]))
    assert host_of(canned).outcome("id") == Unknown()
    heard = host_of(canned)
    canned.answers["/prompt"] = (200, {"prompt_id": "id", "node_errors": {}})
    heard.post("id", PROMPT)
    assert isinstance(heard.outcome("id"), Ended)


@pytest.mark.parametrize(
    "call", [lambda client: client.outcome("x"), lambda client: client.read_nodes()]
)
def test_an_answer_that_is_none_is_silence(
    canned: Canned, call: Callable[[ServerBackend], Any]
) -> None:
    canned.answers |= {"/queue": (500, b""), "/object_info": (200, b"<html>")}
    with pytest.raises(UnreachableError):
        call(ServerBackend(canned.url))


@pytest.mark.parametrize("status", [301, 307])
def test_an_address_that_sends_elsewhere_is_told(canned: Canned, status: int) -> None:
    """A redirected POST would arrive as a GET, or twice."""
    canned.answers["/system_stats"] = (status, b"")
    canned.answers["/elsewhere"] = (200, {"system": {"comfyui_version": "1"}})
    with pytest.raises(NotComfyUIError, match=rf"redirects to another address \(status {status}\)"):
        ServerBackend(canned.url).version()
    canned.answers["/prompt"] = (status, b"")
    with pytest.raises(NotComfyUIError, match="does not accept workflows"):
        host_of(canned).post("id", PROMPT)


def test_an_address_that_is_none_is_told_with_the_option() -> None:
    with pytest.raises(NotComfyUIError, match=r"--server http://\[::1: "):
        ServerBackend("http://[::1")


def test_what_others_show_under_names_that_are_none_is_no_crash(canned: Canned) -> None:
    odd = {"1": {"images": [{"filename": ["a.png"], "subfolder": 7, "type": "output"}]}}
    canned.answers["/prompt"] = (200, {"prompt_id": "id", "node_errors": {}})
    canned.answers |= {
        "/queue": (200, IDLE),
        "/history/id": (200, history(odd, executed=["2", "3"])),
    }
    host = host_of(canned)
    host.post("id", PROMPT)
    ended = host.outcome("id")
    assert isinstance(ended, Ended)
    assert [file.filename for file in ended.files] == ["['a.png']"]


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": [1]},
        {"outputs": "none"},
        {"status": {"status_str": "error", "messages": [["execution_error", "too big"]]}},
        {"status": {"status_str": "error", "messages": [["execution_error", [1]]]}},
        {"status": {"status_str": "error", "messages": [[]]}},
        {"status": None},
        {"prompt": [1, "id", ["1"], {}, ["2"]]},
        {"prompt": [1, "id", {"1": "Save"}, {}, ["2"]]},
        {"prompt": [1, "id", {"1": {}}, {}, ["2"]]},
        {"prompt": [1, "id", {"1": {"class_type": []}}, {}, ["2"]]},
    ],
)
def test_a_history_of_another_shape_is_no_answer(canned: Canned, changes: dict[str, Any]) -> None:
    entry = history(SAVED, executed=["3", "2"])["id"] | changes
    canned.answers |= {"/queue": (200, IDLE), "/history/id": (200, {"id": entry})}
    with pytest.raises(UnreachableError, match="not as ComfyUI does"):
        host_of(canned).outcome("id")


@pytest.mark.parametrize(
    "faults", ["bad", [1], {"2": "bad"}, {"2": {"class_type": "Save", "errors": ["bad"]}}]
)
def test_a_refusal_of_another_shape_is_no_answer(canned: Canned, faults: object) -> None:
    canned.answers["/prompt"] = (
        400,
        {"error": {"message": "m", "details": ""}, "node_errors": faults},
    )
    with pytest.raises(UnreachableError, match="not as ComfyUI does"):
        host_of(canned).post("id", PROMPT)


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    path = tmp_path / "a~1.latent"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def test_a_latent_is_uploaded_under_its_name_and_replaces_an_earlier_one(
    canned: Canned, latent: Path
) -> None:
    canned.answers["/upload/image"] = (
        200,
        {"name": "x.latent", "subfolder": "continued", "type": "output"},
    )
    host_of(canned).provide("id", latent, "continued/x.latent")
    route, body = canned.asked[-1]
    assert route == "/upload/image"
    assert latent.read_bytes() in body
    for name, value in (("type", "output"), ("subfolder", "continued"), ("overwrite", "true")):
        assert f'name="{name}"\r\n\r\n{value}\r\n'.encode() in body
    assert b'name="image"; filename="x.latent"' in body


def test_a_latent_is_uploaded_once_but_again_after_a_failure(canned: Canned, latent: Path) -> None:
    """An upload truncates the file while another row may be reading it."""
    backend = host_of(canned)
    canned.answers["/upload/image"] = (500, b"oops")
    with pytest.raises(UnreachableError):
        backend.provide("1", latent, "continued/x.latent")
    canned.answers["/upload/image"] = (
        200,
        {"name": "x.latent", "subfolder": "continued", "type": "output"},
    )
    before = len(canned.asked)
    for prompt_id, name in (("2", "x"), ("3", "x"), ("4", "y")):
        backend.provide(prompt_id, latent, f"continued/{name}.latent")
    assert [route for route, _ in canned.asked[before:]] == ["/upload/image"] * 2


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (
            (413, b"too large"),
            RefusedError,
            r"refuses a~1\.latent .* as too large: start it with a higher",
        ),
        ((500, b"oops"), UnreachableError, "status 500"),
        ((502, b"gateway"), UnreachableError, "status 502"),
        (None, UnreachableError, "no complete answer"),
        ((403, b"no"), NotComfyUIError, r"does not accept files \(status 403\)"),
    ],
)
def test_a_latent_that_is_not_taken(
    canned: Canned, latent: Path, answer: Answer, error: type[Exception], reason: str
) -> None:
    canned.answers["/upload/image"] = answer
    with pytest.raises(error, match=reason):
        host_of(canned).provide("id", latent, "continued/x.latent")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.version(),
        lambda client: client.outcome("x"),
        lambda client: client.withdraw("x"),
        lambda client: client.interrupt("x"),
        lambda client: client.fetch(made("a.png"), Path("part")),
    ],
)
def test_a_server_that_accepts_a_short_request_and_hangs_is_silent_soon(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[ServerBackend], Any]
) -> None:
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="timed out"):
            call(ServerBackend(f"http://127.0.0.1:{mute.getsockname()[1]}"))
        assert time.monotonic() - began < server_backend.TIMEOUT_SECONDS / 2


def test_a_workflow_may_take_longer_than_a_short_request_and_a_file_while_bytes_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 1.0)
    posted, sent = b'{"prompt_id": "x"}', bytes(6)

    def answer(slow: socket.socket) -> None:
        for pause_s, content in ((1.5, posted), (0.2, sent)):
            connection, _ = slow.accept()
            with connection, connection.makefile("rb") as request:
                request.readline()
                # Unread body bytes would turn the close below into a reset.
                request.read(int(parse_headers(request).get("Content-Length", 0)))
                time.sleep(pause_s)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content))
                for at in range(len(content)):
                    time.sleep(0.2 if content is sent else 0.0)
                    connection.sendall(content[at : at + 1])

    with socket.create_server(("127.0.0.1", 0)) as slow:
        thread = threading.Thread(target=answer, args=[slow])
        thread.start()
        client = ServerBackend(f"http://127.0.0.1:{slow.getsockname()[1]}")
        client.post("x", {})
        client.fetch(made("a.mp4"), tmp_path / "part")
        thread.join()
    assert (tmp_path / "part").read_bytes() == sent
