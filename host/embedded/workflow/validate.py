"""Workflow validation with ComfyUI's rules, error types and error shapes.

The rules follow `execution.validate_prompt`, including the oddities: a constant on a socket without
a widget is valid, a node reports only its own faults, and one valid output is enough. Constants are
converted by `plain_value`, which refuses more than ComfyUI. Messages contain more than ComfyUI's:
the target of a dangling link, the nodes in a cycle, and the probable name behind a mistyped one.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from ...error_texts import folders_last
from ...files import Files, listed_model
from ...input_values import InputValueError, plain_value, same_choice, shown
from .graph import Prompt, as_link, class_of
from .io import ComfyNode
from .near_names import names_listed, near_files, nearest
from .tidy import TidyWorkflow, tidy

Fault: TypeAlias = dict[str, Any]
"""`{"type", "message", "details", "extra_info"}`, ComfyUI's JSON format."""

_COMFYUIS: Mapping[str, Callable[[Any], object]] = {
    "INT": int,
    "FLOAT": float,
    "STRING": str,
    "BOOLEAN": bool,
}
"""ComfyUI's conversions, for other packs' nodes on a server."""
_COMPARED = (*_COMFYUIS, "COMBO")
"""Input types with generic checks. Values of other types are checked only by their nodes."""
# Options for choices that change while a server runs. Nodes with such an input check the
# file themselves.
_GROWING = ("image_upload", "video_upload", "audio_upload", "file_upload", "remote")
NESTED = "COMFY_"
"""Dynamic input type prefix. The nested inputs are called input.nested."""
NEEDS_COMFYUI = (
    "needs ComfyUI, because it works with ComfyUI's models and samplers: run this workflow there, "
    "or use Wan Experts (streamed) or Wan Model (single), with Wan Sampler (streamed)"
)
"""Reason and alternative for a node with one of `NATIVE_TYPES`."""
NATIVE_TYPES = {"MODEL", "CLIP"}
"""Output types that only a ComfyUI has."""
NO_CHECK = vars(ComfyNode)["validate_inputs"]
"""Method on a class without its own check."""
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
        """Return `extra_info` for a fault in this input."""
        return {"input_name": self.name, "input_config": (self.io_type, self.options), **more}

    def fault(self, kind: str, message: str, details: str, **more: object) -> Fault:
        """Return a fault in this input."""
        return fault(kind, message, details, self.about(**more))


@dataclass(frozen=True, kw_only=True)
class NodeRules:
    """Node class properties for validation."""

    sockets: Mapping[str, Socket]
    outputs: Sequence[str]
    """Output types."""
    is_output: bool
    own: type[ComfyNode] | None
    """The class itself, if `validate_inputs` can run here."""
    elsewhere: frozenset[str] = frozenset()
    """Inputs whose choices differ on a server, such as Ray clusters: checked against the server's,
    and hidden from `own`.
    """
    unchecked: frozenset[str] = frozenset()
    """Inputs that only a server can check, such as files, without the server's choices."""
    others_refused: bool = True
    """False if a workflow may have inputs outside `sockets`. ComfyUI ignores such inputs."""

    @cached_property
    def own_checked(self) -> frozenset[str]:
        """Parameters of the class's own check, if it has one.

        For these inputs it replaces the built-in checks.
        """
        own = inspect.getattr_static(self.own, "validate_inputs", NO_CHECK)
        if self.own is None or own is NO_CHECK:
            return frozenset()
        parameters = inspect.signature(self.own.validate_inputs).parameters.values()
        names = frozenset(parameter.name for parameter in parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = names.union(self.sockets)
        return names

    @property
    def listed(self) -> frozenset[str]:
        """Parameters of the class's own check that are still compared with their lists.

        ComfyUI compares none of them, so the own check refuses other names too. The list has the
        better message.
        """
        return frozenset(getattr(self.own, "LISTED_INPUTS", ()))

    def own_faults(
        self, inputs: Mapping[str, Any], received: Mapping[str, str], refused: Set[str]
    ) -> list[Fault]:
        """Return the faults found by the class's own check.

        Linked inputs, server inputs, and constants already in `refused` are None there.
        """
        if self.own is None or not self.own_checked:
            return []
        linked = {name for name, value in inputs.items() if as_link(value)}
        hidden = self.elsewhere | self.unchecked | refused | linked
        given = {
            name: None if name in hidden else inputs[name]
            for name in inputs
            if name in self.own_checked
        }
        if "input_types" in self.own_checked:
            given["input_types"] = dict(received)
        result = self.own.validate_inputs(**given)
        if result is True:
            return []
        reason = f" - {result}" if result is not False else ""
        kind = "custom_validation_failed"
        message = "Custom validation failed for node"
        # One fault per passed input, as in ComfyUI: the result does not name the wrong one.
        return [fault(kind, message, name + reason, {"input_name": name}) for name in given]


def rules_of(node: type[ComfyNode]) -> NodeRules:
    """Return the rules for a class in this process."""
    schema = node.define_schema()
    outputs = [output.io_type for output in schema.outputs]
    sockets = sockets_of(node.INPUT_TYPES())
    return NodeRules(sockets=sockets, outputs=outputs, is_output=schema.is_output_node, own=node)


def fault(
    kind: str, message: str, details: str, extra_info: Mapping[str, object] | None = None
) -> Fault:
    """Return a fault in ComfyUI's format."""
    return {
        "type": kind,
        "message": message,
        "details": details,
        "extra_info": dict(extra_info or {}),
    }


def sockets_of(input_types: Mapping[str, Any]) -> dict[str, Socket]:
    """Return the inputs described by `INPUT_TYPES()`, or by a server, by name.

    Required ones come first.

    Malformed descriptions, found in some packs, are skipped.
    """
    sockets = {}
    for kind in ("required", "optional"):
        for name, described in (input_types.get(kind) or {}).items():
            if not described or not isinstance(described, list | tuple):
                continue
            io_type, *rest = described
            options = dict(rest[0]) if rest and isinstance(rest[0], Mapping) else {}
            if isinstance(io_type, list):  # the older choice format
                options["options"] = io_type
                io_type = "COMBO"
            sockets[name] = Socket(
                name=name, io_type=str(io_type), options=options, required=kind == "required"
            )
    return sockets


def unknown_faults(inputs: Iterable[str], rules: NodeRules) -> list[Fault]:
    """Return the faults for inputs the node does not have.

    ComfyUI ignores them, even mistyped names.
    """
    faults = []
    for name in inputs:
        if rules.others_refused and name not in rules.sockets:
            details = f"{name}: {names_listed(name, rules.sockets)}"
            about = {"input_name": name}
            faults.append(fault("unknown_input", "Node has no such input", details, about))
    return faults


def link_type_fault(socket: Socket, value: list[Any], received: str) -> Fault | None:
    """Return the fault for a link with type `received` if the socket refuses it.

    Types may be lists "A,B".
    """
    offered, taken = (
        {kind.strip() for kind in kinds.split(",")} for kinds in (received, socket.io_type)
    )
    if offered & taken or _ANY in offered | taken:
        return None
    message = "Return type mismatch between linked nodes"
    details = f"{socket.name}, received_type({received}) mismatch input_type({socket.io_type})"
    about = {"received_type": received, "linked_node": value}
    return socket.fault("return_type_mismatch", message, details, **about)


def converted(
    socket: Socket, value: object, *, as_comfyui: bool = False
) -> tuple[object, Fault | None]:
    """Return a constant converted to the socket type, or unchanged with the conversion fault.

    With `as_comfyui`, everything ComfyUI accepts is accepted.
    """
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    try:
        if not as_comfyui:
            return plain_value(socket.io_type, value), None
        if socket.io_type in _COMFYUIS:
            value = _COMFYUIS[socket.io_type](value)
        return value, None
    except (TypeError, ValueError, OverflowError) as err:
        message = f"Failed to convert an input value to a {socket.io_type} value"
        given = f"{value}, " if not isinstance(err, InputValueError) else ""
        details = f"{socket.name}, {given}{err}"
        about = {"received_value": value, "exception_message": str(err)}
        return value, socket.fault("invalid_input_type", message, details, **about)


def listed_choice(socket: Socket, value: object, files: Files) -> object:
    """Return the listed choice for the same file, if `value` differs only in slashes or link."""
    choices = socket.options.get("options") or ()
    found = same_choice(value, choices)
    if not isinstance(found, str) or found in choices:
        return found
    return listed_model(files, found, choices)


def value_fault(socket: Socket, value: Any) -> Fault | None:
    """Return the fault for a constant out of range or not among the choices."""
    if socket.io_type not in _COMPARED or any(socket.options.get(key) for key in _GROWING):
        return None
    about = {"received_value": value}
    low = socket.options.get("min")
    if low is not None and value < low:
        message = f"Value {value} smaller than min of {low}"
        return socket.fault("value_smaller_than_min", message, socket.name, **about)
    high = socket.options.get("max")
    if high is not None and value > high:
        message = f"Value {value} bigger than max of {high}"
        return socket.fault("value_bigger_than_max", message, socket.name, **about)
    choices = socket.options.get("options", ())
    if socket.io_type == "COMBO" and value not in choices:
        listed = str(choices)
        if len(choices) > _MAX_LISTED_CHOICES:
            listed = f"(list of length {len(choices)})"
            about["input_config"] = None
        near = near_files(value, map(str, choices)) if isinstance(value, str) else []
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        details = f"{socket.name}: {hint}'{value}' not in {listed}"
        return socket.fault("value_not_in_list", "Value not in list", details, **about)
    return None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Validation result."""

    prompt: Prompt
    """The workflow with constants converted to their socket types."""
    outputs: tuple[str, ...] = ()
    """The valid output nodes. Empty if `error` is set."""
    error: Fault | None = None
    node_errors: Mapping[str, Mapping[str, Any]]
    """Faults by node, including nodes that invalidate only some outputs."""
    notes: tuple[str, ...] = ()
    """Ignored workflow parts, one line per node."""

    def lines(self) -> list[str]:
        """Return the faults as text, one per line."""
        by_node = [
            f"node {node_id} ({node['class_type']}): {_text_of(found)}"
            for node_id, node in self.node_errors.items()
            for found in node["errors"]
        ]
        if self.error is None or by_node:
            return by_node
        return [": ".join(filter(None, (self.error["message"], self.error["details"])))]


def _text_of(found: Fault) -> str:
    """Return a fault as text.

    Details from a node's own check are a sentence that needs no introduction.
    """
    if found["type"].startswith("exception_during_"):
        return str(found["details"])
    return f"{found['message']}: {found['details']}"


class InvalidWorkflowError(ValueError):
    """No workflow output is valid. `verdict` contains the faults."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__("\n".join(["the workflow cannot run:", *verdict.lines()]))
        self.verdict = verdict


def validate_prompt(
    prompt: Prompt | None, nodes: Mapping[str, type[ComfyNode]], files: Files
) -> Verdict:
    """Validate a workflow for `nodes` (by id) and the running host's `files`.

    Never raises for a workflow fault.
    """
    if prompt is None:
        return _refused({}, fault("no_prompt", "No prompt provided", "No prompt provided"))
    # First: a graph with such a node also has ComfyUI nodes behind it, whose faults are only a
    # consequence.
    for node_id, node in prompt.items():
        lacking = _needs_comfyui(node_id, node, nodes)
        if lacking is not None:
            return _refused(prompt, lacking)
    rules = _known_rules(prompt, nodes)
    tidied = _tidied(prompt, nodes, rules)
    for node_id, node in tidied.prompt.items():
        if class_of(node) not in nodes:
            return _refused(prompt, _missing_node(node_id, node, nodes))
    return replace(validate_nodes(tidied.prompt, rules, files), notes=tidied.notes)


def tidy_workflow(prompt: Prompt, nodes: Mapping[str, type[ComfyNode]]) -> TidyWorkflow:
    """Return a workflow for `nodes` (by id) as `validate_prompt` runs it, with notes.

    See `tidy`.
    """
    return _tidied(prompt, nodes, _known_rules(prompt, nodes))


def _known_rules(prompt: Prompt, nodes: Mapping[str, type[ComfyNode]]) -> dict[str, NodeRules]:
    classes = {class_of(node) for node in prompt.values()}
    return {name: rules_of(nodes[name]) for name in nodes if name in classes}


def _tidied(prompt: Prompt, nodes: Iterable[str], rules: Mapping[str, NodeRules]) -> TidyWorkflow:
    inputs = {name: rules[name].sockets if name in rules else () for name in nodes}
    return tidy(prompt, inputs, {name for name in rules if rules[name].is_output})


def validate_nodes(prompt: Prompt, rules: Mapping[str, NodeRules], files: Files) -> Verdict:
    """Validate a workflow with rules for all classes. Never raises for a workflow fault."""
    outputs = [node_id for node_id, node in prompt.items() if rules[node["class_type"]].is_output]
    if not outputs:
        return _refused(prompt, fault("prompt_no_outputs", "Prompt has no outputs", ""))
    return _Walk(prompt, rules, files).verdict(outputs)


def _refused(prompt: Prompt, error: Fault) -> Verdict:
    return Verdict(prompt=prompt, error=error, node_errors={})


def _needs_comfyui(
    node_id: str, node: Mapping[str, Any], nodes: Mapping[str, type[ComfyNode]]
) -> Fault | None:
    """Return the fault for a node with an output that exists only in ComfyUI."""
    class_type = class_of(node)
    if class_type is None or class_type not in nodes:
        return None
    schema = nodes[class_type].define_schema()
    if all(output.io_type not in NATIVE_TYPES for output in schema.outputs):
        return None
    message = f"{schema.display_name} {NEEDS_COMFYUI}"
    return _node_fault("needs_comfyui", message, node_id, node)


def _node_fault(kind: str, message: str, node_id: str, node: Mapping[str, Any]) -> Fault:
    about = {
        "node_id": node_id,
        "class_type": node.get("class_type"),
        "node_title": _title(node_id, node),
    }
    return fault(kind, message, f"Node ID '#{node_id}'", about)


def _title(node_id: str, node: Mapping[str, Any]) -> Any:
    meta = node.get("_meta")
    if isinstance(meta, Mapping) and meta.get("title"):
        return meta["title"]
    return node.get("class_type") or f"ID #{node_id}"


def _missing_node(node_id: str, node: Mapping[str, Any], nodes: Iterable[str]) -> Fault:
    class_type = node.get("class_type")
    problem = (
        "has no class_type: remove it, or export the workflow again with Workflow > Export (API)"
    )
    if class_type:
        near = nearest(str(class_type), nodes, cutoff=0.7)
        hint = f"Did you mean {near}? " if near else ""
        problem = f"not found. {hint}The embedded host has only the nodes of this pack"
    message = f"Node '{_title(node_id, node)}' {problem}."
    return _node_fault("missing_node_type", message, node_id, node)


class _Walk:
    """Depth-first walk from the outputs to their sources. Each node is validated once."""

    def __init__(self, prompt: Prompt, rules: Mapping[str, NodeRules], files: Files) -> None:
        self._rules = rules
        self._files = files
        self._prompt = {
            node_id: {**node, "inputs": dict(node["inputs"])} if "inputs" in node else node
            for node_id, node in prompt.items()
        }
        self._valid: dict[str, bool] = {}
        self._faults: dict[str, list[Fault]] = {}
        self._path: list[str] = []
        self._cycles: list[str] = []

    def verdict(self, outputs: list[str]) -> Verdict:
        good: list[str] = []
        node_errors: dict[str, dict[str, Any]] = {}
        for output in outputs:
            if self._validate(output, {}):
                good.append(output)
                continue
            for node_id, faults in self._faults.items():
                entry = {
                    "errors": faults,
                    "dependent_outputs": [],
                    "class_type": self._prompt[node_id]["class_type"],
                }
                node_errors.setdefault(node_id, entry)["dependent_outputs"].append(output)
        error = None if good else self._error(outputs)
        return Verdict(
            prompt=self._prompt, outputs=tuple(good), error=error, node_errors=node_errors
        )

    def _error(self, outputs: list[str]) -> Fault:
        of_outputs = [found for output in outputs for found in self._faults.get(output, ())]
        details = [f"{found['message']}: {found['details']}" for found in of_outputs] + self._cycles
        return fault(
            "prompt_outputs_failed_validation",
            "Prompt outputs failed validation",
            "\n".join(details),
        )

    def _validate(self, node_id: str, about: Mapping[str, object]) -> bool:
        """Return True if a node and all sources are valid.

        `about` describes the link to the node, if any.
        """
        if node_id in self._path:
            cycle = [*self._path[self._path.index(node_id) :], node_id]
            self._cycles.append(f"Dependency cycle detected: {' -> '.join(cycle)}")
            return False
        if node_id not in self._valid:
            self._path.append(node_id)
            try:
                faults, sources_valid = self._inspect(node_id)
            except Exception as err:  # noqa: BLE001 (a node's own check may raise anything; it is reported)
                inner = "inner " if about else ""
                kind = f"exception_during_{inner}validation".replace(" ", "_")
                trace = {
                    "exception_type": type(err).__name__,
                    "traceback": traceback.format_tb(err.__traceback__),
                }
                message = f"Exception when validating {inner}node"
                faults = [fault(kind, message, folders_last(str(err)), {**about, **trace})]
                sources_valid = False
            self._path.pop()
            self._valid[node_id] = sources_valid and not faults
            if faults:
                self._faults[node_id] = faults
        return self._valid[node_id]

    def _inspect(self, node_id: str) -> tuple[list[Fault], bool]:
        """Return the node's own faults, and True if all sources are valid.

        Converts constants in place.
        """
        rules = self._rules[self._prompt[node_id]["class_type"]]
        inputs = self._prompt[node_id]["inputs"]
        faults = unknown_faults(inputs, rules)
        received: dict[str, str] = {}
        refused: set[str] = set()
        sources_valid = True
        for name, socket in rules.sockets.items():
            if socket.io_type.startswith(NESTED):
                continue
            value = inputs.get(name)
            found: Fault | None = None
            if name not in inputs:
                if socket.required:
                    about = {"input_name": name}
                    missing = "Required input is missing"
                    found = fault("required_input_missing", missing, name, about)
            elif not isinstance(value, list):
                inputs[name], found = _constant(socket, value, rules, self._files)
                # A number still goes to the node's own check, which may have a better message.
                # True is not a number here.
                if found and type(inputs[name]) not in (int, float):
                    refused.add(name)
            elif len(value) != 2:
                malformed = "Bad linked input, must be a length-2 list of [node_id, slot_index]"
                found = socket.fault("bad_linked_input", malformed, name, received_value=value)
            else:
                received[name] = self._linked_type(socket, value)
                if "input_types" not in rules.own_checked:
                    found = link_type_fault(socket, value, received[name])
                if found is None and not self._validate(value[0], socket.about(linked_node=value)):
                    sources_valid = False
            faults += filter(None, [found])
        return faults + rules.own_faults(inputs, received, refused), sources_valid

    def _linked_type(self, socket: Socket, link: list[Any]) -> str:
        """Return the linked output's type. Raises LookupError."""
        source, index = link
        if not isinstance(source, str) or source not in self._prompt:
            raise LookupError(
                f"'{socket.name}' is linked to node '{source}', which is not in the workflow"
            )
        class_type = self._prompt[source]["class_type"]
        outputs = self._rules[class_type].outputs
        if not isinstance(index, int) or isinstance(index, bool):
            raise LookupError(
                f"'{socket.name}' is linked to output {shown(index)} of node '{source}': it must "
                "be a whole number, such as 0, without quotes"
            )
        # ComfyUI indexes a Python list, so -1 is a valid index of the last output.
        if not -len(outputs) <= index < len(outputs):
            count = len(outputs)
            raise LookupError(
                f"'{socket.name}' is linked to output {index} of node '{source}' ({class_type}), "
                f"which has {count}"
            )
        return outputs[index]


def _constant(
    socket: Socket, value: object, rules: NodeRules, files: Files
) -> tuple[object, Fault | None]:
    """Return a constant as the node gets it, with the fault."""
    value, found = converted(socket, value, as_comfyui=rules.own is None)
    if socket.io_type == "COMBO":
        value = listed_choice(socket, value, files)
    own = rules.own_checked - rules.elsewhere - rules.listed
    if found is None and socket.name not in own | rules.unchecked:
        found = value_fault(socket, value)
    return value, found
