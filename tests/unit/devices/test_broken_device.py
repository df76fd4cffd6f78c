"""Errors that leave a device unusable in the same process."""

from __future__ import annotations

import pytest
import torch

from wanstream.devices import is_broken_device

needs_class = pytest.mark.skipif(
    not hasattr(torch, "AcceleratorError"), reason="torch before 2.8 has no such class"
)


def raised_from(cause: Exception) -> Exception:
    """Return an error caused by another one."""
    try:
        try:
            raise cause
        except Exception as err:
            raise ValueError("node 3") from err
    except ValueError as err:
        return err


@needs_class
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("message", "broken"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", False),
    ],
)
def test_an_error_of_the_device_breaks_it_unless_memory_ran_out(
    message: str, broken: bool, wrapped: bool
) -> None:
    error = torch.AcceleratorError(message)
    assert is_broken_device(raised_from(error) if wrapped else error) == broken


@needs_class
def test_an_error_that_was_handled_does_not_count() -> None:
    with pytest.raises(ValueError, match="the size is wrong") as raised:
        try:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        except RuntimeError:
            raise ValueError("the size is wrong") from None
    assert not is_broken_device(raised.value)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("CUDA error: x"), torch.OutOfMemoryError("x"), ValueError("x")]
)
def test_other_errors_break_no_device(error: Exception | None) -> None:
    assert not is_broken_device(error)


def test_a_torch_without_the_class_reports_no_broken_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "AcceleratorError", raising=False)
    assert not is_broken_device(
        raised_from(RuntimeError("CUDA error: an illegal memory access was encountered"))
    )
