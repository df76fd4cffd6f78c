"""The command: runs the checks, prints the table and the verdict, and writes the file."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...bench import Result, describe_machine, hardware, versions
from ...devices import forget, free_bytes, is_out_of_memory, runtime_for, total_bytes
from ...schema.text import format_size
from ...shapes import T2V_A14B
from ...testing import TinyShape
from ..arguments import DONE, FAILED, create_output_folder, measured_device
from ..options import SelftestOptions
from ..terminal import print_note
from . import device_checks, run_checks
from .device_checks import Subject
from .findings import Finding, findings_table, verdict

CASE = "selftest"
METHOD = (
    "`wanstream selftest`: copies, streams and decoding compared bit by bit; whole runs with "
    "random experts under several policies compared with resident blocks; rates as `wanstream "
    "probe` measures them; overlap with four random blocks in the size of Wan2.2 A14B"
)
SMALL = TinyShape(layers=4, ffn_dim=256)
LARGE = TinyShape(layers=6, heads=8, ffn_dim=4096)
"""Experts for a GPU: blocks of 34 MB, so that copies take long enough to be overtaken."""

_IN_RAM = "this device computes in RAM, without streams"
WITHOUT_STREAMS = {
    **dict.fromkeys(("copies", "streams", "page locks", "decoding"), _IN_RAM),
    **dict.fromkeys(("short memory", "memory given back", "overlap"), _IN_RAM),
    "arithmetic": "a CPU decodes 8-bit matrices",
}
"""Checks that a device without streams does not need, with the reasons."""

Check = Callable[[], Finding]


def selftest(options: SelftestOptions) -> int:
    """Check a device, print the findings, write them as JSON, and return the exit code.

    Raises ArgumentError.
    """
    device = measured_device(options.device, options.models)
    # The checks take minutes, so a wrong folder is refused first.
    create_output_folder(options.output)
    subject = Subject(
        device=device,
        models=options.models,
        tiny=SMALL if device.type == "cpu" else LARGE,
        block=T2V_A14B,
    )
    findings = run_all(subject)
    print(*describe_machine(device).values(), findings_table(findings), sep="\n")
    works, words = verdict(findings)
    print(words)
    result = result_of(subject, findings)
    try:
        print(
            "attach this file to an issue, or give it to `wanstream plan --gpu`: "
            f"{result.save(options.output)}"
        )
    except OSError as err:
        print_note(f"the file cannot be written: {err}")
        return FAILED
    return DONE if works else FAILED


def run_all(subject: Subject) -> dict[str, Finding]:
    """Run every check in turn and return the findings by name."""
    findings = dict[str, Finding]()
    with (
        # The runs end first: Windows does not remove a folder with open files.
        tempfile.TemporaryDirectory(prefix="wanstream-selftest-") as folder,
        run_checks.prepared_runs(subject, Path(folder)) as runs,
    ):
        checks: dict[str, Check] = {
            "copies": partial(device_checks.check_copies, subject),
            "streams": partial(device_checks.check_streams, subject),
            "page locks": partial(device_checks.check_page_locks, subject),
            "decoding": partial(device_checks.check_decoding, subject),
            **{
                f"policies, {name}": partial(run_checks.check_policies, runs, name)
                for name in runs.formats
            },
            "result": partial(run_checks.check_result, runs),
            "short memory": partial(run_checks.check_short_memory, runs),
            "memory given back": partial(run_checks.check_given_back, runs),
            "overlap": partial(device_checks.check_overlap, subject),
            "rates": partial(device_checks.check_rates, subject),
            "arithmetic": partial(device_checks.check_arithmetic, subject),
        }
        for name, check in checks.items():
            print_note(f"checking {name}")
            start = time.perf_counter()
            if name in WITHOUT_STREAMS and runtime_for(subject.device) is None:
                finding = Finding(outcome="not needed", words=WITHOUT_STREAMS[name])
            else:
                finding = run_check(check, subject.device)
            figures = {**finding.figures, "seconds_taken": round(time.perf_counter() - start, 3)}
            findings[name] = replace(finding, figures=figures)
    return findings


def run_check(check: Check, device: torch.device) -> Finding:
    """Return a check's finding. An error is a finding, too."""
    try:
        return check()
    except Exception as err:  # noqa: BLE001 - every error of a device belongs in the report
        # Function names without folders: the file is made to be published.
        frames = [
            f"{Path(each.filename).name}:{each.lineno} {each.name}"
            for each in traceback.extract_tb(err.__traceback__)
        ]
        figures = {"error": f"{type(err).__name__}: {err}", "traceback": frames}
        short = isinstance(err, RuntimeError) and is_out_of_memory(err)
        # Before `free_bytes`: the traceback keeps the failed check's tensors alive.
        forget(err)
    total, _ = total_bytes(device)
    if short and total is not None:
        free = free_bytes(device) or 0
        return Finding(
            outcome="not run",
            words=f"out of memory: {format_size(free)} of {format_size(total)} are free",
            remedy="close other programs that use the device, and run the self-test again",
            figures=figures,
        )
    return Finding.failed(str(figures["error"]).splitlines()[0], **figures)


def result_of(subject: Subject, findings: Mapping[str, Finding]) -> Result:
    """Return the findings as a result file, with the measured machine if there is one."""
    works, words = verdict(findings)
    figures: dict[str, Any] = {
        "verdict": words,
        "works": works,
        "described": describe_machine(subject.device),
        "checks": {name: asdict(finding) for name, finding in findings.items()},
    }
    if "machine" in findings["rates"].figures:
        figures["machine"] = findings["rates"].figures["machine"]
    return Result(
        case=CASE,
        method=METHOD,
        figures=figures,
        hardware=hardware(subject.device),
        versions=versions(),
    )
