"""Errors that leave a device unusable in the same process."""

from __future__ import annotations

import pytest
import torch

from wanstream.devices import is_broken_device

ILLEGAL = "CUDA error: an illegal memory access was encountered"
needs_class = pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")


def raised_from(cause: RuntimeError | None, context: RuntimeError | None = None) -> Exception:
    """Return an error caused by another one, or raised after another one was handled."""
    with pytest.raises(ValueError, match="node 3") as raised:
        try:
            raise context or cause
        except RuntimeError:
            raise ValueError("node 3") from cause
    return raised.value


@needs_class
def test_a_device_error_breaks_it_unless_memory_ran_out():
    illegal, no_memory = map(torch.AcceleratorError, (ILLEGAL, "CUDA error: out of memory"))
    assert is_broken_device(illegal)
    assert is_broken_device(raised_from(illegal))
    assert not is_broken_device(no_memory)
    assert not is_broken_device(raised_from(no_memory))
    assert not is_broken_device(raised_from(None, context=illegal)), "it was handled"


@pytest.mark.parametrize(
    "error", [None, RuntimeError("CUDA error: x"), torch.OutOfMemoryError("x"), ValueError("x")]
)
def test_other_errors_break_no_device(error):
    assert not is_broken_device(error)


def test_a_torch_without_the_class_reports_no_broken_device(monkeypatch):
    monkeypatch.delattr(torch, "AcceleratorError", raising=False)
    assert not is_broken_device(raised_from(RuntimeError(ILLEGAL)))
