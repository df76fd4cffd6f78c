"""Mistyped options and commands, devices, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

from wanstream.batch.running.stop_request import StopRequest
from wanstream.cli import main
from wanstream.cli.arguments import handle_sigint

PLAN = ("plan", "--gpu", "this", "--size", "64x64x5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnu",), "did you mean run?"),
        (("run", "x", "--out", "o", "--modls", "m"), "--modls m; did you mean --models?"),
        (("batch", "j", "--workflow", "w", "--out", "o", "--dry-rnu"), "did you mean --dry-run?"),
        ((*PLAN, "--stps=3"), "--stps=3; did you mean --steps?"),
        ((*PLAN, "--cfg", "hig"), "did you mean high?"),
        ((*PLAN, "--xyzzy"), "unrecognized arguments: --xyzzy\n"),
        (("batch", "--workflow", "w", "--out", "o", "--ray", "J.JSON"), "JOBS comes before --ray"),
        (("batch", "--workflow", "w", "--out", "o", "--ray", "j.csv"), "j.csv is a file, and not"),
    ],
)
def test_nearest_name_is_given(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "probe", "plan", "bench"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "'gpu' is not a device name: use cpu or one of cuda, xpu, mps"),
        ("cuda:7", "cuda:7 does not exist"),
        ("mps:1", "mps:1 does not exist, torch finds 1: use a device up to mps:0, or cpu"),
        ("meta", "meta is not supported: use cpu or one of cuda, xpu, mps"),
    ],
)
def test_device_that_cannot_be_used_is_refused(
    command, device, message, tmp_path, monkeypatch, refusal
):
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    here = str(tmp_path)
    options = {"plan": PLAN[1:], "bench": ("--out", here)}
    options["run"] = (str(tmp_path / "x.json"), "--out", here, "--models", here)
    said = refusal(command, *options.get(command, ()), "--device", device)
    assert f"--device {device}: {message}" in said


@pytest.fixture
def as_in_a_terminal():
    """Restore Ctrl-C, which a shell makes background programs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.usefixtures("as_in_a_terminal")
def test_two_ctrl_c_are_counted_and_the_third_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    stop = StopRequest()
    heard = []

    def on_request() -> None:
        stop.count += 1
        heard.append((stop.requested, stop.immediate))

    with handle_sigint(on_request, requests=2):
        assert not stop.requested
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [(True, False), (True, True)]
    assert signal.getsignal(signal.SIGINT) is before
    with handle_sigint(on_request, requests=1):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
