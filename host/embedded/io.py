"""Subset of ComfyUI's V3 `io` module for our nodes, to run them without ComfyUI.

Node expansion, lazy inputs, and list inputs and outputs are missing; workflows with them are refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .types import AnyInput as Input
from .types import AnyOutput as Output
from .types import (
    Boolean,
    Combo,
    ComfyTypeIO,
    Conditioning,
    Custom,
    Float,
    FolderType,
    Guider,
    Image,
    Int,
    Latent,
    Mask,
    Model,
    NumberDisplay,
    Sigmas,
    String,
    UploadType,
    Vae,
    Video,
)


class Hidden(str, Enum):
    """Values that a node may request in addition to its inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass(frozen=True, kw_only=True)
class HiddenHolder:
    """Hidden values of the running node; None for those that it did not request."""

    unique_id: str | None = None
    prompt: Mapping[str, Any] | None = None
    extra_pnginfo: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Schema:
    """Description of a node: the 14 fields of every ComfyUI since 0.3.64, and one of later versions."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: Sequence[Input] = ()
    outputs: Sequence[Output] = ()
    hidden: Sequence[Hidden] = ()
    description: str = ""
    search_aliases: Sequence[str] = ()
    """Additional words for ComfyUI's node search; ComfyUI 0.11 and later."""
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False

    def all_hidden(self) -> tuple[Hidden, ...]:
        """Return the requested hidden values, plus prompt and workflow for an output node."""
        implicit = (Hidden.prompt, Hidden.extra_pnginfo) if self.is_output_node else ()
        return tuple(dict.fromkeys((*self.hidden, *implicit)))


class NodeOutput:
    """Results of a node in the order of its outputs, and its `ui` dictionary for the history."""

    def __init__(self, *args: Any, ui: UIOutput | Mapping[str, Any] | None = None) -> None:
        self.args = args
        self.ui = ui


class UIOutput(ABC):
    """A typed form of a `ui` dictionary."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the `ui` dictionary: every value is a list or a tuple."""


class ComfyNode:
    """Base of every node. Never instantiated: its class methods are called on a copy with `hidden` filled in."""

    hidden: HiddenHolder = HiddenHolder()

    @classmethod
    def define_schema(cls) -> Schema:
        """Describe the node; called for every validation and listing, so it must be cheap."""
        raise NotImplementedError

    @classmethod
    def execute(cls, *args: Any, **kwargs: Any) -> Any:
        """Do the node's work; may be async. Inputs come by name, an optional one only if it is given."""
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, *args: Any, **kwargs: Any) -> bool | str:
        """Return True or an error message for the inputs in the signature; the host checks only the other inputs."""
        raise NotImplementedError

    @classmethod
    def fingerprint_inputs(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a cache key: ComfyUI may reuse earlier results if it is equal; the embedded host caches none."""
        raise NotImplementedError

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 (ComfyUI's name)
        """Return all inputs as `{"required" | "optional": {id: (type, options)}, "hidden": {id: (type,)}}`."""
        schema = cls.define_schema()
        kinds: dict[str, dict[str, Any]] = {"required": {}}
        for socket in schema.inputs:
            kind = kinds.setdefault("optional" if socket.optional else "required", {})
            kind[socket.id] = (socket.io_type, socket.as_dict())
        for hidden in schema.all_hidden():
            kinds.setdefault("hidden", {})[hidden.name] = (hidden.value,)
        return kinds


class ComfyExtension(ABC):
    """Entry point of a node pack."""

    async def on_load(self) -> None:  # noqa: B027 (optional hook)
        """Run once after the import of the pack."""

    @abstractmethod
    async def get_node_list(self) -> list[type[ComfyNode]]:
        """Return all nodes of the pack."""


__all__ = [
    "Boolean",
    "Combo",
    "ComfyExtension",
    "ComfyNode",
    "ComfyTypeIO",
    "Conditioning",
    "Custom",
    "Float",
    "FolderType",
    "Guider",
    "Hidden",
    "HiddenHolder",
    "Image",
    "Input",
    "Int",
    "Latent",
    "Mask",
    "Model",
    "NodeOutput",
    "NumberDisplay",
    "Output",
    "Schema",
    "Sigmas",
    "String",
    "UIOutput",
    "UploadType",
    "Vae",
    "Video",
]
