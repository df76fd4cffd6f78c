"""Subset of ComfyUI's V3 `io` module for our nodes, to run them without ComfyUI.

Node expansion, lazy inputs, and list inputs and outputs are missing, and so is everything else our
nodes do not use. The types have the arguments of ComfyUI 0.3.64, the oldest supported version. Any
other argument raises a TypeError here, so that no node uses a later one by accident. Unlike in
ComfyUI, all arguments except an input's id and a combo's options are keyword-only.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

Number = TypeVar("Number", int, float)


class FolderType(str, Enum):
    """Folder kinds in a host."""

    input = "input"
    output = "output"
    temp = "temp"


class UploadType(str, Enum):
    """File kinds for a combo's upload button."""

    image = "image_upload"
    video = "video_upload"


_NOT_OPTIONS = {"id", "optional"}


@dataclass(frozen=True, kw_only=True)
class AnyInput:
    """Input socket on a node."""

    io_type: ClassVar[str] = "*"

    id: str = field(kw_only=False)
    display_name: str | None = None
    optional: bool = False
    tooltip: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return this input's options for `INPUT_TYPES()`, without None values."""
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and name not in _NOT_OPTIONS
        }


@dataclass(frozen=True, kw_only=True)
class AnyOutput:
    """Result socket on a node."""

    io_type: ClassVar[str] = "*"

    id: str | None = field(default=None, kw_only=False)
    display_name: str | None = None
    tooltip: str | None = None


# ComfyUI's names. Inside the link types below, `Input` and `Output` are their own classes.
Input = AnyInput
Output = AnyOutput


class ComfyTypeIO:
    """Link type, without a widget unless a subclass has its own `Input`."""

    io_type: ClassVar[str] = "*"

    class Input(AnyInput):
        pass

    class Output(AnyOutput):
        pass

    def __init_subclass__(cls, io_type: str) -> None:
        cls.io_type = io_type
        for side in ("Input", "Output"):
            setattr(cls, side, type(side, (getattr(cls, side),), {"io_type": io_type}))


def Custom(io_type: str) -> type[ComfyTypeIO]:  # noqa: N802 (ComfyUI's name)
    """Return the link type called `io_type`: one of ours, or a ComfyUI type without a widget."""
    return types.new_class(io_type, (ComfyTypeIO,), {"io_type": io_type})


Audio = Custom("AUDIO")
Clip = Custom("CLIP")
Conditioning = Custom("CONDITIONING")
Guider = Custom("GUIDER")
Image = Custom("IMAGE")
Latent = Custom("LATENT")
Mask = Custom("MASK")
Model = Custom("MODEL")
Sigmas = Custom("SIGMAS")
Vae = Custom("VAE")
Video = Custom("VIDEO")


@dataclass(frozen=True, kw_only=True)
class NumberInput(AnyInput, Generic[Number]):
    """A number in a range."""

    default: Number | None = None
    min: Number | None = None
    max: Number | None = None
    step: Number | None = None


class Boolean(ComfyTypeIO, io_type="BOOLEAN"):
    """True or False."""

    @dataclass(frozen=True, kw_only=True)
    class Input(AnyInput):
        default: bool | None = None


class Int(ComfyTypeIO, io_type="INT"):
    """A whole number.

    `control_after_generate` adds the widget that changes a seed from run to run.
    """

    @dataclass(frozen=True, kw_only=True)
    class Input(NumberInput[int]):
        control_after_generate: bool | None = None


class Float(ComfyTypeIO, io_type="FLOAT"):
    """A number."""

    class Input(NumberInput[float]):
        pass


class String(ComfyTypeIO, io_type="STRING"):
    """Text."""

    @dataclass(frozen=True, kw_only=True)
    class Input(AnyInput):
        multiline: bool = False
        default: str | None = None


class Combo(ComfyTypeIO, io_type="COMBO"):
    """A choice from a list."""

    @dataclass(frozen=True, kw_only=True)
    class Input(AnyInput):
        options: Sequence[str] | Sequence[int] | None = field(default=None, kw_only=False)
        default: str | int | None = None
        control_after_generate: bool | None = None
        upload: UploadType | None = None

        def as_dict(self) -> dict[str, object]:
            given = super().as_dict()
            if self.upload is not None:
                del given["upload"]
                given[self.upload.value] = True
            # ComfyUI's own description of a combo has this key too.
            return {**given, "multiselect": False}


class Hidden(str, Enum):
    """Values that a node may request besides inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass(frozen=True, kw_only=True)
class HiddenHolder:
    """Hidden values for the running node. Values it did not request are None."""

    unique_id: str | None = None
    prompt: Mapping[str, Any] | None = None
    extra_pnginfo: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Schema:
    """Node description: fields in every ComfyUI since 0.3.64, and one from later versions."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: Sequence[Input] = ()
    outputs: Sequence[Output] = ()
    hidden: Sequence[Hidden] = ()
    description: str = ""
    search_aliases: Sequence[str] = ()
    """Additional words for ComfyUI's node search, in ComfyUI 0.11 and later."""
    is_output_node: bool = False
    not_idempotent: bool = False

    def all_hidden(self) -> tuple[Hidden, ...]:
        """Return the requested hidden values, plus prompt and workflow for an output node."""
        implicit = (Hidden.prompt, Hidden.extra_pnginfo) if self.is_output_node else ()
        return tuple(dict.fromkeys((*self.hidden, *implicit)))


class NodeOutput:
    """Node results in output order, and a `ui` dictionary for the history.

    Every value in the dictionary is a list or a tuple.
    """

    def __init__(self, *args: Any, ui: Mapping[str, Any] | None = None) -> None:
        self.args = args
        self.ui = ui


class ComfyNode:
    """Base class for every node.

    Never instantiated: class methods are called on a copy with `hidden` filled in.
    """

    hidden: HiddenHolder = HiddenHolder()

    @classmethod
    def define_schema(cls) -> Schema:
        """Describe the node. Called for every validation and listing, so it must be cheap."""
        raise NotImplementedError

    @classmethod
    def execute(cls, *args: Any, **kwargs: Any) -> Any:
        """Do the node's work.

        Inputs come by name, optional ones only if given.
        """
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, *args: Any, **kwargs: Any) -> bool | str:
        """Return True or an error message for the inputs in the signature.

        The host checks only the other inputs.
        """
        raise NotImplementedError

    @classmethod
    def fingerprint_inputs(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a cache key. ComfyUI may reuse earlier results for an equal key.

        The embedded host caches nothing.
        """
        raise NotImplementedError

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 (ComfyUI's name)
        """Return all inputs by kind: "required", "optional" and "hidden".

        The form is `{"required" | "optional": {id: (type, options)}, "hidden": {id: (type,)}}`.
        """
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

    @abstractmethod
    async def get_node_list(self) -> list[type[ComfyNode]]:
        """Return all nodes in the pack."""
