"""Plain names and texts for errors in ComfyUI.

ComfyUI shows an error class with the module, a disk path for a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from .error_texts import folders_last
from .input_values import RefusedValue

NAME = "wanstream"
PACKAGE = __name__.rsplit(".", 2)[0]
"""`wanstream`, or the pack's module path inside ComfyUI."""

P = ParamSpec("P")
R = TypeVar("R")


def plainly_named(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function called by ComfyUI: our errors are reported as `wanstream.<class>`.

    The messages have folders in the last line.

    The errors remain instances of their classes and are pickled as such. The classes keep the
    module from which other processes import them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # ComfyUI reports a refused constant itself: here it is None, like a linked value.
        refused = [name for name, value in kwargs.items() if isinstance(value, RefusedValue)]
        kwargs.update(dict.fromkeys(refused))
        try:
            return function(*args, **kwargs)
        except Exception as err:
            if not type(err).__module__.startswith(f"{PACKAGE}."):
                raise
            # The same object keeps traceback, cause and attributes.
            err.__class__ = _twin(type(err))
            # Not a bare `raise`: before Python 3.11 it keeps the original class in `sys.exc_info`.
            raise err

    # ComfyUI reads `validate_inputs` with `getfullargspec`, which does not follow `wraps`.
    call.__signature__ = signature(function)  # type: ignore[attr-defined]
    return call


def name_errors_of(node: type[Any]) -> None:
    """Give plain names to a node class's errors in `execute` and `validate_inputs`."""
    # Wrap methods where they are defined: ComfyUI calls `validate_inputs` only if a node
    # overrides the base method. Several nodes inherit from one class. It is wrapped once.
    bases = (each for each in node.__mro__ if each.__module__.startswith(f"{PACKAGE}."))
    for owner in {node, *bases}:
        for name in vars(owner).keys() & {"execute", "validate_inputs"}:
            function = getattr(owner, name).__func__
            if not hasattr(function, "__wrapped__"):
                setattr(owner, name, classmethod(plainly_named(function)))


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
