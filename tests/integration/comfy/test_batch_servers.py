"""`wanstream batch` on two real ComfyUI servers: a killed one, and checks on unfit ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import av
import pytest

from wanstream.batch.servers.server_backend import ServerBackend
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID
from wanstream.schema import VERSION
from wanstream.tests.faults.campaign import small_workflow
from wanstream.tests.integration.comfy.test_batch_server import (
    client,
    command_line,
    rows_in,
    wait_until,
)
from wanstream.tools.comfyui import PACK, ROOT, ComfyUI, Server, free_port, running_server

pytestmark = pytest.mark.comfy

ROWS = 8


def base_of(folder: Path, models: Path) -> Path:
    """A base directory with this pack and the test model."""
    for name in ("custom_nodes", "input", "output"):
        (folder / name).mkdir(parents=True)
    (folder / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    (folder / "models").symlink_to(models, target_is_directory=True)
    return folder


def videos_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each video's seed and encoded frames.

    ComfyUI adds input hashes to the prompt in a file.
    """
    found = {}
    for path in folder.glob("*.mp4"):
        with av.open(str(path)) as container:
            seed = json.loads(container.metadata["prompt"])["sampler"]["inputs"]["seed"]
            found[path.name] = seed, b"".join(bytes(packet) for packet in container.demux(video=0))
    return found


def test_a_server_reports_the_version_of_the_pack_and_its_process(server: Server) -> None:
    first, second = ServerBackend(server.url).describe(), ServerBackend(f"{server.url}/").describe()
    assert first.wanstream == VERSION
    assert first.instance == second.instance
    assert len(first.instance or "") == 36


def test_the_same_server_under_two_names_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = server.url.replace("127.0.0.1", "localhost")
    call = [
        *command_line(tmp_path, server.url, [{"sampler.seed": 1}], small_workflow()),
        "--server",
        other,
    ]
    assert main(call) == INVALID
    assert f"--server {server.url} and --server {other} are one server" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_two_servers_of_which_one_is_killed_make_the_files_of_one_process(
    comfyui: ComfyUI, sample_models: Path, tmp_path: Path
) -> None:
    rows = [{"sampler.seed": 1000 + number} for number in range(ROWS)]
    (tmp_path / "one").mkdir()
    alone = command_line(tmp_path / "one", "", rows, small_workflow())[: -len(["--server", ""])]
    assert main([*alone, "--models", str(sample_models)]) == DONE
    expected = videos_in(tmp_path / "one" / "out")
    assert len(set(expected.values())) == ROWS

    ports, log, out = [free_port(), free_port()], tmp_path / "client.log", tmp_path / "out"
    bases = [base_of(tmp_path / f"base{number}", sample_models) for number in (1, 2)]
    with ExitStack() as ending:
        servers = [
            ending.enter_context(running_server(comfyui, base, port=port))
            for base, port in zip(bases, ports, strict=True)
        ]
        call = [
            *command_line(tmp_path, servers[0].url, rows, small_workflow()),
            "--server",
            servers[1].url,
        ]
        process = client(call, log)
        ending.callback(lambda: process.kill())
        wait_until(lambda: len([*out.glob("*.mp4")]) >= 2, 300, log)
        os.kill(servers[1].process_id, signal.SIGKILL)
        time.sleep(1)
        servers[1] = ending.enter_context(running_server(comfyui, bases[1], port=ports[1]))
        assert process.wait(400) == DONE, log.read_text(errors="replace")[-4000:]
        assert main(call) == DONE, "the same command again"
    assert videos_in(out) == expected
    assert rows_in(out, "state") == [("done",)] * ROWS
    addresses = {address for (address,) in rows_in(out, "backend")}
    assert addresses == {server.url for server in servers}, "both have made rows"
    assert sum(attempts - 1 for (attempts,) in rows_in(out, "attempts")) <= 4, (
        "two rows on each may be posted again"
    )
