"""Subset of ComfyUI's V3 `io` module for our nodes, to run them without ComfyUI.

Node expansion, lazy inputs, and list inputs and outputs are missing; workflows with them are refused. The types have
the arguments of ComfyUI 0.3.64, the oldest supported one. An argument of a later ComfyUI raises a TypeError here, so
that no node uses it by accident. Unlike in ComfyUI, all arguments except an input's id and a combo's options are
keyword-only.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

Number = TypeVar("Number", int, float)


class FolderType(str, Enum):
    """Folder kinds of a host."""

    input = "input"
    output = "output"
    temp = "temp"


class UploadType(str, Enum):
    """Kinds of files for the upload button of a combo."""

    image = "image_upload"
    video = "video_upload"


class NumberDisplay(str, Enum):
    """Widgets of a number."""

    number = "number"
    slider = "slider"


# Argument names that differ in the options read by the frontend and the validation.
_OPTION_NAMES = {"display_mode": "display", "force_input": "forceInput", "dynamic_prompts": "dynamicPrompts"}
_NOT_OPTIONS = {"id", "optional"}


@dataclass(frozen=True, kw_only=True)
class AnyInput:
    """A socket of a node."""

    io_type: ClassVar[str] = "*"

    id: str = field(kw_only=False)
    display_name: str | None = None
    optional: bool = False
    tooltip: str | None = None
    lazy: bool | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the options of this input for `INPUT_TYPES()`, without those that are None."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_OPTIONS}
        return {
            _OPTION_NAMES.get(name, name): value.value if isinstance(value, Enum) else value
            for name, value in options.items()
            if value is not None
        }


@dataclass(frozen=True, kw_only=True)
class AnyOutput:
    """A result of a node."""

    io_type: ClassVar[str] = "*"

    id: str | None = field(default=None, kw_only=False)
    display_name: str | None = None
    tooltip: str | None = None
    is_output_list: bool = False


# ComfyUI's names. Inside the types of links below, `Input` and `Output` are their own classes.
Input = AnyInput
Output = AnyOutput


class ComfyTypeIO:
    """A type of links, without a widget unless a subclass has an `Input` of its own."""

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
    """Return the link type called `io_type`: one of ours, or one of ComfyUI's without a widget."""
    return types.new_class(io_type, (ComfyTypeIO,), {"io_type": io_type})


Audio = Custom("AUDIO")
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
class WidgetInput(AnyInput):
    """A socket with a widget."""

    socketless: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ValueInput(WidgetInput):
    """A socket with a widget, which `force_input` hides."""

    force_input: bool | None = None


@dataclass(frozen=True, kw_only=True)
class NumberInput(ValueInput, Generic[Number]):
    """A number in a range."""

    default: Number | None = None
    min: Number | None = None
    max: Number | None = None
    step: Number | None = None
    display_mode: NumberDisplay | None = None


class Boolean(ComfyTypeIO, io_type="BOOLEAN"):
    """True or False."""

    @dataclass(frozen=True, kw_only=True)
    class Input(ValueInput):
        default: bool | None = None
        label_on: str | None = None
        label_off: str | None = None


class Int(ComfyTypeIO, io_type="INT"):
    """A whole number; `control_after_generate` adds the widget that changes a seed from run to run."""

    @dataclass(frozen=True, kw_only=True)
    class Input(NumberInput[int]):
        control_after_generate: bool | None = None


class Float(ComfyTypeIO, io_type="FLOAT"):
    """A number."""

    @dataclass(frozen=True, kw_only=True)
    class Input(NumberInput[float]):
        round: float | None = None


class String(ComfyTypeIO, io_type="STRING"):
    """Text."""

    @dataclass(frozen=True, kw_only=True)
    class Input(ValueInput):
        multiline: bool = False
        placeholder: str | None = None
        default: str | None = None
        dynamic_prompts: bool | None = None


class Combo(ComfyTypeIO, io_type="COMBO"):
    """A choice from a list; an Enum class stands for the values of its members."""

    @dataclass(frozen=True, kw_only=True)
    class Input(WidgetInput):
        options: Sequence[str] | Sequence[int] | type[Enum] | None = field(default=None, kw_only=False)
        default: str | int | Enum | None = None
        control_after_generate: bool | None = None
        upload: UploadType | None = None
        image_folder: FolderType | None = None

        def as_dict(self) -> dict[str, object]:
            given = super().as_dict()
            if isinstance(self.options, type):
                given["options"] = [member.value for member in self.options]
            if self.upload is not None:
                del given["upload"]
                given[self.upload.value] = True
            return {**given, "multiselect": False}


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
