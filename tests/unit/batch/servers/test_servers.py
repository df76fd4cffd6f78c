"""Servers for one batch: what is refused before a row is queued, and what is only noted."""

import re
import threading
import uuid
from contextlib import ExitStack

import pytest

from wanstream.batch.errors import UnreachableError, UnsuitableError
from wanstream.batch.servers.server_backend import ServerBackend, ServerReport
from wanstream.batch.servers.servers import Requirements, UsedChoice, endpoints, same_server
from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.host.embedded.workflow.validate import sockets_of
from wanstream.schema import VERSION
from wanstream.tests.faults import comfy_like
from wanstream.tests.faults.comfy_like import State, handler_of
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.support.batch.command import command_line, serving, shipped, videos
from wanstream.tools.comfyui import free_port

T2V = shipped()
OTHER_NODE = {"2": {"class_type": "Odd", "inputs": {"n": 1}}}
ODD = {"input": {"required": {"n": ["INT", {}]}}, "output": [], "output_node": True}


@pytest.fixture
def serve(tmp_path):
    """`serve(comfyui=..., about=...)` returns the address and state of a server with all models."""
    with ExitStack() as opened:

        def start(**settings):
            folder = tmp_path / f"server{len([*tmp_path.glob('server*')])}"
            (folder / "output").mkdir(parents=True)
            state = State(folder / "output", named_models(folder / "models", T2V), **settings)
            threading.Thread(target=state.work, daemon=True).start()
            opened.callback(state.closed.set)
            return opened.enter_context(serving(handler_of(state))), state

        yield start


@pytest.fixture
def answering(monkeypatch):
    """`answering(found)`: `found(state, route, body)` answers instead of servers, unless false."""
    answer = State.answer

    def replace(found):
        def replaced(self, route, query, body):
            return found(self, route, body) or answer(self, route, query, body)

        monkeypatch.setattr(State, "answer", replaced)

    return replace


@pytest.fixture
def run(tmp_path, capsys):
    """`run(*urls, rows=6, options=())` runs a batch, and returns the exit code and the output."""

    def command(*urls, rows=6, options=(), workflow=T2V):
        if isinstance(rows, int):
            rows = [{"sampler.seed": seed} for seed in range(1, rows + 1)]
        servers = [word for url in urls for word in ("--server", url)]
        code = main(command_line(tmp_path, workflow, *rows, options=[*servers, *options]))
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def refused(run, tmp_path):
    """`refused(*urls)` runs a batch to be refused, and returns the message."""

    def message(*urls, **given):
        code, _, told = run(*urls, **given)
        assert code == INVALID
        assert not (tmp_path / "out").exists(), "nothing was written or queued"
        return told

    return message


def test_two_servers_share_the_rows_and_the_summary_says_how(serve, run, tmp_path):
    servers = dict([serve(seconds=0.05), serve(seconds=0.05)])
    code, out, err = run(*servers)
    assert (code, len(videos(tmp_path / "out"))) == (DONE, 6)
    counts = {url: len(videos(state.output)) for url, state in servers.items()}
    assert sum(counts.values()) == 6
    assert min(counts.values()) >= 1
    assert out.splitlines() == [
        f"6 of 6 rows are done in {tmp_path / 'out'}",
        *(f"{url}: {count} rows" for url, count in counts.items()),
    ]
    # The bar names servers only when one does not respond.
    assert "2 of 2 servers" not in err


def test_one_server_given_twice_is_refused(serve, refused, monkeypatch):
    about = {"version": VERSION, "instance": "one"}
    first, state = serve(about=about)
    second, _ = serve(about=about)
    assert "are one server: give each server once" in refused(first, second)
    again = first.replace("127.0.0.1", "LOCALHOST") + "/"
    assert f"--server {first} and --server {again} are one server" in refused(first, again)
    # A proxy may choose another process for each request.
    ids = property(lambda self: {"version": VERSION, "instance": str(uuid.uuid4())})
    monkeypatch.setattr(type(state), "about", ids, raising=False)
    assert "are one server: give each server once" in refused(first, first)


def test_servers_with_different_versions_of_the_pack_are_refused(serve, refused):
    first, _ = serve()
    second, _ = serve(about={"version": "0.0.9", "instance": "b"})
    told = f"{second} has WanStream 0.0.9, and {first} has {VERSION}: install the same version on"
    assert told in refused(first, second)
    unnamed, _ = serve(about={})
    told = f"{unnamed} has WanStream (a version that does not report itself)"
    assert told in refused(first, unnamed)


def test_a_server_without_a_node_or_a_model_is_refused(serve, refused, answering, monkeypatch):
    first, _ = serve()
    second, state = serve()
    other = {**T2V, "other": {"class_type": "NobodysNode", "inputs": {}}}
    told = refused(first, workflow=other).splitlines()
    assert told[1:] == ["node other: unknown class NobodysNode"]
    name = T2V["experts"]["inputs"]["high_noise"]
    (state.models / "diffusion_models" / name).unlink()
    told = refused(first, second)
    assert f"{second} lacks 1 choice of the rows that another server has: add what is" in told
    assert f"WanStreamExperts.high_noise '{name}'" in told
    answering(lambda self, route, _: self is state and route == "/object_info" and (200, {}))
    told = refused(first, second)
    assert f"the workflow cannot run on {second} (ComfyUI 0.18.1):" in told
    assert "node sampler: unknown class WanStreamSampler" in told
    assert first not in told
    monkeypatch.setattr(comfy_like, "object_info", lambda models: {"KSampler": {"input": {}}})
    for urls in ([first], [first, second]):
        assert refused(*urls).splitlines()[-1] == "is WanStream installed there?"


def test_different_versions_of_comfyui_are_noted(serve, run):
    first, _ = serve()
    second, _ = serve(comfyui="0.3.64")
    code, _, told = run(first, second, options=["--dry-run"])
    assert code == DONE
    assert "the servers have different versions of ComfyUI, with which videos may differ" in told
    assert f"0.18.1 at {first}, 0.3.64 at {second}" in told


def test_a_server_that_is_down_is_noted_and_the_others_run(serve, run):
    down = f"http://127.0.0.1:{free_port()}"
    url, _ = serve()
    code, out, err = run(down, url, rows=1)
    assert code == DONE
    assert re.search(f"no complete answer from {down}/system_stats: .*refused", err)
    assert "it gets rows when it responds" in err
    assert f"1 of 2 servers, no answer from {down}" in err
    assert f"{url}: 1 row\n{down}: 0 rows\n" in out


def test_servers_that_are_all_down_are_refused_and_named(refused):
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    told = refused(*urls)
    assert told.startswith("none of the servers responds; is ComfyUI running there?")
    assert all(url in told for url in urls)


def checked(url, **needed):
    backend = ServerBackend(url)
    needs = {"classes": {}, "wanstream": VERSION, "url": "http://other", **needed}
    backend.faults_of_server = Requirements(**needs).faults
    return backend


def test_a_server_that_returns_is_checked_again(serve):
    url, state = serve()
    backend = checked(url, classes={"1": "WanStreamSampler"})
    backend.check()
    twin = checked(url, instances={state.about["instance"]: "http://other"})
    with pytest.raises(UnsuitableError, match=f"{url} and http://other are one server"):
        twin.check()
    state.about = {"version": "0.0.9", "instance": "later"}
    with pytest.raises(UnsuitableError, match=r"has WanStream 0\.0\.9, and http://other has 0"):
        backend.check()


@pytest.mark.parametrize(
    ("failed", "found", "message"),
    [
        ("/wanstream/about", (500, b""), "answers with status 500"),
        ("/object_info", (200, {"error": "loading"}), "/object_info answers, but not as ComfyUI"),
    ],
)
def test_a_server_whose_description_fails_is_checked_later(
    serve, answering, failed, found, message
):
    backend = checked(serve()[0])
    answering(lambda state, route, body: route == failed and found)
    with pytest.raises(UnreachableError, match=message):
        backend.check()
    answering(lambda state, route, body: None)
    backend.check()


def test_localhost_is_recorded_as_its_number():
    for host, recorded in (
        ("localhost:8188", "127.0.0.1:8188"),
        ("localhost/a", "127.0.0.1/a"),
        ("localhost.example:8188", "localhost.example:8188"),
    ):
        assert ServerBackend(f"http://{host}").address == f"http://{recorded}"


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
def test_addresses_of_one_server(first, second, same):
    """Process ids count more: one name may stand for several machines, or have several names."""
    assert same_server([first, second], [None, None]) == same
    assert same_server([first, second], ["a", None]) == same
    assert not same_server([first, second], ["a", "b"])
    assert same_server([first, second], ["a", "a"])
    assert endpoints("http://127.0.0.1:8188") == {("127.0.0.1", 8188, "")}


def test_choices_of_a_workflow_without_a_list_are_any():
    sockets = {"Load": sockets_of({"required": {"file": [["a", "b"]], "text": ["STRING"]}})}
    used = [("file", "a"), ("text", "any"), *(("file", f"c{number}") for number in range(9))]
    choices = tuple(UsedChoice(class_type="Load", name=name, value=each) for name, each in used)
    unknown = {"comfyui": "0.18.1", "wanstream": None, "instance": None}
    report = ServerReport(url="http://x", sockets=sockets, **unknown)
    first, *files, more = Requirements(classes={"1": "Load"}, choices=choices).faults(report)
    remedy = "add what is missing, or leave this server out"
    assert first == f"http://x lacks 9 choices of the rows that another server has: {remedy}"
    assert (files, more) == ([f"Load.file 'c{number}'" for number in range(8)], "and 1 more")


def test_a_batch_that_gives_up_can_be_resumed(tmp_path, serve, run, answering):
    url, state = serve()
    gone = (502, b"")
    answering(lambda self, route, _: len(self.history) >= 2 and route != "/view" and gone)
    code, out, err = run(url, options=["--timeout", "1"])
    assert code == FAILED
    assert "answers with status 502; gave up after" in err
    folder = tmp_path / "out"
    done = len(videos(folder))
    left = f"{6 - done} are left: run the same command again to resume"
    assert out == f"{done} of 6 rows are done in {folder}; {left}\n"
    answering(lambda self, route, body: None)
    assert run(url)[0] == DONE
    assert len(videos(folder)) == len(state.history) == 6, "its rows were found by their ids"


def test_a_file_not_in_the_list_but_taken_by_the_server_runs(serve, run, tmp_path):
    """The node's own check may accept it."""
    url, state = serve()
    (state.models / "diffusion_models" / T2V["experts"]["inputs"]["high_noise"]).unlink()
    assert run(url, rows=2)[0] == DONE
    assert len(videos(tmp_path / "out")) == 2
    assert state.pending == []


def test_rows_refused_by_all_servers_have_one_line(serve, run, answering):
    """Each is tried on both: another version of a node may have another range."""
    posts = []
    error = {"type": "value_bigger_than_max", "message": "too big", "details": "crf"}
    node = {"errors": [error], "dependent_outputs": ["save"], "class_type": "WanStreamSaveVideo"}
    refusal = {"error": {"message": "", "details": ""}, "node_errors": {"save": node}}

    def refuse(state, route, body):
        if route != "/prompt" or body["prompt"]["sampler"]["inputs"]["seed"] not in (2, 3, 4, 6):
            return None
        posts.append((400, refusal))
        return posts[-1]

    answering(refuse)
    urls = sorted([serve()[0], serve()[0]])
    code, _, err = run(*urls)
    assert (code, len(posts)) == (FAILED, 8)
    reason = "node save (WanStreamSaveVideo): too big: crf"
    assert err.splitlines()[-1] == f"lines 2-4, 6 failed: on {' and '.join(urls)}: {reason}"


def test_the_summary_has_ten_reasons_and_the_place_of_the_others(serve, run, answering, tmp_path):
    def refuse(state, route, body):
        if route != "/prompt":
            return None
        message = f"no {body['prompt']['sampler']['inputs']['seed']}"
        error = {"message": message, "details": "all about it\nin two lines"}
        return 400, {"error": error, "node_errors": {}}

    answering(refuse)
    code, _, err = run(serve()[0], rows=14)
    assert code == FAILED
    where = f"their reasons are above, and in {tmp_path / 'out' / 'journal.sqlite'}"
    last = ["line 10 failed: no 10: all about it", f"4 more failed: {where}"]
    assert err.splitlines()[-2:] == last


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"sampler.cfg_high": -5}, "cfg_high"),
        ({"sampler.switch_step": 99}, "switch step 99"),
        ({"save.filename_prefix": "../../x"}, "'../../x' leaves the folder output:"),
        ({"save.filename_prefix": "/mnt/videos/x"}, "leaves the folder output:"),
        ({"save.crf": 99}, "bigger than max of 51"),
        ({"sampler.seed": 5}, ""),
    ],
)
def test_a_dry_run_judges_a_row_for_a_server_as_for_this_process(serve, run, tmp_path, row, reason):
    """The server itself can judge a workflow only by running it."""
    url, state = serve()
    here = run(rows=[row], options=["--dry-run", "--models", state.models])
    # Checks on several inputs raise a refusal. The other rows must still be judged.
    code, _, told = run(url, rows=[row, {"sampler.seed": 5}], options=["--dry-run"])
    assert code == here[0] == (INVALID if reason else DONE)
    assert reason in told
    # All nodes are ours.
    for words in ("Exception when validating", "line 2:", "were judged", "on-the-server"):
        assert words not in told
    assert not (tmp_path / "out").exists()


def test_what_a_dry_run_cannot_judge_is_named(serve, run, monkeypatch):
    monkeypatch.setattr(comfy_like, "object_info", lambda models: {"Odd": ODD})
    code, _, told = run(serve()[0], rows=[{"2.n": 1}], options=["--dry-run"], workflow=OTHER_NODE)
    assert code == DONE
    assert "only types, ranges and choices of Odd were checked" in told
