"""Plain names and texts for errors in ComfyUI, which shows an error class with the module, a pack's disk path."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from .error_texts import folders_last
from .input_values import RefusedValue

NAME = "wanstream"
PACKAGE = __name__.rsplit(".", 2)[0]
"""`wanstream`, or the module path of the pack inside ComfyUI."""

P = ParamSpec("P")
R = TypeVar("R")


def plainly_named(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function called by ComfyUI, so that our error classes are reported as `wanstream.<class>`.

    The messages have the folders in the last line.

    The errors are still instances of their classes, and are pickled as such: the classes themselves keep the module
    from which another process imports them.
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
    """Give plain names to a node class's errors in `execute` and `validate_inputs`, which checks values alone."""
    # Only methods in this class: ComfyUI calls `validate_inputs` only if a node overrides the base method.
    for name in vars(node).keys() & {"execute", "validate_inputs"}:
        function = getattr(node, name).__func__
        setattr(node, name, classmethod(plainly_named(_of_values(function) if name == "validate_inputs" else function)))


def _of_values(check: Callable[P, R]) -> Callable[P, R]:
    """Wrap a node's own check. If ComfyUI reports a constant itself, it is None there, like a linked value."""

    @wraps(check)
    def call(*args: P.args, **inputs: P.kwargs) -> R:
        known = {name: None if isinstance(value, RefusedValue) else value for name, value in inputs.items()}
        return check(*args, **known)  # type: ignore[arg-type]

    return call


def _twin(cls: Any) -> Any:
    """Return a subclass of `cls` with another module, and with folders last in the message."""

    def reduced(self: Exception) -> tuple[Any, ...]:
        return (cls, *cls.__reduce__(self)[1:])

    def text(self: Exception) -> str:
        return folders_last(cls.__str__(self))

    body = {
        "__module__": NAME,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": reduced,
        "__str__": text,
    }
    return type(cls.__name__, (cls,), body)
