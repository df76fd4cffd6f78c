"""Constants in queued workflows, checked before ComfyUI converts them.

ComfyUI converts constants with `bool`, `int` and `float` before a node's own check gets them. The server gives each
queued workflow to handlers first. There a constant refused by `plain_value` becomes a `RefusedValue`. Converting it
fails, so that ComfyUI reports it on the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..input_values import InputValueError, RefusedValue, plain_value, same_choice, shown


class PromptValues:
    """Handler for queued workflows, for the constants of these node classes.

    Args:
        nodes: the classes.
        listed_name: see `HostApi.listed_name`.
    """

    def __init__(self, nodes: Iterable[type[Any]], listed_name: Callable[[str, Sequence[object]], str]) -> None:
        self._nodes = tuple(nodes)
        self._listed_name = listed_name
        self._by_id: dict[str, type[Any]] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check the workflow constants in the body of a `POST /prompt`, in place."""
        if not self._by_id:  # not on import, because schemas list model files
            self._by_id = {node.define_schema().node_id: node for node in self._nodes}
        prompt = request.get("prompt")
        for node in prompt.values() if isinstance(prompt, dict) else ():
            found = self._by_id.get(str(node.get("class_type"))) if isinstance(node, dict) else None
            if found is not None and isinstance(node.get("inputs"), dict):
                self._check(node["inputs"], found.INPUT_TYPES())
        return request

    def _check(self, inputs: dict[str, Any], input_types: Mapping[str, Mapping[str, Any]]) -> None:
        for kind in ("required", "optional"):
            for name, (io_type, options) in input_types.get(kind, {}).items():
                value = inputs.get(name)
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
            return self._listed_name(found, choices) if isinstance(found, str) and found not in choices else found
        try:
            plain_value(io_type, value)
        except InputValueError as err:
            refused = RefusedValue(value if isinstance(value, str) else shown(value))
            refused.reason = str(err)
            return refused
        return value
