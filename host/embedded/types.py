"""Types of ComfyUI's V3 `io` module for our nodes, with the arguments of ComfyUI 0.3.64, the oldest supported one.

An argument of a later ComfyUI raises a TypeError here, so that no node uses it by accident. Unlike in ComfyUI, all
arguments except an input's id and a combo's options are keyword-only.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar, Generic, TypeVar

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
