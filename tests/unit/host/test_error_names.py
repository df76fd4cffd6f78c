"""Names for our errors in ComfyUI, taken from their module."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.host.error_names import PACKAGE, name_errors_of, plainly_named
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.sampling.steps import InsufficientMemoryError, RequestError, SmallerPolicyError
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
def test_error_of_ours_has_the_name_of_the_project(make):
    raised = make()
    made = make()
    kind = type(made)
    seen = failure_of(raised)
    assert seen is raised
    assert full_type_name(raised) == f"wanstream.{kind.__name__}"
    assert isinstance(raised, kind)
    assert str(raised) == str(made)
    assert full_type_name(made) == f"{kind.__module__}.{kind.__name__}", "the class is unchanged"
    travelled = pickle.loads(pickle.dumps(raised))  # noqa: S301 - of our own
    assert type(travelled) is kind
    assert (str(travelled), travelled.__dict__) == (str(made), made.__dict__)


def failure_of(error: Exception) -> Exception:
    """Return what a function with plain names raises for `error`."""

    @plainly_named
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        fails()
    assert (raised.type, raised.value) == (type(error), error)
    return raised.value


def test_other_errors_and_results_stay_as_they_are():
    raised = failure_of(torch.OutOfMemoryError("no room"))
    assert type(raised) is torch.OutOfMemoryError
    assert raised.__traceback__ is not None
    assert plainly_named(divmod)(7, 2) == (3, 1)


def test_refusal_of_inputs_has_a_plain_name():
    class Node:
        @classmethod
        def validate_inputs(cls, steps: int | None = None) -> bool:
            raise RequestError(f"{steps} steps")

        @classmethod
        def execute(cls) -> None: ...

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


def test_inherited_refusal_has_a_plain_name():
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
