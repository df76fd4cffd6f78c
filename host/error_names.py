"""Plain names for errors in ComfyUI, which shows the module of an error class: a pack's module is its disk path."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

NAME = "wanstream"
PACKAGE = __name__.rsplit(".", 2)[0]
"""`wanstream`, or the module path of the pack inside ComfyUI."""

P = ParamSpec("P")
R = TypeVar("R")


def plainly_named(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that ComfyUI calls, so that errors of our classes are reported as `wanstream.<class>`.

    They are still instances of their classes, and are pickled as such: the classes themselves keep the module from
    which another process imports them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as err:
            if not type(err).__module__.startswith(f"{PACKAGE}."):
                raise
            err.__class__ = _twin(type(err))
            # Not a bare `raise`: before Python 3.11 it keeps the original class in `sys.exc_info`.
            raise err

    # ComfyUI reads the parameters of `validate_inputs` with `getfullargspec`, which does not follow `wraps`.
    call.__signature__ = signature(function)  # type: ignore[attr-defined]
    return call


def name_errors_of(node: type[Any]) -> None:
    """Give plain names to the errors of `execute` and `validate_inputs` of a node class."""
    # Only methods of this class: ComfyUI calls `validate_inputs` only if a node overrides that of the base class.
    for name in vars(node).keys() & {"execute", "validate_inputs"}:
        setattr(node, name, classmethod(plainly_named(getattr(node, name).__func__)))


def _twin(cls: Any) -> Any:
    """Return a subclass of `cls` that differs only in its module."""

    def reduced(self: Exception) -> tuple[Any, ...]:
        return (cls, *cls.__reduce__(self)[1:])

    body = {"__module__": NAME, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__reduce__": reduced}
    return type(cls.__name__, (cls,), body)
