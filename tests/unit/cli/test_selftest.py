"""`wanstream selftest`: verdicts, tables, errors as findings, and the whole command on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace

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
    findings = (Finding(outcome=each, words="3 of 4") for each in outcomes)
    return {f"check {number}": finding for number, finding in enumerate(findings)}


@pytest.mark.parametrize(
    ("outcomes", "words", "works"),
    [
        (("passed", "not needed"), "WORKS: every check passed.", True),
        (("passed", "limited", "limited"), "WORKS, slower than it could: check 1, check 2.", True),
        (("limited", "not run"), "INCOMPLETE: check 1 could not be checked. All other", False),
        (("failed", "limited", "not run"), "FAILED: check 0.", False),
    ],
)
def test_verdict_is_that_of_the_worst_finding(outcomes, words, works):
    found_works, found_words = verdict(found(*outcomes))
    assert found_words.startswith(words)
    assert found_works is works


def test_table_ends_with_the_remedies():
    limited = Finding(outcome="limited", words="1 GB", remedy="raise it")
    lines = findings_table({**found("passed"), "locks": limited}).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["found", "4", "GB"]
    assert lines[3:] == ["locks: raise it"]


def test_error_is_a_finding_without_folders():
    def fails() -> Finding:
        raise RuntimeError("the first line\nthe second")

    finding = run_check(fails, CPU)
    assert (finding.outcome, finding.words) == ("failed", "RuntimeError: the first line")
    assert any("test_selftest.py" in frame for frame in finding.figures["traceback"])
    assert not any("/" in frame for frame in finding.figures["traceback"])


@pytest.mark.slow  # computes every check of the command
def test_command_on_a_cpu(tmp_path, monkeypatch, capsys):
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
    for name in ("policies, bf16", "policies, GGUF Q4_K_M", "result", "rates"):
        assert outcomes[name] == "passed", name
    assert str(tmp_path) not in path.read_text(encoding="utf-8"), "the file is made to be published"
    asked = PlanOptions(machine=MachineOptions(gpu=str(path)), size="832x480x81")
    assert requested_machine(asked).to_dict() == figures["machine"]


def test_wrong_arguments(tmp_path, refusal):
    (tmp_path / "file").touch()
    for device, option, place, message in (
        ("cpu", "--out", "file", "File exists"),
        ("cpu", "--models", "none", "no such file or folder"),
        ("cuda:99", "--out", "", "cuda:99 does not exist"),
    ):
        assert message in refusal("selftest", "--device", device, option, str(tmp_path / place))


def test_arithmetic_of_a_block_is_printed_and_stored():
    subject = Subject(device=CPU, models=None, tiny=SMALL, block=TINY_BLOCK, metered_tokens=64)
    finding = check_arithmetic(subject)
    assert finding.outcome == "passed"
    assert "of the device's limit (" in finding.words
    stored = json.loads(json.dumps(finding.figures))
    assert stored["tokens"] == 64
    assert {"int8", dtype_name(auto_dtype(subject.device))} <= set(stored["arithmetic"])
    assert all(0 < each["limit_share"] <= 1.5 for each in stored["arithmetic"].values())
