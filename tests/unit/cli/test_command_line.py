"""Mistyped options and commands are refused with the nearest known one."""

from __future__ import annotations

import pytest

from wanstream.cli import main

PLAN = ("plan", "--gpu", "this", "--size", "64x64x5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnu",), "did you mean run?"),
        (("run", "x.json", "--out", "o", "--modls", "m"), "unrecognized arguments: --modls m; did you mean --models?"),
        (("batch", "j", "--workflow", "w", "--out", "o", "--dry-rnu"), "--dry-rnu; did you mean --dry-run?"),
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


def test_a_name_that_resembles_nothing_is_refused_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main((*PLAN, "--xyzzy"))
    told = capsys.readouterr().err
    assert "unrecognized arguments: --xyzzy" in told
    assert "did you mean" not in told
