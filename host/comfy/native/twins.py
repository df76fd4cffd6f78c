"""Second models that share a first model's tensors, with their own modules and patches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial, update_wrapper
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

import comfy.model_base
from torch import nn

from .. import versions


class BoundElsewhereError(ValueError):
    """A patch contains another model's modules. The message names the replaced attribute."""


def twin_of(model: comfy.model_base.BaseModel, *, shared: Iterable[object] = ()) -> Any:
    """Return a model with separate modules and the same tensors.

    Neither model changes the other's modules.

    Args:
        model: the first model.
        shared: other objects that both share.

    Raises ValueError if the model holds an object that cannot be copied.
    """
    memo = versions.twin_memo(model)
    for parameter in model.parameters():
        # A Parameter made from a tensor subclass has the type of the subclass, and keeps it.
        memo[id(parameter)] = parameter
        if type(parameter) is nn.Parameter:
            # A second Parameter over the same memory. A deep copy would copy the values.
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    memo |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    memo |= {id(each): each for each in shared}
    try:
        return copy.deepcopy(model, memo)
    # From objects that cannot be copied, such as locks and graph tensors.
    except (TypeError, RuntimeError) as err:
        raise ValueError(
            f"{type(model).__name__} holds an object that cannot be copied ({err}): load the file "
            "with Load Diffusion Model (streamed)"
        ) from err


def rebound(patches: Mapping[str, Any], source: Any, target: Any) -> dict[str, Any]:
    """Return one MODEL's object patches, rebound to another MODEL with the same modules.

    Modules are exchanged in methods, partial functions and closures.

    Raises:
        BoundElsewhereError: a patch is a module that contains modules of the first model.
    """
    of_target = _modules(target)
    into = {id(module): of_target[path] for path, module in _modules(source).items()}
    made = {}
    for name, patch in patches.items():
        held = patch.modules() if isinstance(patch, nn.Module) else ()
        if any(id(module) in into for module in held):
            raise BoundElsewhereError(name)
        made[name] = _exchanged(patch, into)
    return made


def _modules(patcher: Any) -> dict[str, nn.Module]:
    """Return a MODEL's modules by path, without currently patched-in modules."""
    modules = dict(patcher.model.named_modules())
    for name, original in versions.original_modules(patcher).items():
        # With dots, so that `blocks.1` does not match `blocks.10`.
        for path in [path for path in modules if f"{path}.".startswith(f"{name}.")]:
            del modules[path]
        if isinstance(original, nn.Module):
            modules |= dict(original.named_modules(prefix=name))
    return modules


def _exchanged(value: Any, into: Mapping[int, nn.Module]) -> Any:
    """Return `value` with modules replaced as in `into`, or the same value if it has none."""
    if id(value) in into:
        return into[id(value)]
    if isinstance(value, MethodType):
        owner = _exchanged(value.__self__, into)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, partial):
        arguments = [_exchanged(each, into) for each in value.args]
        keywords = {name: _exchanged(each, into) for name, each in value.keywords.items()}
        return partial(_exchanged(value.func, into), *arguments, **keywords)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(_exchanged_cell(cell, value, into) for cell in value.__closure__)
    if all(map(is_, cells, value.__closure__)):
        return value
    # A closure cannot be replaced in a function, only given to a new one.
    made = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    made.__kwdefaults__ = value.__kwdefaults__
    return update_wrapper(made, value)


def _exchanged_cell(
    cell: CellType, function: FunctionType, into: Mapping[int, nn.Module]
) -> CellType:
    """Return a closure cell with a replaced value, or the same cell, as it may keep state."""
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    if value is function:  # a function that calls itself
        return cell
    made = _exchanged(value, into)
    return cell if made is value else CellType(made)
