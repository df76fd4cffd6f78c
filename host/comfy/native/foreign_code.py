"""Code of other packs in a native model: replaced methods, classes and hooks, found by the files of their functions."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import comfy.model_base
import torch
from torch import nn

HARMLESS = {"__init__", "memory_required"}
"""Methods that compute nothing of a pass."""


def foreign_method(model: Any) -> str | None:
    """Return the first method of ComfyUI's `model` that is another pack's, in words; None without one."""
    names = (*_foreign_attributes(model), *_foreign_functions_of_class(type(model)))
    return f"the replaced {names[0]}" if names else None


def foreign_layer(network: nn.Module) -> str | None:
    """Return the first code of another pack in a diffusion model, in words; None without any.

    It may keep state from block to block, as may a compiled block.
    """
    return next(_foreign_layers(network), None)


def _foreign_layers(network: nn.Module) -> Iterator[str]:
    for name in _foreign_functions(type(network)):
        yield f"the replaced {name}"
    classes: set[type] = set()
    for path, module in network.named_modules():
        where = f"{path}." if path else ""
        if type(module) not in classes:
            classes.add(type(module))
            yield from (f"the replaced {where}{name}" for name in _foreign_functions_of_class(type(module)))
        yield from (f"the replaced {where}{name}" for name in _foreign_attributes(module))
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        yield from (f"the hook {_name(hook)} of {path or 'the model'}" for hook in hooks if _is_foreign(hook))
        if module._compiled_call_impl is not None:
            yield f"the compiled {path or 'model'}"


def _foreign_attributes(owner: object) -> Iterator[str]:
    """Yield the names of functions that hide methods of the class of `owner`."""
    for name, value in vars(owner).items():
        hides = callable(value) and hasattr(type(owner), name) and not isinstance(value, nn.Module)
        if hides and name not in HARMLESS and _is_foreign(value):
            yield name


def _foreign_functions_of_class(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        # Torch's own classes are many, and nobody replaces their methods for one model.
        if not each.__module__.startswith("torch.") and each is not object:
            yield from _foreign_names(vars(each))


def _foreign_functions(kind: type) -> Iterator[str]:
    """Yield the names of functions of the module of `kind` that another pack has put there, such as its attention."""
    yield from _foreign_names(vars(sys.modules[kind.__module__]))


def _foreign_names(functions: Mapping[str, object]) -> Iterator[str]:
    for name, value in functions.items():
        if isinstance(value, FunctionType) and name not in HARMLESS and _is_foreign(value):
            yield name


def _is_foreign(function: object) -> bool:
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    elif not isinstance(function, FunctionType) and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code is not None and not code.co_filename.startswith(_own_folders())


@cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of ComfyUI's core, of Python's libraries, and of what this pack has in a model."""
    pack = Path(__file__).parents[3]
    folders = [Path(comfy.model_base.__file__).parent, Path(torch.__file__).parent, pack / "host", pack / "offload"]
    folders += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    return tuple(f"{each}{os.sep}" for folder in folders for each in {folder, folder.resolve()})


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
