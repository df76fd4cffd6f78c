"""`wanstream selftest` passes on a device, and on the checked device it finds planted faults."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from wanstream.cli.selftest import device_checks, run_checks
from wanstream.cli.selftest.command import LARGE, run_all, run_check
from wanstream.cli.selftest.device_checks import Subject
from wanstream.cli.selftest.findings import verdict
from wanstream.cli.selftest.run_checks import prepared_runs
from wanstream.host import machine_profile
from wanstream.offload.probes import machine as probe
from wanstream.shapes import T2V_A14B, VideoShape
from wanstream.testing import TinyShape
from wanstream.tests.support.accelerator import HAS_REAL
from wanstream.tests.support.checked_device import machine as checked
from wanstream.tests.support.checked_device import tensors
from wanstream.tests.support.offload.mutations import Mutation, Mutations
from wanstream.wan.experts.models import ExpertModels

WAIT_OF_VISIT = Mutation(
    "CudaStreams._wait_for: self._runtime.current_stream().wait_event(event)", "CudaBackend"
)
FORMATS = ("bf16", "fp8 with a LoRA", run_checks.IN_INT8)
"""Formats on the checked device. Other tests cover the rest."""


@pytest.fixture
def subject(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if HAS_REAL:
        return Subject(device=gpu.device, models=None, tiny=LARGE, block=T2V_A14B)
    monkeypatch.setattr(device_checks, "SIZES", (1, 4097))
    monkeypatch.setattr(run_checks, "STEPS", 2)
    monkeypatch.setattr(run_checks, "VIDEO", VideoShape(width=32, height=32, frames=5))
    monkeypatch.setattr(probe, "PROBED_BYTES", 2**20)
    monkeypatch.setattr(probe, "SIDE", 256)
    monkeypatch.setattr(machine_profile, "BUSY_TOKENS", 64)
    monkeypatch.setattr(machine_profile, "SCRATCH_FILE_BYTES", 2**24)
    write = run_checks._write_experts

    def write_some(*given):
        return {name: ref for name, ref in write(*given).items() if name in FORMATS}

    monkeypatch.setattr(run_checks, "_write_experts", write_some)
    tiny = TinyShape(layers=6, ffn_dim=512)
    block = replace(T2V_A14B, width=256, ffn_width=512, blocks=4)
    sizes = {"tokens": 64, "metered_tokens": 64, "lock_bytes": 2**16}
    video = VideoShape(width=64, height=64, frames=5)
    return Subject(device=gpu.device, models=None, tiny=tiny, block=block, video=video, **sizes)


def test_every_check_passes(subject):
    findings = run_all(subject)
    works, _ = verdict(findings)
    assert works, findings
    assert not {name for name, finding in findings.items() if finding.outcome == "not needed"}


@pytest.fixture
def checked_subject(gpu, subject):
    machine = gpu.need_fake("a fault is planted in it")
    yield subject
    machine.problems.clear()  # the planted fault's problems


def found(check, subject):
    return run_check(partial(check, subject), subject.device)


@contextmanager
def runs_found(subject, folder):
    with prepared_runs(subject, folder) as runs:
        yield lambda check, *args: run_check(partial(check, runs, *args), subject.device)


def test_copies_that_lose_a_byte(checked_subject, monkeypatch):
    copy = tensors._to_device

    def loses_one(into: Any, source: torch.Tensor, *, non_blocking: bool) -> None:
        copy(into, source, non_blocking=non_blocking)
        if source.numel() > 4096:
            into[-1:].zero_()

    monkeypatch.setattr(tensors, "_to_device", loses_one)
    finding = found(device_checks.check_copies, checked_subject)
    assert finding.outcome == "failed"
    assert "4.10 KB of page-locked RAM" in finding.words


def test_streams_that_do_not_wait(checked_subject, monkeypatch):
    monkeypatch.setattr(checked.Stream, "wait_event", lambda stream, event: None)
    finding = found(device_checks.check_streams, checked_subject)
    assert finding.outcome == "failed"
    assert "did not wait for the work before them" in finding.words


def test_page_locks_that_are_refused(gpu, checked_subject):
    gpu.machine.refuse_locks_beyond = 2**15
    finding = found(device_checks.check_page_locks, checked_subject)
    assert finding.outcome == "limited"
    assert "0 B locked, then refused: no more pages" in finding.words
    assert "wslconfig" in finding.remedy


def test_a_decoding_kernel_that_rounds_otherwise(checked_subject, monkeypatch):
    decode = probe.decode_tensor

    def rounds(stored: torch.Tensor, into: torch.Tensor, **settings: Any) -> None:
        decode(stored, into, **settings)
        packing = settings.get("packing")
        if into.device.type != "cpu" and packing is not None and packing.name == "Q6_K":
            into.view(torch.int32).bitwise_or_(1)

    monkeypatch.setattr(probe, "decode_tensor", rounds)
    finding = found(device_checks.check_decoding, checked_subject)
    assert finding.outcome == "failed"
    assert finding.words.endswith(": Q6_K")


def test_a_visit_that_does_not_wait_for_its_copy(gpu, checked_subject, tmp_path):
    gpu.machine.eagerness = 0.0  # without the wait, the copy has not even begun
    mutations = Mutations()
    with mutations.installed(), runs_found(checked_subject, tmp_path) as check:
        mutations.removed = {WAIT_OF_VISIT}
        finding = check(run_checks.check_policies, "bf16")
    assert WAIT_OF_VISIT in mutations.reached
    assert finding.outcome == "failed", "by other latents, or by times that cannot be read yet"


def test_a_shortage_that_is_not_recognised(checked_subject, tmp_path, monkeypatch):
    allocate = checked.Device.allocate

    def fails_in_other_words(*given: Any) -> checked.Block:
        try:
            return allocate(*given)
        except torch.OutOfMemoryError as err:
            raise RuntimeError("driver error 77") from err

    monkeypatch.setattr(checked.Device, "allocate", fails_in_other_words)
    with runs_found(checked_subject, tmp_path) as check:
        finding = check(run_checks.check_short_memory)
    assert (finding.outcome, finding.words) == ("failed", "RuntimeError: driver error 77")


def test_memory_that_is_kept_after_closing(checked_subject, tmp_path, monkeypatch):
    kept = []
    close = ExpertModels.close

    def keeps(models: ExpertModels) -> None:
        kept.extend(models.bare.values())
        close(models)

    with runs_found(checked_subject, tmp_path) as check:
        monkeypatch.setattr(ExpertModels, "close", keeps)
        finding = check(run_checks.check_given_back)
        kept.clear()
    assert finding.outcome == "failed"
    assert "kept after closing" in finding.words


def test_a_device_that_is_full(gpu, checked_subject, tmp_path):
    with runs_found(checked_subject, tmp_path) as check:
        gpu.runtime.limit_memory(gpu.runtime.reserved_bytes() + 2**20)
        finding = check(run_checks.check_policies, "bf16")
        gpu.runtime.limit_memory(None)
    assert finding.outcome == "not run"
    assert "of 1.07 GB are free" in finding.words
    assert "close other programs" in finding.remedy
