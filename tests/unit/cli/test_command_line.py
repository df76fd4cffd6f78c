"""Mistyped options and commands are refused with the nearest known one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanstream.cli import main
from wanstream.cli.arguments import INVALID

PLAN = ("plan", "--gpu", "this", "--size", "64x64x5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnu",), "did you mean run?"),
        (
            ("run", "x.json", "--out", "o", "--modls", "m"),
            "unrecognized arguments: --modls m; did you mean --models?",
        ),
        (
            ("batch", "j", "--workflow", "w", "--out", "o", "--dry-rnu"),
            "--dry-rnu; did you mean --dry-run?",
        ),
        ((*PLAN, "--stps=3"), "--stps=3; did you mean --steps?"),
        ((*PLAN, "--cfg", "hig"), "did you mean high?"),
    ],
)
def test_the_nearest_name_is_given(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "probe", "plan", "bench"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "--device gpu: 'gpu' is not a device name: use cpu or one of cuda, xpu, mps"),
        ("cuda:7", "--device cuda:7: cuda:7 does not exist"),
        (
            "mps:1",
            "--device mps:1: mps:1 does not exist, torch finds 1: use a device up to mps:0, or cpu",
        ),
        ("meta", "--device meta: meta is not supported: use cpu or one of cuda, xpu, mps"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(
    command: str,
    device: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    options = {
        "run": (str(tmp_path / "x.json"), "--out", str(tmp_path), "--models", str(tmp_path)),
        "plan": PLAN[1:],
        "bench": ("--out", str(tmp_path)),
    }
    assert main((command, *options.get(command, ()), "--device", device)) == INVALID
    assert message in capsys.readouterr().err


def test_a_name_that_resembles_nothing_is_refused_without_a_guess(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main((*PLAN, "--xyzzy"))
    told = capsys.readouterr().err
    assert "unrecognized arguments: --xyzzy" in told
    assert "did you mean" not in told
