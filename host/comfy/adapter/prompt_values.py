"""Constants in queued workflows, checked before ComfyUI converts them.

ComfyUI converts constants with `bool`, `int` and `float` before a node can check them. The server
first passes each queued workflow to handlers. There a constant refused by `plain_value` becomes a
`RefusedValue`. Converting it fails, so ComfyUI reports it on the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...input_values import InputValueError, RefusedValue, plain_value, same_choice, shown


class PromptValues:
    """Handler that checks constants for these node classes in queued workflows.

    Args:
        nodes: the classes.
        listed_model: see `listed_model` in `files`.
    """

    def __init__(
        self, nodes: Iterable[type[Any]], listed_model: Callable[[str, Sequence[object]], str]
    ) -> None:
        self._nodes = tuple(nodes)
        self._listed_model = listed_model
        self._by_id: dict[str, type[Any]] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check the workflow constants in a `POST /prompt` body, in place."""
        if not self._by_id:  # not on import, because schemas list model files
            self._by_id = {node.define_schema().node_id: node for node in self._nodes}
        prompt = request.get("prompt")
        # ComfyUI calls handlers before it validates anything, so the body may be any JSON object.
        # If a handler raises, ComfyUI logs the error and goes on without our checks.
        if not isinstance(prompt, dict):
            return request
        for node in prompt.values():
            if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
                found = self._by_id.get(str(node.get("class_type")))
                if found is not None:
                    self._check(node["inputs"], found.INPUT_TYPES())
        return request

    def _check(self, inputs: dict[str, Any], input_types: Mapping[str, Mapping[str, Any]]) -> None:
        for kind in ("required", "optional"):
            for name, (io_type, options) in input_types.get(kind, {}).items():
                value = inputs.get(name)
                # ComfyUI wraps a list value like this, because a bare list is a link.
                if isinstance(value, dict) and "__value__" in value:
                    value = value["__value__"]
                if name not in inputs or isinstance(value, list):
                    continue
                if io_type == "STRING" and value is None:
                    del inputs[name]  # would be the text "None", now a required input is missing
                else:
                    inputs[name] = self._checked(io_type, options.get("options", ()), value)

    def _checked(self, io_type: str, choices: Sequence[object], value: object) -> object:
        if io_type == "COMBO":
            found = same_choice(value, choices)
            if isinstance(found, str) and found not in choices:
                return self._listed_model(found, choices)
            return found
        try:
            plain_value(io_type, value)
        except InputValueError as err:
            refused = RefusedValue(value if isinstance(value, str) else shown(value))
            refused.reason = str(err)
            return refused
        return value
