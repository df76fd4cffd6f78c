"""Code from other packs in a native model: replaced methods, classes and hooks.

A function's source file shows its owner.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ... import versions

HARMLESS = {"__init__", "memory_required"}
"""Methods without effect on a pass."""


def foreign_method(model: Any) -> str | None:
    """Return the first method on ComfyUI's `model` that belongs to another pack, in words.

    Return None if there is no such method.
    """
    names = chain(_foreign_attributes(model), _foreign_functions_of_class(type(model)))
    return next((f"the replaced {name}" for name in names), None)


def foreign_layers(network: nn.Module) -> Iterator[str]:
    """Yield code from other packs in a diffusion model, in words.

    It may keep state from block to block, as may a compiled block.
    """
    # Functions in the network's Python module, such as attention.
    for name in _foreign_names(vars(sys.modules[type(network).__module__])):
        yield f"the replaced {name}"
    classes: set[type] = set()
    for path, module in network.named_modules():
        where = f"{path}." if path else ""
        if type(module) not in classes:
            classes.add(type(module))
            yield from (
                f"the replaced {where}{name}" for name in _foreign_functions_of_class(type(module))
            )
        yield from (f"the replaced {where}{name}" for name in _foreign_attributes(module))
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        yield from (
            f"the hook {name_of(hook)} of {path or 'the model'}"
            for hook in hooks
            if _is_foreign(hook)
        )
        if module._compiled_call_impl is not None:
            yield f"the compiled {path or 'model'}"


def _foreign_attributes(owner: object) -> Iterator[str]:
    """Yield the names of instance functions that hide methods on the class."""
    for name, value in vars(owner).items():
        hides = callable(value) and hasattr(type(owner), name) and not isinstance(value, nn.Module)
        if hides and name not in HARMLESS and _is_foreign(value):
            yield name


def _foreign_functions_of_class(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        # There are many torch classes, and nobody replaces their methods for one model.
        if not each.__module__.startswith("torch.") and each is not object:
            yield from _foreign_names(vars(each))


def _foreign_names(functions: Mapping[str, object]) -> Iterator[str]:
    for name, value in functions.items():
        if name not in HARMLESS and not isinstance(value, type) and _is_foreign(value):
            yield name


def _is_foreign(function: object) -> bool:
    """Return True for a function, or another callable, from another pack."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, (MethodType, staticmethod, classmethod)):
        function = function.__func__
    elif not isinstance(function, FunctionType) and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    # Functions written in C have no code object, and so no known owner.
    return code is not None and not code.co_filename.startswith(_own_folders())


@cache
def _own_folders() -> tuple[str, ...]:
    """Return folders: ComfyUI's core, Python's libraries, and this pack's model code."""
    pack = Path(__file__).parents[4]
    folders = [versions.code_folder(), Path(torch.__file__).parent]
    # The parts of this pack with hooks and replaced methods in native models.
    folders += [pack / name for name in ("block_kernels", "host", "offload")]
    folders += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    # A source file may be named through a link or by the real path.
    folders += [folder.resolve() for folder in folders]
    return tuple(f"{folder}{os.sep}" for folder in folders)


def name_of(function: object) -> str:
    """Return a function's name, or the class name for other callables."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
