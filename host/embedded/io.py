"""The part of ComfyUI's V3 `io` module that our nodes use, for running them without ComfyUI.

Left out, and refused where a workflow is run: node expansion, lazy inputs, list inputs and outputs.
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
    """What a node may ask for besides its inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass(frozen=True, kw_only=True)
class HiddenHolder:
    """What the host knows about the running node; None where the node did not ask for it."""

    unique_id: str | None = None
    prompt: Mapping[str, Any] | None = None
    extra_pnginfo: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Schema:
    """Everything about a node but its code: the 14 fields of every ComfyUI since 0.3.64, and one of later ones."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: Sequence[Input] = ()
    outputs: Sequence[Output] = ()
    hidden: Sequence[Hidden] = ()
    description: str = ""
    search_aliases: Sequence[str] = ()
    """Words by which ComfyUI's search finds the node: 0.11 and later."""
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False

    def all_hidden(self) -> tuple[Hidden, ...]:
        """What the node asked for, and the prompt and workflow that every output node gets unasked."""
        unasked = (Hidden.prompt, Hidden.extra_pnginfo) if self.is_output_node else ()
        return tuple(dict.fromkeys((*self.hidden, *unasked)))


class NodeOutput:
    """The results of a node in the order of its outputs, and what its place in the history shows (`ui`)."""

    def __init__(self, *args: Any, ui: UIOutput | Mapping[str, Any] | None = None) -> None:
        self.args = args
        self.ui = ui


class UIOutput(ABC):
    """A typed form of a `ui` dictionary."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The `ui` dictionary: every value is a list or a tuple."""


class ComfyNode:
    """Base of every node. Never instantiated: its class methods are called on a copy with `hidden` filled in."""

    hidden: HiddenHolder = HiddenHolder()

    @classmethod
    def define_schema(cls) -> Schema:
        """Describe the node; called whenever inputs are looked at, so it must be cheap."""
        raise NotImplementedError

    @classmethod
    def execute(cls, *args: Any, **kwargs: Any) -> Any:
        """Do the node's work; may be async. Inputs come by name, an optional one only if it is given."""
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, *args: Any, **kwargs: Any) -> bool | str:
        """True, or what is wrong with the inputs named in the signature; the host checks only the others itself."""
        raise NotImplementedError

    @classmethod
    def fingerprint_inputs(cls, *args: Any, **kwargs: Any) -> Any:
        """Equal values mean that ComfyUI may reuse the former results; the embedded host keeps none."""
        raise NotImplementedError

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 (ComfyUI's name)
        """All inputs as `{"required" | "optional": {id: (type, options)}, "hidden": {id: (type,)}}`."""
        schema = cls.define_schema()
        kinds: dict[str, dict[str, Any]] = {"required": {}}
        for socket in schema.inputs:
            kind = kinds.setdefault("optional" if socket.optional else "required", {})
            kind[socket.id] = (socket.io_type, socket.as_dict())
        for hidden in schema.all_hidden():
            kinds.setdefault("hidden", {})[hidden.name] = (hidden.value,)
        return kinds


class ComfyExtension(ABC):
    """What a pack hands to ComfyUI."""

    async def on_load(self) -> None:  # noqa: B027 (may be left as it is)
        """Called once after the pack was imported."""

    @abstractmethod
    async def get_node_list(self) -> list[type[ComfyNode]]:
        """All nodes of the pack."""


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
