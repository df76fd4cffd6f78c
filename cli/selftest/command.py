"""The command: runs the checks, prints the table and the verdict, and writes the file."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...bench import Result, describe_machine, hardware, versions
from ...devices import forget, free_bytes, is_out_of_memory, total_bytes
from ...schema import T2V_A14B, format_size
from ...testing import TinyShape
from ..arguments import DONE, FAILED, INVALID, ArgumentError, create_output_folder, measured_device
from ..options import SelftestOptions
from .device_checks import (
    Subject,
    check_arithmetic,
    check_copies,
    check_decoding,
    check_overlap,
    check_page_locks,
    check_rates,
    check_streams,
)
from .findings import Finding, findings_table, verdict
from .run_checks import check_given_back, check_policies, check_result, check_short_memory, prepared_runs

CASE = "selftest"
METHOD = (
    "`wanstream selftest`: copies, streams and decoding compared bit by bit; whole runs with random experts under "
    "several policies compared with resident blocks; rates as `wanstream probe` measures them; overlap with four "
    "random blocks in the size of Wan2.2 A14B"
)
SMALL = TinyShape(layers=4, ffn_dim=256)
LARGE = TinyShape(layers=6, heads=8, ffn_dim=4096)
"""Experts of a GPU: blocks of 34 MB, so that copies take long enough to be overtaken."""

Check = Callable[[], Finding]


def selftest(options: SelftestOptions) -> int:
    """Check a device, print the findings, write them as JSON, and return the exit code."""
    try:
        device = measured_device(options.device, options.models)
        create_output_folder(options.output)
    except ArgumentError as err:
        print(err, file=sys.stderr)
        return INVALID
    subject = Subject(
        device=device,
        models=options.models,
        tiny=SMALL if device.type == "cpu" else LARGE,
        block=T2V_A14B,
    )
    findings = run_all(subject)
    for line in (*describe_machine(device).values(), findings_table(findings), verdict(findings).words):
        print(line)
    result = result_of(subject, findings)
    try:
        print(f"attach this file to an issue, or give it to `wanstream plan --gpu`: {result.save(options.output)}")
    except OSError as err:
        print(f"the file cannot be written: {err}", file=sys.stderr)
        return FAILED
    return DONE if verdict(findings).works else FAILED


def run_all(subject: Subject) -> dict[str, Finding]:
    """Run every check in turn and return its finding by name."""
    findings = dict[str, Finding]()
    with tempfile.TemporaryDirectory(prefix="wanstream-selftest-") as folder, _checks(subject, Path(folder)) as checks:
        for name, check in checks.items():
            print(f"checking {name}", file=sys.stderr, flush=True)
            start = time.perf_counter()
            finding = run_check(check, subject.device)
            figures = {**finding.figures, "seconds_taken": round(time.perf_counter() - start, 3)}
            findings[name] = replace(finding, figures=figures)
    return findings


def run_check(check: Check, device: torch.device) -> Finding:
    """Return the finding of a check; an error is a finding, too."""
    try:
        return check()
    except Exception as err:  # noqa: BLE001 - every error of a device belongs in the report
        # Names of functions without folders: the file is made to be published.
        frames = [
            f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in traceback.extract_tb(err.__traceback__)
        ]
        figures = {"error": f"{type(err).__name__}: {err}", "traceback": frames}
        short = isinstance(err, RuntimeError) and is_out_of_memory(err)
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
    return Finding(outcome="failed", words=str(figures["error"]).splitlines()[0], figures=figures)


def result_of(subject: Subject, findings: Mapping[str, Finding]) -> Result:
    """Return the findings as a result file, with the measured machine if there is one."""
    figures: dict[str, Any] = {
        "verdict": verdict(findings).words,
        "works": verdict(findings).works,
        "described": describe_machine(subject.device),
        "checks": {name: asdict(finding) for name, finding in findings.items()},
    }
    if "machine" in findings["rates"].figures:
        figures["machine"] = findings["rates"].figures["machine"]
    return Result(case=CASE, method=METHOD, figures=figures, hardware=hardware(subject.device), versions=versions())


@contextmanager
def _checks(subject: Subject, folder: Path) -> Iterator[dict[str, Check]]:
    checks: dict[str, Check] = {
        "copies": partial(check_copies, subject),
        "streams": partial(check_streams, subject),
        "page locks": partial(check_page_locks, subject),
        "decoding": partial(check_decoding, subject),
    }
    with prepared_runs(subject, folder) as runs:
        checks |= {f"policies, {name}": partial(check_policies, runs, name) for name in runs.formats}
        checks |= {
            "result": partial(check_result, runs),
            "short memory": partial(check_short_memory, runs),
            "memory given back": partial(check_given_back, runs),
            "overlap": partial(check_overlap, subject),
            "rates": partial(check_rates, subject),
            "arithmetic": partial(check_arithmetic, subject),
        }
        yield checks
