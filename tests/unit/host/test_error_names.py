"""Names for our errors in ComfyUI, taken from their module."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.host.error_names import PACKAGE, name_errors_of, plainly_named
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.errors import InsufficientMemoryError, SmallerPolicyError
from wanstream.schema import OffloadPolicy

OURS: list[Callable[[], Exception]] = [
    lambda: RequestError("70 is not a multiple"),
    lambda: InsufficientMemoryError("9.3 GB"),
    lambda: SmallerPolicyError("again", OffloadPolicy.layerwise()),
    lambda: PeerLostError(104, "gone"),
    lambda: CheckpointFileError(Path("a.safetensors"), "is truncated"),
]


def full_type_name(error: BaseException) -> str:
    """Return the name as ComfyUI's execution.py does."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


@pytest.mark.parametrize("make", OURS, ids=lambda make: type(make()).__name__)
def test_ours_are_called_by_the_name_of_the_project(make: Callable[[], Exception]) -> None:
    before = make()

    @plainly_named
    def fails() -> None:
        raise before

    try:
        fails()
    except (ValueError, OSError):
        seen = sys.exc_info()[:2]
    assert seen == (type(before), before)
    made = make()
    assert full_type_name(before) == f"wanstream.{type(made).__name__}"
    assert isinstance(before, type(made))
    assert str(before) == str(made)
    assert full_type_name(made) == f"{type(made).__module__}.{type(made).__name__}", (
        "the class keeps its module"
    )
    travelled = pickle.loads(pickle.dumps(before))  # noqa: S301 - of our own
    assert type(travelled) is type(made)
    assert (str(travelled), travelled.__dict__) == (str(made), made.__dict__)


def test_errors_of_others_stay_as_they_are() -> None:
    error = torch.OutOfMemoryError("no room")

    @plainly_named
    def fails() -> None:
        raise error

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fails()
    assert type(raised.value) is torch.OutOfMemoryError
    assert raised.value.__traceback__ is not None


def test_what_returns_is_left_alone() -> None:
    assert plainly_named(divmod)(7, 2) == (3, 1)


def test_a_refusal_of_inputs_has_a_plain_name_and_the_inputs_keep_theirs() -> None:
    class Node:
        @classmethod
        def execute(cls) -> None: ...

        @classmethod
        def validate_inputs(cls, steps: int | None = None) -> bool:
            raise RequestError(f"{steps} steps")

    class Plain:
        @classmethod
        def execute(cls) -> None: ...

    before = inspect.getfullargspec(Node.validate_inputs)
    name_errors_of(Node)
    name_errors_of(Plain)
    # ComfyUI reads the signature: arbitrary keywords would switch off all input limits.
    assert inspect.getfullargspec(Node.validate_inputs) == before
    assert not hasattr(Plain, "validate_inputs")
    with pytest.raises(RequestError, match="0 steps") as refused:
        Node.validate_inputs(steps=0)
    assert full_type_name(refused.value) == "wanstream.RequestError"


def test_inherited_refusals_have_plain_names_too() -> None:
    class Sized:
        __module__ = f"{PACKAGE}.nodes.latents"

        @classmethod
        def validate_inputs(cls) -> bool:
            raise RequestError(cls.__name__)

    nodes = [type(name, (Sized,), {}) for name in ("Image", "Control")]
    for node in nodes:
        name_errors_of(node)
        with pytest.raises(RequestError, match=node.__name__) as refused:
            node.validate_inputs()
        assert full_type_name(refused.value) == "wanstream.RequestError"
    assert not hasattr(Sized.validate_inputs.__wrapped__, "__wrapped__"), "wrapped once"
