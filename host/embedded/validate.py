"""Workflow validation with ComfyUI's rules, error types and error format.

The rules are those of `execution.validate_prompt`, including its oddities: a constant on a socket without a widget is
valid, a node reports only its own faults, one valid output is enough. Two messages contain more than ComfyUI's: the
target of a dangling link, and the nodes of a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checks import (
    Fault,
    Socket,
    converted,
    exception_fault,
    fault,
    link_shape_fault,
    link_type_fault,
    missing_fault,
    own_check,
    own_faults,
    sockets_of,
    unknown_fault,
    value_fault,
)
from .graph import Prompt
from .io import ComfyNode


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a validation."""

    prompt: Prompt
    """The workflow with constants converted to the types of their sockets."""
    outputs: tuple[str, ...] = ()
    """The valid output nodes; none if `error` is set."""
    error: Fault | None = None
    node_errors: Mapping[str, Mapping[str, Any]]
    """The faults by node, including those that invalidate only some of the outputs."""

    def lines(self) -> list[str]:
        """Return the faults as text, one per line."""
        by_node = [
            f"node {node_id} ({node['class_type']}): {found['message']}: {found['details']}"
            for node_id, node in self.node_errors.items()
            for found in node["errors"]
        ]
        if self.error is None or by_node:
            return by_node
        return [": ".join(part for part in (self.error["message"], self.error["details"]) if part)]


class InvalidWorkflowError(ValueError):
    """No output of the workflow is valid; `verdict` contains the faults."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__("\n".join(["the workflow cannot run:", *verdict.lines()]))
        self.verdict = verdict


class DanglingLinkError(LookupError):
    """A link points to a node or an output that does not exist."""


def validate_prompt(prompt: Prompt | None, nodes: Mapping[str, type[ComfyNode]]) -> Verdict:
    """Validate a workflow of `nodes` (by id). Never raises for a fault of the workflow."""
    if prompt is None:
        return _refused({}, fault("no_prompt", "No prompt provided", "No prompt provided"))
    for node_id, node in prompt.items():
        class_type = node.get("class_type")
        if not isinstance(class_type, str) or class_type not in nodes:
            return _refused(prompt, _missing_node(node_id, node))
    outputs = [node_id for node_id, node in prompt.items() if nodes[node["class_type"]].define_schema().is_output_node]
    if not outputs:
        return _refused(prompt, fault("prompt_no_outputs", "Prompt has no outputs", ""))
    return _Walk(prompt, nodes).verdict(outputs)


def _refused(prompt: Prompt, error: Fault) -> Verdict:
    return Verdict(prompt=prompt, error=error, node_errors={})


def _missing_node(node_id: str, node: Mapping[str, Any]) -> Fault:
    class_type = node.get("class_type")
    meta = node.get("_meta")
    title = (meta.get("title") if isinstance(meta, Mapping) else None) or class_type or f"ID #{node_id}"
    problem = "not found. The embedded host has only the nodes of this pack" if class_type else "has no class_type"
    about = {"node_id": node_id, "class_type": class_type, "node_title": title}
    return fault("missing_node_type", f"Node '{title}' {problem}.", f"Node ID '#{node_id}'", about)


class _Walk:
    """Depth-first walk from the outputs to their sources; each node is validated once."""

    def __init__(self, prompt: Prompt, nodes: Mapping[str, type[ComfyNode]]) -> None:
        self._nodes = nodes
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
            if self._validate(output, "exception_during_validation", "Exception when validating node", {}):
                good.append(output)
                continue
            for node_id, faults in self._faults.items():
                entry = {"errors": faults, "dependent_outputs": [], "class_type": self._prompt[node_id]["class_type"]}
                node_errors.setdefault(node_id, entry)["dependent_outputs"].append(output)
        error = None if good else self._error(outputs)
        return Verdict(prompt=self._prompt, outputs=tuple(good), error=error, node_errors=node_errors)

    def _error(self, outputs: list[str]) -> Fault:
        of_outputs = [found for output in outputs for found in self._faults.get(output, ())]
        details = [f"{found['message']}: {found['details']}" for found in of_outputs] + self._cycles
        return fault("prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(details))

    def _validate(self, node_id: str, kind: str, message: str, about: Mapping[str, object]) -> bool:
        """Return True if a node and all its sources are valid; an exception becomes the node's fault of this kind."""
        if node_id in self._path:
            cycle = [*self._path[self._path.index(node_id) :], node_id]
            self._cycles.append(f"Dependency cycle detected: {' -> '.join(cycle)}")
            return False
        if node_id not in self._valid:
            self._path.append(node_id)
            try:
                faults, sources_valid = self._inspect(node_id)
            except Exception as err:  # noqa: BLE001 (a node's own check may raise anything; it is reported)
                faults, sources_valid = [exception_fault(err, about, kind=kind, message=message)], False
            self._path.pop()
            self._valid[node_id] = sources_valid and not faults
            if faults:
                self._faults[node_id] = faults
        return self._valid[node_id]

    def _inspect(self, node_id: str) -> tuple[list[Fault], bool]:
        """Return the node's own faults, and True if all its sources are valid; converts its constants in place."""
        node = self._nodes[self._prompt[node_id]["class_type"]]
        inputs = self._prompt[node_id]["inputs"]
        check = own_check(node)
        sockets = sockets_of(node)
        names = {socket.name for socket in sockets}
        faults: list[Fault] = [unknown_fault(name, sockets) for name in inputs if name not in names]
        received: dict[str, str] = {}
        sources_valid = True
        for socket in sockets:
            value = inputs.get(socket.name)
            found: Fault | None = None
            if socket.name not in inputs:
                found = missing_fault(socket)
            elif not isinstance(value, list):
                inputs[socket.name], found = converted(socket, value)
                if found is None and not (check and check.covers(socket.name)):
                    found = value_fault(socket, inputs[socket.name])
            elif (found := link_shape_fault(socket, value)) is None:
                received[socket.name] = self._linked_type(socket, value)
                if not (check and "input_types" in check.names):
                    found = link_type_fault(socket, value, received[socket.name])
                if found is None and not self._source_valid(socket, value):
                    sources_valid = False
            faults += [found] if found else []
        if check:
            faults += own_faults(node, check, inputs, received)
        return faults, sources_valid

    def _linked_type(self, socket: Socket, link: list[Any]) -> str:
        """Return the type of the linked output. Raises DanglingLinkError."""
        source, index = link
        if not isinstance(source, str) or source not in self._prompt:
            raise DanglingLinkError(f"'{socket.name}' is linked to node '{source}', which is not in the workflow")
        class_type = self._prompt[source]["class_type"]
        outputs = self._nodes[class_type].define_schema().outputs
        # ComfyUI indexes a Python list, so -1 is a valid index of the last output.
        if not isinstance(index, int) or not -len(outputs) <= index < len(outputs):
            count = len(outputs)
            raise DanglingLinkError(
                f"'{socket.name}' is linked to output {index} of node '{source}' ({class_type}), which has {count}"
            )
        return outputs[index].io_type

    def _source_valid(self, socket: Socket, link: list[Any]) -> bool:
        about = socket.about(linked_node=link)
        return self._validate(
            link[0], "exception_during_inner_validation", "Exception when validating inner node", about
        )
