"""Plain names for errors in ComfyUI, which shows the module of a class: for a pack that is its path on the disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

NAME = "wanstream"
PACKAGE = __name__.rsplit(".", 2)[0]
"""`wanstream`, or the path of the pack."""

P = ParamSpec("P")
R = TypeVar("R")


def plainly_named(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, whose errors of our classes are called `wanstream.<class>`; for what ComfyUI calls.

    They stay instances of their classes, and are pickled as such: the classes themselves keep the module by which
    another process finds them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as err:
            if not type(err).__module__.startswith(f"{PACKAGE}."):
                raise
            err.__class__ = _twin(type(err))
            # Not a bare `raise`: before Python 3.11 that keeps the former class in `sys.exc_info`.
            raise err

    # ComfyUI reads the inputs that `validate_inputs` judges by `getfullargspec`, which does not follow `wraps`.
    call.__signature__ = signature(function)  # type: ignore[attr-defined]
    return call


def name_errors_of(node: type[Any]) -> None:
    """Give plain names to the errors that `execute` and `validate_inputs` of a node class raise."""
    # ComfyUI calls `validate_inputs` of a node only where it is not that of the base class.
    for name in vars(node).keys() & {"execute", "validate_inputs"}:
        setattr(node, name, classmethod(plainly_named(getattr(node, name).__func__)))


def _twin(cls: Any) -> Any:
    """A class like `cls` in all but its module."""

    def reduced(self: Exception) -> tuple[Any, ...]:
        return (cls, *cls.__reduce__(self)[1:])

    body = {"__module__": NAME, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__reduce__": reduced}
    return type(cls.__name__, (cls,), body)
