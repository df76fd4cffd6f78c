"""Validation of one input of a node by ComfyUI's rules, one function per kind of fault. Pure functions."""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .graph import as_link
from .io import ComfyNode

Fault: TypeAlias = dict[str, Any]
"""`{"type", "message", "details", "extra_info"}`, ComfyUI's JSON format."""

_CONVERTERS: Mapping[str, Callable[[Any], object]] = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}
_MAX_LISTED_CHOICES = 20
_ANY = "*"


@dataclass(frozen=True, kw_only=True)
class Socket:
    """An input as described by `INPUT_TYPES()`."""

    name: str
    io_type: str
    options: Mapping[str, Any]
    required: bool

    def about(self, **more: object) -> dict[str, object]:
        """Return the `extra_info` of a fault of this input."""
        return {"input_name": self.name, "input_config": (self.io_type, self.options), **more}


@dataclass(frozen=True, kw_only=True)
class OwnCheck:
    """A node's `validate_inputs`; it replaces the built-in checks of the inputs named in its signature."""

    names: frozenset[str]
    everything: bool

    def covers(self, name: str) -> bool:
        return self.everything or name in self.names


def fault(kind: str, message: str, details: str, extra_info: Mapping[str, object] | None = None) -> Fault:
    """Return a fault in ComfyUI's format."""
    return {"type": kind, "message": message, "details": details, "extra_info": dict(extra_info or {})}


def exception_fault(
    error: Exception,
    about: Mapping[str, object] | None = None,
    *,
    kind: str = "exception_during_validation",
    message: str = "Exception when validating node",
) -> Fault:
    """Return the fault of a node whose validation raised `error`; a node's own check may raise anything."""
    trace = {"exception_type": type(error).__name__, "traceback": traceback.format_tb(error.__traceback__)}
    return fault(kind, message, str(error), {**(about or {}), **trace})


def sockets_of(node: type[ComfyNode]) -> list[Socket]:
    """Return all inputs of a node, required ones first."""
    kinds = node.INPUT_TYPES()
    return [
        Socket(name=name, io_type=io_type, options=options, required=kind == "required")
        for kind in ("required", "optional")
        for name, (io_type, options) in kinds.get(kind, {}).items()
    ]


def own_check(node: type[ComfyNode]) -> OwnCheck | None:
    """Return the node's own check, or None if it has no `validate_inputs`."""
    if all("validate_inputs" not in vars(base) for base in node.__mro__ if base is not ComfyNode):
        return None
    parameters = inspect.signature(node.validate_inputs).parameters.values()
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return OwnCheck(names=frozenset(parameter.name for parameter in parameters), everything=everything)


def names_listed(unknown: str, known: Iterable[str]) -> str:
    """Return a hint such as `did you mean steps? it has steps, seed` for an unknown name."""
    names = list(known)
    near = difflib.get_close_matches(unknown, names, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}it has {', '.join(names)}"


def unknown_fault(name: str, sockets: Iterable[Socket]) -> Fault:
    """Return the fault of an input that the node does not have; ComfyUI ignores it, even if the name is mistyped."""
    details = f"{name}: {names_listed(name, (socket.name for socket in sockets))}"
    return fault("unknown_input", "Node has no such input", details, {"input_name": name})


def missing_fault(socket: Socket) -> Fault | None:
    """Return the fault of an input without a value, None if it is optional."""
    if not socket.required:
        return None
    return fault("required_input_missing", "Required input is missing", socket.name, {"input_name": socket.name})


def link_shape_fault(socket: Socket, value: list[Any]) -> Fault | None:
    """Return the fault of a list that is not a link."""
    if len(value) == 2:
        return None
    message = "Bad linked input, must be a length-2 list of [node_id, slot_index]"
    return fault("bad_linked_input", message, socket.name, socket.about(received_value=value))


def link_type_fault(socket: Socket, value: list[Any], received: str) -> Fault | None:
    """Return the fault of a link of the type `received` if the socket refuses it; types may be lists "A,B"."""
    offered, taken = ({kind.strip() for kind in kinds.split(",")} for kinds in (received, socket.io_type))
    if offered & taken or _ANY in offered | taken:
        return None
    details = f"{socket.name}, received_type({received}) mismatch input_type({socket.io_type})"
    about = socket.about(received_type=received, linked_node=value)
    return fault("return_type_mismatch", "Return type mismatch between linked nodes", details, about)


def converted(socket: Socket, value: object) -> tuple[object, Fault | None]:
    """Return a constant converted to the socket's type, or unchanged with the fault of the conversion."""
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    convert = _CONVERTERS.get(socket.io_type)
    try:
        return (convert(value) if convert else value), None
    except (TypeError, ValueError, OverflowError) as err:
        message = f"Failed to convert an input value to a {socket.io_type} value"
        about = socket.about(received_value=value, exception_message=str(err))
        return value, fault("invalid_input_type", message, f"{socket.name}, {value}, {err}", about)


def value_fault(socket: Socket, value: Any) -> Fault | None:
    """Return the fault of a constant that is out of range or not among the choices."""
    about = socket.about(received_value=value)
    low, high = socket.options.get("min"), socket.options.get("max")
    if low is not None and value < low:
        return fault("value_smaller_than_min", f"Value {value} smaller than min of {low}", socket.name, about)
    if high is not None and value > high:
        return fault("value_bigger_than_max", f"Value {value} bigger than max of {high}", socket.name, about)
    choices = socket.options.get("options", ())
    if socket.io_type == "COMBO" and value not in choices:
        listed = str(choices)
        if len(choices) > _MAX_LISTED_CHOICES:
            listed, about["input_config"] = f"(list of length {len(choices)})", None
        return fault("value_not_in_list", "Value not in list", f"{socket.name}: '{value}' not in {listed}", about)
    return None


def own_faults(
    node: type[ComfyNode], check: OwnCheck, inputs: Mapping[str, Any], received: Mapping[str, str]
) -> list[Fault]:
    """Return the faults found by the node's own check, which gets None for linked inputs."""
    given = {name: None if as_link(value) else value for name, value in inputs.items() if check.covers(name)}
    types = {"input_types": dict(received)} if "input_types" in check.names else {}
    result = node.validate_inputs(**given, **types)
    if result is True:
        return []
    reason = f" - {result}" if result is not False else ""
    message = "Custom validation failed for node"
    # One fault per input that was passed, as in ComfyUI: the result does not name the wrong one.
    return [fault("custom_validation_failed", message, name + reason, {"input_name": name}) for name in given | types]
