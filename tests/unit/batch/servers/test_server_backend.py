"""HTTP client against a server with canned responses, and workflow faults by `/object_info`."""

from __future__ import annotations

import copy
import gzip
import json
import time
import zlib
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from wanstream.batch import backend, errors
from wanstream.batch.servers import server_backend
from wanstream.batch.servers.server_backend import NotComfyUIError, ServerBackend
from wanstream.host.embedded.workflow.validate import sockets_of
from wanstream.host.workers.clusters import VARIABLE
from wanstream.tests.faults.comfy_like import object_info
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.support.batch.command import serving, shipped

INFO = {"Save": {"output_node": True}, "Load": {}}
PROMPT = {"1": {"class_type": "Load"}, "2": {"class_type": "Save"}, "3": {"class_type": "Save"}}
IDLE = {"queue_running": [], "queue_pending": []}
LATENT = bytes(range(256)) * 8


class Canned:
    """Canned responses by route, the received requests, and a client.

    A response is a status and a body (JSON, or bytes as they are). None closes the connection
    without one.
    """

    def __init__(self, url, folder):
        self.answers = {"/object_info": (200, INFO), "/queue": (200, IDLE)}
        self.answers |= {"/interrupt": (200, b""), "/upload/image": (200, {"name": "x.latent"})}
        self.requests = []
        self.promise: int | None = None
        self.encoding = ""
        self.pause_s = self.byte_s = 0.0
        self.url = url
        self.part = folder / "part"
        self.latent = folder / "a~1.latent"
        self.latent.write_bytes(LATENT)
        self.client = ServerBackend(url)

    def call(self, name):
        return CALLS[name][1](self)


def made(filename: str, subfolder: str = "") -> backend.MadeFile:
    return backend.MadeFile(node_id="2", filename=filename, subfolder=subfolder)


@pytest.fixture
def canned(tmp_path):
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            # An upload comes in pieces, without a length.
            chunked = self.headers.get("Transfer-Encoding") == "chunked"
            sent = self._pieces() if chunked else self.rfile.read(length)
            form = self.headers.get("Content-Type", "").startswith("multipart/")
            body = sent if form else json.loads(sent) if sent else None
            state.requests.append((self.path, body))
            time.sleep(state.pause_s)
            found = state.answers.get(self.path.partition("?")[0], (404, b"404: Not Found"))
            if found is None:
                return
            status, content = found
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            if state.encoding:
                self.send_header("Content-Encoding", state.encoding)
            size = len(data) if state.promise is None else state.promise
            self.send_header("Content-Length", str(size))
            self.end_headers()
            for piece in [data[at : at + 1] for at in range(size)] if state.byte_s else [data]:
                time.sleep(state.byte_s)
                self.wfile.write(piece)

        def _pieces(self) -> bytes:
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None: ...

    with serving(Handler) as url:
        state = Canned(url, tmp_path)
        yield state


LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]")
PROXY = {"http_proxy": "http://192.0.2.7:3128"}
SERVER = "192.0.2.8"


@pytest.mark.parametrize(
    ("host", "settings", "proxied"),
    [
        *((host, PROXY, False) for host in LOOPBACK),
        (SERVER, {}, False),
        (SERVER, {"all_proxy": "socks5://127.0.0.1:1080"}, False),
        (SERVER, {"http_proxy": "192.0.2.7:3128"}, True),
        (SERVER, {**PROXY, "no_proxy": "192.0.2.8,[::1],fe80::/10"}, False),
        (SERVER, {"https_proxy": "http://192.0.2.7:3128", "no_proxy": "::1"}, False),
    ],
)
def test_the_proxy_of_a_server_is_the_systems(monkeypatch, host, settings, proxied):
    for name in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert any(ServerBackend(f"http://{host}:8188")._client._mounts.values()) == proxied


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8188", "ftp://127.0.0.1", "http://", "http://x:port", "http://x/?a=1"),
        *("file:///etc/passwd", "http://192.168.1.300:8188", "http://m\u00fcnchen-:8188"),
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(NotComfyUIError, match="--server"):
        ServerBackend(url)


def test_an_address_may_have_a_path_and_a_slash(canned):
    canned.answers["/comfy/system_stats"] = (200, {"system": {"comfyui_version": "0.3.64"}})
    assert ServerBackend(f"{canned.url}/comfy/").version() == "0.3.64"


def faults(errors):
    return {"2": {"class_type": "Save", "errors": errors}}


TOO_BIG = faults([{"type": "t", "message": "Too big", "details": "fps"}])
DROPPED = {"prompt_id": "id", "node_errors": TOO_BIG}
NO_OUTPUTS = {"error": {"message": "No outputs", "details": "none"}, "node_errors": {}}
ODD_SHAPE = "not as ComfyUI does"
CALLS = {
    "version": ("/system_stats", lambda it: it.client.version()),
    "nodes": ("/object_info", lambda it: it.client.read_nodes()),
    "outcome": ("/queue", lambda it: it.client.outcome("id")),
    "post": ("/prompt", lambda it: it.client.post("id", PROMPT)),
    "fetch": ("/view", lambda it: it.client.fetch(made("a.png"), it.part)),
    "withdraw": ("/queue", lambda it: it.client.withdraw("id")),
    "interrupt": ("/interrupt", lambda it: it.client.interrupt("id")),
    "provide": ("/upload/image", lambda it: it.client.provide("id", it.latent, "of/x.latent")),
}


def ok(*bodies):
    return [(200, body) for body in bodies]


def status(*numbers):
    return [(number, b"no") for number in numbers]


UNRETURNED = r"a\.png' but does not return it"
TOO_LARGE = r"a~1\.latent .* too large: start it with a higher"
QUEUES = ok({}, {"queue_running": [], "queue_pending": [3]}, {"queue_running": None})
ODD_ERRORS = ("bad", [1], {"2": "bad"}, faults(["bad"]))
REFUSALS = [(400, {**NO_OUTPUTS, "node_errors": odd}) for odd in ODD_ERRORS]


@pytest.mark.parametrize(
    ("calls", "answers", "error", "words"),
    [
        # A gateway without a server, and a server in trouble, are silence.
        ([*CALLS], [None], errors.UnreachableError, "no complete answer"),
        ([*CALLS], status(500, 502, 503, 504), errors.UnreachableError, "status 50"),
        ("version", status(403, 404), NotComfyUIError, "answers, but not as a ComfyUI server"),
        ("version", ok(b"<html>", [], {"system": 1}), NotComfyUIError, "but not as a ComfyUI"),
        # A redirected POST would arrive as a GET, or twice.
        ("version", status(301, 307), NotComfyUIError, "redirects to another address .status 30"),
        ("post", status(301, 307, 403), NotComfyUIError, "does not accept workflows .status"),
        ("nodes", ok(b"<html>"), errors.UnreachableError, "status 200"),
        ("outcome", QUEUES, errors.UnreachableError, ODD_SHAPE),
        ("post", ok(b'{"prompt_id": "id", "numb'), errors.UnreachableError, "incomplete"),
        ("post", ok(DROPPED), errors.RefusedError, r"node 2 \(Save\): Too big: fps"),
        ("post", [(400, NO_OUTPUTS)], errors.RefusedError, "No outputs: none"),
        ("post", [(400, {"error": "busy"})], errors.RefusedError, "busy"),
        ("post", status(413), errors.RefusedError, "status 413"),
        ("post", ok({"prompt_id": "another"}), NotComfyUIError, r"ComfyUI 0\.3\.64 or later"),
        ("post", REFUSALS, errors.UnreachableError, ODD_SHAPE),
        ("fetch", status(501, 408, 429, 301), errors.UnreachableError, r"a\.png.*status"),
        ("fetch", status(400, 403, 404, 410), errors.NoSuchFileError, UNRETURNED),
        ("provide", status(413), errors.RefusedError, TOO_LARGE),
        ("provide", status(403), NotComfyUIError, r"does not accept files \(status 403\)"),
    ],
)
def test_an_odd_answer_is_an_error(canned, calls, answers, error, words):
    canned.client.read_nodes()
    for call in [calls] if isinstance(calls, str) else calls:
        for answer in answers:
            with pytest.raises(error, match=words):
                canned.answers[CALLS[call][0]] = answer
                canned.call(call)
    assert not canned.part.exists()


def test_a_broken_download_is_silence_and_not_a_file(canned):
    canned.answers |= dict.fromkeys(("/view", "/object_info"), (200, b"12345"))
    canned.client.fetch(made("a b_.png", "sub/folder"), canned.part)
    assert canned.part.read_bytes() == b"12345"
    assert canned.requests[-1][0] == "/view?filename=a+b_.png&subfolder=sub%2Ffolder&type=output"
    canned.promise = 9
    for call in ("fetch", "nodes"):
        with pytest.raises(errors.UnreachableError, match=r"received 5 bytes, expected 9"):
            canned.call(call)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_a_body_without_an_end_is_refused(canned, monkeypatch, encoding, pack):
    monkeypatch.setattr(server_backend, "MAX_BODY_BYTES", 100_000)
    monkeypatch.setattr(server_backend, "MAX_FILE_BYTES", 100_000)
    canned.encoding = encoding
    for size in (100_000, 100_001):
        text = b'{"a": "' + b"x" * (size - 9) + b'"}'
        canned.answers |= dict.fromkeys(("/view", "/queue"), (200, pack(text)))
        if size == 100_000:
            canned.call("fetch")
            assert canned.part.read_bytes() == text
            canned.call("withdraw")
    with pytest.raises(errors.NoSuchFileError, match=r"sends more than .* for /view"):
        canned.call("fetch")
    with pytest.raises(errors.ForeignResponseError, match=r"sends more than .* for /queue"):
        canned.call("withdraw")


def test_encodings_that_expand_without_a_limit_are_refused(canned):
    canned.answers["/queue"] = (200, gzip.compress(gzip.compress(b"{}")))
    for encoding in ("gzip, gzip", "br", "zstd", "gzip,deflate"):
        canned.encoding = encoding
        with pytest.raises(errors.ForeignResponseError, match=f"in the encoding.*{encoding}"):
            canned.call("withdraw")


def test_a_download_replaces_a_link_and_does_not_follow_it(canned, tmp_path):
    canned.answers["/view"] = (200, b"12345")
    (tmp_path / "victim").write_text("of somebody else")
    canned.part.symlink_to(tmp_path / "victim")
    canned.call("fetch")
    assert (tmp_path / "victim").read_text() == "of somebody else"
    assert canned.part.read_bytes() == b"12345"
    # A file that cannot be written is no silence.
    with pytest.raises(OSError, match="No such file") as refused:
        canned.client.fetch(made("a.png"), tmp_path / "none" / "part")
    assert not isinstance(refused.value, errors.UnreachableError)


def test_a_post_is_taken_back_if_outputs_or_the_id_are_dropped(canned):
    canned.answers["/prompt"] = (200, {"prompt_id": "id", "number": 1, "node_errors": {}})
    canned.call("post")
    body = {"prompt": PROMPT, "prompt_id": "id", "client_id": "id"}
    assert canned.requests == [("/prompt", body)]
    canned.answers["/prompt"] = (200, DROPPED)
    with pytest.raises(errors.RefusedError):
        canned.call("post")
    # The remaining outputs must not run.
    cancelled = [("/queue", {"delete": ["id"]}), ("/interrupt", {"prompt_id": "id"})]
    assert canned.requests[2:] == cancelled
    canned.answers["/prompt"] = (200, {"prompt_id": "another", "node_errors": {}})
    with pytest.raises(NotComfyUIError):
        canned.call("post")
    assert canned.requests[-1] == ("/queue", {"delete": ["another"]})


def history(outputs, executed, status="success", *, changes=()):
    messages = [["execution_start", {}]]
    if status in {"error", "interrupted"}:
        error = {"node_id": "2", "node_type": "Save", "exception_message": "disk full\n"}
        messages.append([f"execution_{status}", error])
    ended = {"status_str": "success" if status == "success" else "error", "messages": messages}
    entry = {"prompt": [1, "id", PROMPT, {}, [*executed]], "outputs": outputs, "status": ended}
    return 200, {"id": entry | dict(changes)}


VIDEOS = [{"filename": "a.mp4", "type": "output"}, {"filename": "p.png", "type": "temp"}]
PICTURES = [{"filename": "b.png", "subfolder": "x", "type": "output"}]
SAVED = {"3": {"images": PICTURES, "animated": [True]}, "2": {"gifs": VIDEOS, "text": ["hello"]}}


def test_an_outcome_is_read_from_the_queue_and_the_history(canned):
    canned.client.read_nodes()
    canned.answers["/history/id"] = (200, {})
    assert canned.call("outcome") == backend.Unknown()
    for place, begun in {"queue_pending": False, "queue_running": True}.items():
        canned.answers["/queue"] = (200, {**IDLE, place: [[1, "id", PROMPT, {}, ["2", "3"]]]})
        assert canned.call("outcome") == backend.UnderWay(begun=begun)
    canned.answers["/queue"] = (200, IDLE)
    for status, outcome in {
        "error": backend.JobFailed(reason="node 2 (Save): disk full"),
        "unexplained": backend.JobFailed(reason="the server returned no reason"),
        "interrupted": backend.Interrupted(),
    }.items():
        canned.answers["/history/id"] = history({}, "23", status)
        assert canned.call("outcome") == outcome
    canned.answers["/history/id"] = history(SAVED, "23")
    found = [(file.node_id, file.subfolder, file.filename) for file in canned.call("outcome").files]
    assert found == [("2", "", "a.mp4"), ("3", "x", "b.png")]
    odd = {"1": {"images": [{"filename": ["a.png"], "subfolder": 7, "type": "output"}]}}
    canned.answers["/history/id"] = history(odd, "23")
    assert [file.filename for file in canned.call("outcome").files] == ["['a.png']"]


def test_workflow_without_an_answer(canned):
    """A client killed during a post has not received `node_errors`."""
    canned.client.read_nodes()
    canned.answers["/history/id"] = history(SAVED, "2")
    assert canned.call("outcome") == backend.Unknown()
    canned.answers["/prompt"] = (200, {"prompt_id": "id", "node_errors": {}})
    canned.call("post")
    assert isinstance(canned.call("outcome"), backend.Ended)


ODD_MESSAGES = [["execution_error", "too big"]], [["execution_error", [1]]], [[]]
ODD_NODES = ["1"], {"1": "Save"}, {"1": {}}, {"1": {"class_type": []}}
ODD_HISTORIES = [
    *({"outputs": [1]}, {"outputs": "none"}, {"status": None}),
    *({"status": {"status_str": "error", "messages": each}} for each in ODD_MESSAGES),
    *({"prompt": [1, "id", each, {}, ["2"]]} for each in ODD_NODES),
]


def test_a_history_of_another_shape_is_no_answer(canned):
    canned.client.read_nodes()
    for changes in ODD_HISTORIES:
        canned.answers["/history/id"] = history(SAVED, "32", changes=changes)
        with pytest.raises(errors.UnreachableError, match=ODD_SHAPE):
            canned.call("outcome")


def test_a_latent_is_uploaded_once_but_again_after_a_failure(canned):
    """An upload truncates the file while another row may be reading it."""
    uploaded = canned.answers["/upload/image"]
    canned.answers["/upload/image"] = (500, b"oops")
    with pytest.raises(errors.UnreachableError):
        canned.call("provide")
    canned.answers["/upload/image"] = uploaded
    for prompt_id, name in (("2", "x"), ("3", "x"), ("4", "y")):
        canned.client.provide(prompt_id, canned.latent, f"continued/{name}.latent")
    assert [route for route, _ in canned.requests] == ["/upload/image"] * 3
    body = canned.requests[1][1]
    assert LATENT in body
    for name, value in (("type", "output"), ("subfolder", "continued"), ("overwrite", "true")):
        assert f'name="{name}"\r\n\r\n{value}\r\n'.encode() in body
    assert b'name="image"; filename="x.latent"' in body


@pytest.mark.parametrize("call", ["version", "outcome", "interrupt", "fetch"])
def test_a_server_that_hangs_in_a_short_request_is_silent_soon(canned, monkeypatch, call):
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.2)
    canned.client = ServerBackend(canned.url)
    canned.pause_s = 1.0
    with pytest.raises(errors.UnreachableError, match="timed out"):
        canned.call(call)
    assert len(canned.requests) <= 1, "the first request has timed out"


def test_timeouts_of_workflows_and_files_are_longer(canned, monkeypatch):
    monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.5)
    canned.client = ServerBackend(canned.url)
    canned.answers["/prompt"] = (200, {"prompt_id": "id"})
    canned.pause_s = 0.8
    canned.call("post")
    canned.answers["/view"] = (200, b"123456")
    canned.pause_s = 0.0
    canned.byte_s = 0.15
    canned.call("fetch")
    assert canned.part.read_bytes() == b"123456"


SEED = ["INT", {"default": 0, "min": 0, "max": 100}]
SOLVER = ["COMBO", {"options": ["euler", "unipc"]}]
SAMPLER = {
    "required": {"model": ["MODEL"], "seed": SEED, "solver": SOLVER},
    "optional": {"mask": ["MASK", {}], "many": ["COMFY_AUTOGROW_V3", {}]},
    "hidden": {"prompt": ["PROMPT"]},
}
FILES = [["a.safetensors", "b.safetensors"], {"tooltip": "x"}]


def node(inputs, *outputs, saves=False, **kinds):
    return {"input": {"required": inputs, **kinds}, "output": [*outputs], "output_node": saves}


NODES = {
    "Loader": node({"file": FILES}, "MODEL", ["euler", "unipc"]),
    "Picture": node({"image": [["a.png"], {"image_upload": True}]}, "IMAGE", "MASK"),
    "Sampler": node(SAMPLER["required"], "LATENT", **SAMPLER),
    "Save": node({"latent": ["LATENT,IMAGE"], "any": ["*"]}, saves=True),
}
INPUTS = {"model": ["1", 0], "seed": 7, "solver": ["1", 1], "mask": ["2", 1]}
WORKFLOW = {
    "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors"}},
    "2": {"class_type": "Picture", "inputs": {"image": "sub/other.png"}},
    "3": {"class_type": "Sampler", "inputs": INPUTS},
    "4": {"class_type": "Save", "inputs": {"latent": ["3", 0], "any": ["2", 0]}},
}


def faults_of(workflow, info=NODES):
    client = ServerBackend("http://127.0.0.1:1")
    client._info = info
    client.sockets = {name: sockets_of(node.get("input") or {}) for name, node in info.items()}
    return client.faults(workflow)


def test_a_sound_workflow_has_no_faults():
    backend.check_classes(WORKFLOW, NODES, "")
    # The server does not check a node that no output reads either.
    unread = {"class_type": "Sampler", "inputs": {"seed": -1}}
    for workflow in (WORKFLOW, {**WORKFLOW, "5": unread}):
        assert faults_of(workflow) == []
    nothing = "the workflow has no node that saves or shows anything"
    assert faults_of({"1": WORKFLOW["1"]}) == [nothing]


@pytest.mark.parametrize(
    ("node", "name", "value", "fault"),
    [
        ("1", "file", "c", "node 1 (Loader): Value not in list: file: 'c' not in ['a.safetensors'"),
        ("3", "solver", "ddim", "node 3 (Sampler): Value not in list"),
        ("3", "seed", 101, "node 3 (Sampler): Value 101 bigger than max of 100: seed"),
        ("3", "seed", "x", "node 3 (Sampler): Failed to convert an input value to a INT value"),
        ("3", "model", None, "node 3 (Sampler): Required input is missing: model"),
        ("3", "model", ["2", 0], "received_type(IMAGE) mismatch input_type(MODEL)"),
        ("3", "model", ["9", 0], "'model' is linked to node '9', which is not in the workflow"),
        ("3", "model", ["1", 2], "'model' is linked to output 2 of node '1' (Loader), which has 2"),
        ("3", "model", ["1"], "Bad linked input"),
    ],
)
def test_a_fault_is_told_with_its_node_and_input(node, name, value, fault):
    broken = copy.deepcopy(WORKFLOW)
    broken[node]["inputs"][name] = value
    if value is None:
        del broken[node]["inputs"][name]
    (told,) = faults_of(broken)
    assert fault in told


def test_unknown_classes_are_listed():
    broken = {**WORKFLOW, "5": {"class_type": "KSampler"}, "6": {}}
    with pytest.raises(errors.SetupError) as refused:
        backend.check_classes(broken, NODES, "not here:")
    unknown = ["node 5: unknown class KSampler", "node 6: unknown class None"]
    assert str(refused.value).splitlines() == ["not here:", *unknown]


def test_odd_descriptions_and_types_are_left_to_the_server():
    described = {"a": [], "b": "INT", "c": None, "d": ["INT", {"max": 3}]}
    odd = node(described, saves=True, optional=None)
    assert list(sockets_of(odd["input"])) == ["d"]
    info = {**NODES, "Odd": odd, "Bare": {"input": None}}
    info["Own"] = node({"x": ["INT,FLOAT", {"min": 0}]}, saves=True)
    for name, inputs in (("Odd", {"d": 3}), ("Own", {"x": "seven"})):
        assert faults_of({"1": {"class_type": name, "inputs": inputs}}, info) == []


@pytest.fixture
def other_server(tmp_path, monkeypatch):
    """Nodes from a server with the cluster "lab"; here are the cluster "mine" and one GPU."""
    lists = {name: tmp_path / f"{name}.json" for name in ("lab", "mine")}
    for name, path in lists.items():
        path.write_text(json.dumps({name: {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(lists["lab"]))
    info = object_info(named_models(tmp_path / "models", shipped("workers")))
    monkeypatch.setenv(VARIABLE, str(lists["mine"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return info


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": "lab", "count": 8}, ""),
        ({"cluster": "local", "count": 8}, ""),
        ({"cluster": "mine"}, "'mine' not in ['local', 'in-process', 'lab']"),
        ({"cluster": "lab", "layout": "manual", "count": 3}, "there are 3 workers: change one"),
        ({"cluster": "lab", "layout": "x"}, "the layout is 'x'"),
    ],
)
def test_workers_are_checked_against_the_server(other_server, changes, said):
    workflow = shipped("workers")
    (node,) = [node for node in workflow.values() if node["class_type"] == "WanStreamWorkers"]
    node["inputs"].update(changes)
    faults = faults_of(workflow, other_server)
    assert len(faults) == bool(said)
    assert said in "".join(faults)


@pytest.mark.parametrize("listed", [["none"], ["none", "latents/a.latent"]])
def test_any_saved_latent_of_a_server_may_be_chosen(tmp_path, listed):
    mine = "clips/mine.latent"
    workflow = shipped("continue_video", clip={"previous_file": mine})
    info = copy.deepcopy(object_info(named_models(tmp_path / "models", workflow)))
    info["LoadImage"] = NODES["Picture"]
    info["WanStreamContinueVideo"]["input"]["optional"]["previous_file"][1]["options"] = listed
    info["WanStreamLoadLatent"]["input"]["required"]["file"][1]["options"] = listed
    workflow["loaded"] = {"class_type": "WanStreamLoadLatent", "inputs": {"file": mine}}
    workflow["kept"] = shipped("continue_video", keep={"latent": ["loaded", 0]})["keep"]
    assert "clips/mine" not in "".join(faults_of(workflow, info))
    workflow["clip"]["inputs"]["overlap"] = 40
    # Other inputs are checked.
    assert "an overlap of 40 latent frames need" in "".join(faults_of(workflow, info))
