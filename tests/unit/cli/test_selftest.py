"""`wanstream selftest`: verdicts, tables, errors as findings, and the whole command on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.cli import main
from wanstream.cli.options import MachineOptions, PlanOptions
from wanstream.cli.plan import requested_machine
from wanstream.cli.selftest import command
from wanstream.cli.selftest.command import SMALL, run_check
from wanstream.cli.selftest.device_checks import Subject, check_arithmetic
from wanstream.cli.selftest.findings import Finding, Outcome, findings_table, verdict
from wanstream.devices import auto_dtype, dtype_name
from wanstream.shapes import T2V_A14B
from wanstream.testing import TinyShape

TINY_BLOCK = replace(T2V_A14B, width=256, ffn_width=512, blocks=4)
CPU = torch.device("cpu")


def found(*outcomes: Outcome) -> dict[str, Finding]:
    return {
        f"check {number}": Finding(outcome=each, words="3 of 4")
        for number, each in enumerate(outcomes)
    }


@pytest.mark.parametrize(
    ("outcomes", "words", "works"),
    [
        (("passed", "not needed"), "WORKS: every check passed.", True),
        (("passed", "limited", "limited"), "WORKS, slower than it could: check 1, check 2.", True),
        (
            ("limited", "not run"),
            "INCOMPLETE: check 1 could not be checked. All other checks passed.",
            False,
        ),
        (("failed", "limited", "not run"), "FAILED: check 0.", False),
    ],
)
def test_the_verdict_is_that_of_the_worst_finding(
    outcomes: tuple[Outcome, ...], words: str, works: bool
) -> None:
    found_works, found_words = verdict(found(*outcomes))
    assert found_words.startswith(words)
    assert found_works is works


def test_the_table_ends_with_the_remedies() -> None:
    findings = {
        **found("passed"),
        "locks": Finding(outcome="limited", words="1 GB", remedy="raise it"),
    }
    lines = findings_table(findings).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["found", "4", "GB"]
    assert lines[3:] == ["locks: raise it"]


def test_an_error_is_a_finding_without_folders() -> None:
    def fails() -> Finding:
        raise RuntimeError("the first line\nthe second")

    finding = run_check(fails, CPU)
    assert (finding.outcome, finding.words) == ("failed", "RuntimeError: the first line")
    assert any("test_selftest.py" in frame for frame in finding.figures["traceback"])
    assert not any("/" in frame for frame in finding.figures["traceback"])


@pytest.mark.slow  # computes every check of the command
def test_the_command_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "T2V_A14B", TINY_BLOCK)
    monkeypatch.setattr(command, "SMALL", TinyShape(layers=2, ffn_dim=256))
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "WORKS: every check passed." in printed
    [path] = (tmp_path / "new").glob("selftest_cpu-*.json")
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    outcomes = {name: check["outcome"] for name, check in figures["checks"].items()}
    assert all(outcomes.pop(name) == "not needed" for name in command.WITHOUT_STREAMS)
    assert {
        name: outcomes[name]
        for name in ("policies, bf16", "policies, GGUF Q4_K_M", "result", "rates")
    } == (dict.fromkeys(("policies, bf16", "policies, GGUF Q4_K_M", "result", "rates"), "passed"))
    assert str(tmp_path) not in path.read_text(encoding="utf-8"), "the file is made to be published"
    machine = requested_machine(
        PlanOptions(machine=MachineOptions(gpu=str(path)), size="832x480x81")
    )
    assert machine.to_dict() == figures["machine"]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "file"
    taken.touch()
    assert main(["selftest", "--device", "cpu", "--out", str(taken)]) == 2
    assert main(["selftest", "--device", "cpu", "--models", str(tmp_path / "none")]) == 2
    assert main(["selftest", "--device", "cuda:99", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "File exists" in told.err
    assert "no such file or folder" in told.err
    assert "cuda:99 does not exist" in told.err


def test_the_arithmetic_of_a_block_is_printed_and_stored() -> None:
    subject = Subject(device=CPU, models=None, tiny=SMALL, block=TINY_BLOCK, metered_tokens=64)
    finding = check_arithmetic(subject)
    assert finding.outcome == "passed"
    assert "of the device's limit (" in finding.words
    stored = json.loads(json.dumps(finding.figures))
    assert stored["tokens"] == 64
    assert {"int8", dtype_name(auto_dtype(subject.device))} <= set(stored["arithmetic"])
    assert all(0 < each["limit_share"] <= 1.5 for each in stored["arithmetic"].values())
