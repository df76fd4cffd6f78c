"""Tensors on the checked device, and torch operations on them.

The device is a torch backend in Python ("PrivateUse1"): operations arrive at one function.
Views are made at once. Everything else is issued to the current stream and computed later by CPU
kernels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from .machine import Block, Device, Machine, Range, site, waiting_function

NAME = "checked"

_machines: list[Machine] = []
"""The active machine, or empty between tests."""

VIEWS = {torch.ops.aten._unsafe_view.default}
"""Operations that return a view although their schema says otherwise."""

READ_BY_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}
"""Operations whose result the host needs: they block it."""

WHOLE = {F.scaled_dot_product_attention}
"""Functions that torch would take apart on this device, but are one kernel on a CPU."""


class CheckedTensor(torch.Tensor):
    """Tensor on a checked device.

    Attributes:
        base: CPU tensor in the same memory, with the values after executed work.
        block: the allocation.
    """

    base: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, base: torch.Tensor, block: Block) -> CheckedTensor:
        tensor: CheckedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            base.size(),
            strides=base.stride(),
            storage_offset=base.storage_offset(),
            dtype=base.dtype,
            device=torch.device(NAME, block.stream.device.index),
        )
        tensor.base = base
        tensor.block = block
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WHOLE and not torch.compiler.is_compiling():
            return _launch(func, args, dict(kwargs or {}), writes=())
        # `Tensor`'s own would turn CPU results into this class.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CheckedTensor({list(self.shape)}, {self.dtype}, device={self.device})"

    def range(self, *, write: bool) -> Range:
        """Return the bytes from the first to the last element."""
        slab = self.block.slab
        start = self.base.data_ptr() - slab.address
        return Range(slab.history, start, start + _extent(self.base), write)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


def activate(machine: Machine) -> Callable[[], None]:
    """Make `machine` the checked device in this process. Return a function that ends it."""
    _register()
    assert not _machines, "another machine is active"
    _machines.append(machine)
    return _machines.clear


def active() -> Machine:
    assert _machines, "no machine is active"
    return _machines[0]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute one torch operation."""
    active().check_thread()
    if _is_composite(func):  # arrives whole in inference mode
        return func.decompose(*args, **kwargs)
    if func is torch.ops.aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is torch.ops.aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if _is_view(func):
        return _view(func, args, kwargs)
    if func in READ_BY_HOST:
        return _read_by_host(func, args, kwargs)
    named = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written(func)]
    return _launch(func, args, kwargs, writes=[each for each in _leaves(named) if each is not None])


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return index and name for every argument changed by an operation."""
    aliases = [(at, arg.name, arg.alias_info) for at, arg in enumerate(func._schema.arguments)]
    return [(at, name) for at, name, alias in aliases if alias is not None and alias.is_write]


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return func in VIEWS or any(alias is not None and not alias.is_write for alias in aliases)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    with torch.inference_mode(False), torch.no_grad():
        result = func(*_bases(args), **_bases(kwargs))
    # A view is an inference tensor only if its source is one.
    with torch.inference_mode(source.is_inference()):
        if isinstance(result, torch.Tensor):
            return CheckedTensor(result, source.block)
        return type(result)(CheckedTensor(base, source.block) for base in result)


def _launch(func, args, kwargs, *, writes) -> Any:
    """Issue an operation to the device's current stream.

    `writes` are the changed arguments.
    """
    machine = active()
    leaves = _leaves((args, kwargs))
    given = [each for each in leaves if isinstance(each, CheckedTensor)]
    device = _device_of(given, kwargs)
    _check_devices(func, given, device)
    ranges = [each.range(write=any(each is one for one in writes)) for each in given]
    # Here: queued work must not keep tensors on the device.
    bases, named = _mapped((args, kwargs), _value_on_cpu)

    def compute() -> Any:
        return func(*bases, **named)

    if writes:
        _issue(device, compute, ranges, func)
        machine.launches += 1
        return writes[0] if len(writes) == 1 else tuple(writes)
    likes, shape = _outputs(func, args, kwargs)
    outputs = [_allocate(out, device) if isinstance(out, torch.Tensor) else out for out in likes]
    made = [each for each in outputs if isinstance(each, CheckedTensor)]
    targets = [each.base for each in made]

    def compute_into() -> None:
        results = [each for each in _leaves(compute()) if isinstance(each, torch.Tensor)]
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)

    if _has_values(func):
        _issue(device, compute_into, [*ranges, *(each.range(write=True) for each in made)], func)
        machine.launches += 1
    return pytree.tree_unflatten(outputs, shape)


_OUTPUTS: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}


def _outputs(func, args, kwargs) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the result's leaves as meta tensors, and the structure.

    They depend on no values.
    """
    key = (func, _key(args), _key(kwargs))
    if key not in _OUTPUTS:
        positional, named = _mapped((args, kwargs), _on_meta)
        _OUTPUTS[key] = pytree.tree_flatten(func(*positional, **named))
    return _OUTPUTS[key]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return dict, *value, *map(_key, value.values())
    return type(value), value


# torch's own tree functions accept every registered class, and took a quarter of a test's time.
# Operation arguments and results consist of tuples, lists and dicts.
def _leaves(values: Any) -> list[Any]:
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return [values]
    return [leaf for each in values for leaf in _leaves(each)]


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return `values` with every leaf changed, in `_leaves` order."""
    if isinstance(values, dict):
        return {name: _mapped(each, change) for name, each in values.items()}
    if isinstance(values, (tuple, list)):
        made = [_mapped(each, change) for each in values]
        return made if isinstance(values, list) else tuple(made)
    return change(values)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _meta(leaf)
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _value_on_cpu(leaf: Any) -> Any:
    """Return the argument for the CPU's kernel.

    CPU tensors are copied, because the host may change them before.
    """
    if isinstance(leaf, CheckedTensor):
        return leaf.base
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


@functools.cache
def _has_values(func: Any) -> bool:
    """False for functions that return fresh memory."""
    return not str(func).startswith(("aten.empty", "aten.new_empty"))


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    machine = active()
    if isinstance(into, CheckedTensor) and isinstance(source, CheckedTensor):
        machine.launches += 1
        device = into.block.stream.device
        to = into.base
        values = source.base
        _check_devices("copy_", [into, source], device)
        ranges = [into.range(write=True), source.range(write=False)]
        _issue(device, lambda: to.copy_(values), ranges, "copy")
        return into
    machine.copies += 1
    if non_blocking and machine.only_thread is not None:
        # Nothing says when such a copy has read or written the host memory.
        machine.report(f"a copy does not block on a device without streams, at {site()}")
    if isinstance(into, CheckedTensor):
        _to_device(into, source, non_blocking=non_blocking)
    else:
        _to_host(into, source, non_blocking=non_blocking)
    return into


def _to_device(into: CheckedTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    machine = active()
    device = into.block.stream.device
    to = into.base
    ranges = [into.range(write=True)]
    locked = machine.locked_range(source) if source.is_contiguous() else None
    if locked is None:
        # The driver copies pageable memory into a buffer before it returns.
        machine.pageable_copies.add(waiting_function() or "")
        values = source.detach().clone()
    else:
        values = machine.host_view(source)
        ranges += machine.host_ranges(source, locked, write=False)
    work = _issue(device, lambda: to.copy_(values), ranges, "copy to the device")
    if not non_blocking or (locked is None and source.nbytes > 65536):
        _wait(device, work)


def _to_host(into: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    device = source.block.stream.device
    values = source.base
    machine = active()
    ranges = [source.range(write=False)]
    locked = machine.locked_range(into) if into.is_contiguous() else None
    if locked is not None:
        ranges += machine.host_ranges(into, locked, write=True)
        into = machine.host_view(into)
    work = _issue(device, lambda: into.copy_(values), ranges, "copy to the host")
    if locked is None or not non_blocking:
        _wait(device, work)


def _to_copy(source: torch.Tensor, **options: Any) -> torch.Tensor:
    non_blocking = options.pop("non_blocking", False)
    target = torch.device(options.pop("device", None) or source.device)
    if target.type == NAME and isinstance(source, CheckedTensor) and target == source.device:
        return _launch(torch.ops.aten._to_copy.default, (source,), options, writes=())
    meta = _meta(source) if isinstance(source, CheckedTensor) else source.detach().to("meta")
    like = torch.ops.aten._to_copy.default(meta, **options)
    if target.type == NAME:
        # The CPU changes the dtype first, as torch does for a copy between devices.
        source = source.cpu() if isinstance(source, CheckedTensor) else source
        into: torch.Tensor = _allocate(like, active().devices[target.index or 0])
        _copy(into, source.to(like.dtype), non_blocking)
        return into
    into = torch.empty_strided(like.size(), like.stride(), dtype=source.dtype)
    _copy(into, source, non_blocking)
    return into.to(like.dtype)


def _read_by_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each for each in _leaves((args, kwargs)) if isinstance(each, CheckedTensor)]
    device = given[0].block.stream.device
    _check_devices(func, given, device)
    _wait(device, _issue(device, lambda: None, [each.range(write=False) for each in given], func))
    return func(*_bases(args), **_bases(kwargs))


def _issue(device: Device, run: Callable[[], object], ranges: list[Range], words: object) -> Any:
    def later() -> None:
        # Any thread may execute it, in or out of a dispatch. Only this mode may write into every
        # host tensor.
        with torch.inference_mode():
            run()

    return device.machine.current_stream(device.index).issue(later, ranges, f"{words} at {site()}")


def _wait(device: Device, work: Any) -> None:
    device.machine.wait_on_host(work, dict(work.stream.clock))


def _allocate(like: torch.Tensor, device: Device) -> CheckedTensor:
    nbytes = _extent(like)
    block = device.allocate(nbytes, device.machine.current_stream(device.index))
    with torch.inference_mode(False):
        base = block.slab.bytes[:nbytes].view(like.dtype).as_strided(like.shape, like.stride())
    return CheckedTensor(base, block)


def _device_of(given: list[CheckedTensor], kwargs: Mapping[str, Any]) -> Device:
    wanted = kwargs.get("device")
    if wanted is not None:
        return active().devices[torch.device(wanted).index or 0]
    return given[0].block.stream.device


def _check_devices(func: object, given: Sequence[CheckedTensor], device: Device) -> None:
    indices = {each.block.stream.device.index for each in given} | {device.index}
    if len(indices) > 1:
        raise RuntimeError(f"{func}: expected tensors on the same device, found {sorted(indices)}")


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _bases(values: Any) -> Any:
    """Return `values` with each device tensor replaced by a CPU tensor."""
    return _mapped(values, lambda leaf: leaf.base if isinstance(leaf, CheckedTensor) else leaf)


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
    def is_available(self) -> bool:
        return bool(_machines)

    def has_primary_context(self, index: int) -> bool:
        return bool(_machines)

    def is_built(self) -> bool:
        return True


class _Module(types.ModuleType):
    """Functions in `torch.checked` called by torch."""

    def is_initialized(self) -> bool:
        return bool(_machines)

    def is_available(self) -> bool:
        return bool(_machines)

    def current_device(self) -> int:
        return active().current_device

    def device_count(self) -> int:
        return len(_machines[0].devices) if _machines else 0

    def synchronize(self) -> None:
        for stream in active().streams:
            stream.synchronize()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing on this device draws random numbers."""

    def _lazy_init(self) -> None:
        """There is nothing to initialise."""


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the backend with torch, once per process."""
    _setup_privateuseone_for_python_backend(NAME, _Module(f"torch.{NAME}"), _Hooks())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # `torch.tensor` calls it where the fallback is excluded.
    aten.impl("copy_", _copy, "PrivateUse1")
    # torch would resize an empty tensor for these.
    for name in ("arange", "arange.start", "arange.start_step"):
        overload = getattr(torch.ops.aten.arange, name.partition(".")[2] or "default")
        aten.impl(name, functools.partial(_made, overload), "PrivateUse1")
    return library, aten


def _made(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _launch(func, args, kwargs, writes=())
