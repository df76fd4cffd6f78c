"""Servers for one batch: what is refused before a row is queued, and what is only noted."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from wanstream.batch.errors import (
    UnreachableError,
    UnsuitableError,
)
from wanstream.batch.running import runner
from wanstream.batch.running.stop_request import StopRequest
from wanstream.batch.servers import server_backend
from wanstream.batch.servers.server_backend import ServerBackend, ServerReport
from wanstream.batch.servers.servers import Requirements, UsedChoice, endpoints, same_server
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.cli.batch.command import _on_stop
from wanstream.host.embedded.workflow.validate import sockets_of
from wanstream.schema import VERSION
from wanstream.tests.faults import comfy_like
from wanstream.tests.faults.comfy_like import State, Trouble, handler_of
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.unit.batch.test_dry_run import T2V

Serve = Callable[..., tuple[str, State]]


@contextmanager
def served(state: State) -> Iterator[str]:
    """Run a server with this pack."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(state, Trouble()))
    server.daemon_threads = True
    threading.Thread(target=state.work, daemon=True).start()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        state.closed.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(comfyui=..., about=...)` returns the address and state of a server with all models."""
    with ExitStack() as opened:

        def start(**settings: Any) -> tuple[str, State]:
            folder = tmp_path / f"server{len([*tmp_path.glob('server*')])}"
            (folder / "output").mkdir(parents=True)
            state = State(folder / "output", named_models(folder / "models", T2V), **settings)
            return opened.enter_context(served(state)), state

        yield start


def call_of(folder: Path, *urls: str, rows: int = 6, more: tuple[str, ...] = ()) -> list[str]:
    """Return the command line for a batch on these servers."""
    lines = [json.dumps({"sampler.seed": seed}) for seed in range(1, rows + 1)]
    (folder / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "workflow.json").write_text(json.dumps(T2V), encoding="utf-8")
    files = [
        str(folder / "jobs.jsonl"),
        "--workflow",
        str(folder / "workflow.json"),
        "--out",
        str(folder / "out"),
    ]
    return ["batch", *files, *(word for url in urls for word in ("--server", url)), *more]


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *urls: str) -> str:
    """Run a batch to be refused, and return the message."""
    assert main(call_of(folder, *urls)) == INVALID
    assert not (folder / "out").exists(), "nothing was written or queued"
    return capsys.readouterr().err


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_two_servers_share_the_rows_and_the_summary_says_how(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, a), (second, b) = serve(seconds=0.05), serve(seconds=0.05)
    assert main(call_of(tmp_path, first, second)) == DONE
    assert len([*(tmp_path / "out").glob("*.mp4")]) == 6
    printed = capsys.readouterr()
    counts = [len([*state.output.glob("*.mp4")]) for state in (a, b)]
    assert sum(counts) == 6
    assert min(counts) >= 1
    assert printed.out.splitlines() == [
        f"6 of 6 rows are done in {tmp_path / 'out'}",
        *(f"{url}: {count} rows" for url, count in zip((first, second), counts, strict=True)),
    ]
    assert "2 of 2 servers" not in printed.err, (
        "the bar names servers only when one does not respond"
    )


@pytest.mark.parametrize(
    "other", ["{url}", "{url}/", "http://localhost:{port}", "HTTP://LOCALHOST:{port}/"]
)
def test_the_same_server_twice_is_refused(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    url, _ = serve()
    again = other.format(url=url, port=url.rpartition(":")[2])
    assert f"--server {url} and --server {again} are one server" in refused(
        tmp_path, capsys, url, again
    )


def test_one_process_behind_two_ports_is_refused(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"version": VERSION, "instance": "one"}
    (first, _), (second, _) = serve(about=about), serve(about=about)
    assert "are one server: give each server once" in refused(tmp_path, capsys, first, second)


def test_one_address_with_several_processes_is_refused(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = State.answer

    def changing(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        about = {"version": VERSION, "instance": str(uuid.uuid4())}
        return (200, about) if route == "/wanstream/about" else answer(self, route, query, body)

    monkeypatch.setattr(State, "answer", changing)
    url, _ = serve()
    assert "are one server: give each server once" in refused(tmp_path, capsys, url, url)


def test_servers_with_different_versions_of_this_pack_are_refused(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, _), (second, _) = serve(), serve(about={"version": "0.0.9", "instance": "b"})
    told = refused(tmp_path, capsys, first, second)
    assert (
        f"{second} has WanStream 0.0.9, and {first} has {VERSION}: install the same version on both"
        in told
    )


def test_a_pack_that_does_not_report_its_version_is_another_version(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, _), (second, _) = serve(), serve(about={})
    assert f"{second} has WanStream (a version that does not report itself)" in refused(
        tmp_path, capsys, first, second
    )


def test_a_server_without_a_node_of_the_workflow_is_refused(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, _), (second, state) = serve(), serve()
    answer = State.answer

    def without(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return (
            (200, {})
            if self is state and route == "/object_info"
            else answer(self, route, query, body)
        )

    monkeypatch.setattr(State, "answer", without)
    told = refused(tmp_path, capsys, first, second)
    assert f"the workflow cannot run on {second} (ComfyUI 0.18.1):" in told
    assert "node sampler: unknown class WanStreamSampler" in told
    assert first not in told


def test_a_server_without_a_model_of_the_workflow_is_refused(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, _), (second, state) = serve(), serve()
    name = T2V["experts"]["inputs"]["high_noise"]
    (missing,) = (state.models / "diffusion_models").glob(name)
    missing.unlink()
    told = refused(tmp_path, capsys, first, second)
    assert (
        f"{second} lacks 1 choice of the rows that another server has: add what is missing, or "
        "leave" in told
    )
    assert f"WanStreamExperts.high_noise '{name}'" in told


def test_different_versions_of_comfyui_are_noted(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, _), (second, _) = serve(), serve(comfyui="0.3.64")
    assert main(call_of(tmp_path, first, second, more=("--dry-run",))) == DONE
    told = capsys.readouterr().err
    assert "the servers have different versions of ComfyUI, with which videos may differ" in told
    assert f"0.18.1 at {first}, 0.3.64 at {second}" in told


def test_a_server_that_is_down_is_noted_and_the_others_run(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down, (url, _) = f"http://127.0.0.1:{closed_port()}", serve()
    assert main(call_of(tmp_path, down, url, rows=2)) == DONE
    printed = capsys.readouterr()
    assert f"no complete answer from {down}/system_stats" in printed.err
    assert "it gets rows when it responds" in printed.err
    assert f"1 of 2 servers, no answer from {down}" in printed.err
    assert f"{url}: 2 rows\n{down}: 0 rows\n" in printed.out


def test_servers_that_are_all_down_are_refused_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"http://127.0.0.1:{closed_port()}", f"http://127.0.0.1:{closed_port()}"]
    told = refused(tmp_path, capsys, *urls)
    assert told.startswith("none of the servers responds; is ComfyUI running there?")
    assert all(url in told for url in urls)


@pytest.mark.parametrize("url", ["127.0.0.1:8188", "ftp://x", "http://"])
def test_a_bad_address_among_good_ones_is_refused(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert f"--server {url}" in refused(tmp_path, capsys, serve()[0], url)


def test_a_server_that_returns_with_other_nodes_is_refused_by_its_check(serve: Serve) -> None:
    url, state = serve()
    backend = ServerBackend(url)
    report = backend.describe()
    backend.faults_of_server = Requirements(
        classes={"1": "WanStreamSampler"}, wanstream=report.wanstream, url="http://other"
    ).faults
    backend.check()
    state.about = {"version": "0.0.9", "instance": "later"}
    with pytest.raises(UnsuitableError, match=r"has WanStream 0\.0\.9, and http://other has 0"):
        backend.check()


@pytest.mark.parametrize(
    ("failed", "found", "message"),
    [
        ("/wanstream/about", (500, b""), "answers with status 500"),
        (
            "/object_info",
            (200, {"error": "the nodes are loading"}),
            "/object_info answers, but not as ComfyUI does",
        ),
    ],
)
def test_a_server_whose_description_fails_is_checked_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, failed: str, found: tuple[int, Any], message: str
) -> None:
    answer = State.answer

    def failing(self: State, route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return found if route == failed else answer(self, route, query, body)

    url, _ = serve()
    backend = ServerBackend(url)
    backend.faults_of_server = Requirements(
        classes={}, wanstream=VERSION, url="http://other"
    ).faults
    monkeypatch.setattr(State, "answer", failing)
    with pytest.raises(UnreachableError, match=message):
        backend.check()
    monkeypatch.setattr(State, "answer", answer)
    backend.check()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:8188", "http://127.0.0.1:8188"),
        ("http://localhost", "http://127.0.0.1"),
        ("http://localhost/a", "http://127.0.0.1/a"),
        ("http://localhost.example:8188", "http://localhost.example:8188"),
    ],
)
def test_localhost_is_recorded_as_its_number(url: str, address: str) -> None:
    assert ServerBackend(url).address == address


def test_a_server_that_comes_later_may_be_one_of_the_others(serve: Serve) -> None:
    url, state = serve()
    backend = ServerBackend(url)
    backend.faults_of_server = Requirements(
        classes={}, instances={state.about["instance"]: "http://other"}
    ).faults
    with pytest.raises(UnsuitableError, match=f"{url} and http://other are one server"):
        backend.check()


def report_of(url: str, **known: Any) -> ServerReport:
    found = {"comfyui": "0.18.1", "wanstream": None, "instance": None, "sockets": {}}
    return ServerReport(url=url, **{**found, **known})


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("http://127.0.0.1:8188", "http://127.0.0.1:8189", False),
        ("http://127.0.0.1:8188", "http://[::ffff:127.0.0.1]:8188/", True),
        ("http://127.0.0.1", "http://127.0.0.1:80", True),
        ("http://127.0.0.1/a", "http://127.0.0.1/b", False),
        ("http://no-such-host.invalid", "http://no-such-host.invalid:80/", True),
    ],
)
def test_addresses_of_one_server(first: str, second: str, same: bool) -> None:
    assert same_server([first, second], [None, None]) == same
    assert same_server([first, second], ["a", None]) == same


def test_ids_of_processes_are_believed_before_addresses() -> None:
    """One name may stand for several machines, and one machine may have several names."""
    url = "http://127.0.0.1:8188"
    assert not same_server([url, url], ["a", "b"])
    assert same_server([url, "http://127.0.0.1:9999"], ["a", "a"])
    assert endpoints(url) == {("127.0.0.1", 8188, "")}


def test_choices_of_a_workflow_without_a_list_are_any() -> None:
    sockets = {"Load": sockets_of({"required": {"file": [["a", "b"]], "text": ["STRING"]}})}
    needed = Requirements(
        classes={"1": "Load"},
        choices=(
            UsedChoice(class_type="Load", name="file", value="a"),
            UsedChoice(class_type="Load", name="file", value="c"),
            UsedChoice(class_type="Load", name="text", value="any"),
        ),
    )
    assert needed.faults(report_of("http://x", sockets=sockets)) == [
        "http://x lacks 1 choice of the rows that another server has: add what is missing, or "
        "leave this server out",
        "Load.file 'c'",
    ]


LIMIT_S = 30.0
"""Seconds, fewer than the timeout for a file or workflow request."""


class Hang:
    """Hang from the first `/queue` request after `turn(on=True)` until `turn(on=False)`."""

    def __init__(self, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free, self._answer, self._begins = threading.Event(), state.answer, False
        self._free.set()
        monkeypatch.setattr(state, "answer", self._wait)
        monkeypatch.setattr(server_backend, "STATUS_SECONDS", 0.5)
        monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)

    def turn(self, *, on: bool) -> None:
        self._begins = on
        if not on:
            self._free.set()

    def _wait(self, route: str, *request: Any) -> tuple[int, Any]:
        if self._begins and route == "/queue":
            self._free.clear()
        assert self._free.wait(2 * LIMIT_S)
        return self._answer(route, *request)


def seeds_of(*states: State) -> list[int]:
    """Return the seeds of the workflows made by servers."""
    return [
        node["inputs"]["seed"]
        for state in states
        for entry in state.history.values()
        for node in (entry["prompt"][2].values() if "prompt" in entry else ())
        if "seed" in node["inputs"]
    ]


@pytest.mark.slow  # runs a whole batch, or waits for its servers
@pytest.mark.parametrize("returns", [False, True])
def test_rows_of_a_server_that_hangs_are_made_by_another_and_none_is_lost_or_doubled(
    tmp_path: Path,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    returns: bool,
) -> None:
    (first_url, first), (second_url, second) = serve(seconds=0.1), serve(seconds=0.1)
    hang, began, rows = Hang(second, monkeypatch), time.monotonic(), 60 if returns else 20

    def stop_and_go() -> None:
        while len(second.history) < 2:
            time.sleep(0.01)
        hang.turn(on=True)
        if returns:
            time.sleep(3 * server_backend.STATUS_SECONDS)
            hang.turn(on=False)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    thread.start()
    assert main(call_of(tmp_path, first_url, second_url, rows=rows)) == DONE
    seconds = time.monotonic() - began
    hang.turn(on=False)
    thread.join(LIMIT_S)
    assert seconds < LIMIT_S
    assert re.search(
        rf"{second_url} has not responded for \d+ s: other backends take its",
        capsys.readouterr().err,
    )
    assert len([*(tmp_path / "out").glob("*.mp4")]) == rows
    times = Counter(seeds_of(first, second))
    assert set(times) == set(range(1, rows + 1))
    assert times.total() <= rows + 2, "only the two rows that it had may have been made twice"
    assert returns == (len(second.history) > 5)


@pytest.mark.slow  # runs a whole batch, or waits for its servers
def test_a_batch_whose_only_server_hangs_ends_after_the_timeout_and_can_be_resumed(
    tmp_path: Path,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, state = serve(seconds=0.2)
    hang, began = Hang(state, monkeypatch), time.monotonic()

    def stop() -> None:
        while not state.history:
            time.sleep(0.01)
        hang.turn(on=True)

    threading.Thread(target=stop, daemon=True).start()
    assert main(call_of(tmp_path, url, more=("--timeout", "3"))) == FAILED
    assert time.monotonic() - began < LIMIT_S
    assert "timed out; gave up after" in capsys.readouterr().err
    hang.turn(on=False)
    assert main(call_of(tmp_path, url)) == DONE
    assert sorted(seeds_of(state)) == [1, 2, 3, 4, 5, 6], "its rows were found by their ids"


def test_a_batch_that_gives_up_prints_how_many_rows_are_done(
    tmp_path: Path,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, state = serve()
    answer = state.answer

    def gone(route: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return (
            (502, b"")
            if len(state.history) >= 2 and route != "/view"
            else answer(route, query, body)
        )

    monkeypatch.setattr(state, "answer", gone)
    assert main(call_of(tmp_path, url, more=("--timeout", "1"))) == FAILED
    printed = capsys.readouterr()
    assert "answers with status 502; gave up after" in printed.err
    done = len([*(tmp_path / "out").glob("*.mp4")])
    assert printed.out == (
        f"{done} of 6 rows are done in {tmp_path / 'out'}; {6 - done} are left: run the same "
        "command again to resume\n"
    )


def test_a_file_that_is_not_in_the_list_but_that_the_server_takes_runs(
    serve: Serve, tmp_path: Path
) -> None:
    """The node's own check may accept it."""
    url, state = serve()
    (state.models / "diffusion_models" / T2V["experts"]["inputs"]["high_noise"]).unlink()
    assert main(call_of(tmp_path, url, rows=2)) == DONE
    assert len([*(tmp_path / "out").glob("*.mp4")]) == 2
    assert state.pending == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_without_the_pack_is_refused_with_a_question(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    servers = [serve() for _ in range(count)]
    monkeypatch.setattr(comfy_like, "object_info", lambda models: {"KSampler": {"input": {}}})
    told = refused(tmp_path, capsys, *(url for url, _ in servers)).splitlines()
    assert "node sampler: unknown class WanStreamSampler" in told
    assert told[-1] == "is WanStream installed there?"


def test_a_server_with_the_pack_but_without_another_node_is_refused_without_a_question(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(T2V, "other", {"class_type": "NobodysNode", "inputs": {}})
    told = refused(tmp_path, capsys, serve()[0])
    assert told.splitlines()[1:] == ["node other: unknown class NobodysNode"]


def test_one_row_of_a_server_is_singular(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call_of(tmp_path, serve()[0], serve()[0], rows=1)) == DONE
    counts = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(counts) == ["0 rows", "1 row"]


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        (1, "stopping after the running job; press Ctrl-C again to stop it too"),
        (2, "stopping after the running jobs; press Ctrl-C again to stop them too"),
    ],
)
def test_ctrl_c_is_answered_by_the_number_of_backends(
    capfd: pytest.CaptureFixture[str], servers: int, text: str
) -> None:
    _on_stop(
        StopRequest(), [ServerBackend(f"http://127.0.0.1:{port}") for port in range(1, servers + 1)]
    )
    assert capfd.readouterr().err == f"\n{text}\n"


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.jsonl", "JOBS.JSON"])
def test_a_file_after_the_option_for_ray_is_refused_with_the_order(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["batch", "--workflow", "w.json", "--out", "out", "--ray", name])
    assert ended.value.code == INVALID
    assert (
        f"argument --ray: {name} is a file, and not an entry of clusters.json; JOBS comes before "
        "--ray" in (capsys.readouterr().err)
    )
