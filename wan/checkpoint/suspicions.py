"""Experts and LoRAs that run, but probably not as they are meant to: what their names, headers and a few tensors say.

Nothing here is certain, so nothing here refuses. A name counts for the place of a file (high noise, low noise) and for
its family (image to video); the headers of both experts of a model are equal and say nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...offload import read_gguf_header, read_header, read_tensors
from ..lora.keys import key_meaning
from .detect import IMAGE_BRANCH, IMAGE_CONDITION_CHANNELS, LATENT_CHANNELS
from .files import is_gguf
from .open import Expert

Place = Literal["high", "low"]

OWN_NAMES = ("ss_output_name", "modelspec.title", "general.name")
"""Metadata that hold the name which a file was made under."""
BASE_NAMES = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")
"""Metadata that name the model a LoRA was trained on. One LoRA of both experts names one of them: it says no place."""

_NOISE = re.compile(r"(high|low)[\W_]*noise", re.IGNORECASE)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SHORT: Mapping[str, Place] = {"high": "high", "hn": "high", "low": "low", "ln": "low"}
_IMAGE = re.compile(r"(?<![a-z])(i2v|img2vid|image[\W_]*(to|2)[\W_]*video)", re.IGNORECASE)
_TEXT = re.compile(r"(?<![a-z])(t2v|txt2vid|text[\W_]*(to|2)[\W_]*video)", re.IGNORECASE)

# Small tensors that training changes; two experts in which all of them are equal are one.
_COMPARED = ("scale_shift_table", "blocks.0.scale_shift_table", "patch_embedding.bias", "proj_out.bias")


class Named(NamedTuple):
    """The place that a name states."""

    place: Place
    clear: bool
    """It names the noise; a mere "high" or "low" may mean something else, and counts only against its opposite."""


def named_place(name: str) -> Named | None:
    """The expert that a name states; None where it states none, or both."""
    clear = {place.lower() for place in _NOISE.findall(name)}
    words = [word.lower() for word in _WORDS.findall(name)]
    places = {_SHORT[word] for word in words if word in _SHORT} | clear
    if len(places) != 1:
        return None
    return Named("high" if "high" in places else "low", clear=bool(clear))


def names_image_to_video(name: str) -> bool:
    """True if a name states image to video, and not text to video as well."""
    return _IMAGE.search(name) is not None and _TEXT.search(name) is None


def expert_suspicions(high: Expert, low: Expert) -> list[str]:
    """Warnings about a pair of experts, a sentence with a remedy each."""
    if _is_same_file(high.path, low.path):
        return [f"{high.path.name} is both experts: choose the low-noise file of the model as low_noise"]
    if _is_same_weights(high, low):
        return [
            f"{high.path.name} and {low.path.name} hold the same weights, as two copies of one expert do: get the "
            "other expert again"
        ]
    return _misplaced("expert", _place_of(high.path), _place_of(low.path), high.path.name, low.path.name)


def lora_suspicions(high: Path | None, low: Path | None, expert: Expert, *, single: bool) -> list[str]:
    """Warnings about the LoRAs of the two experts of a model like `expert`; `single`: it has no other expert.

    Raises CheckpointFileError for a file that cannot be read.
    """
    found = []
    if not single:
        high_place, low_place = (None if path is None else _place_of(path) for path in (high, low))
        high_name, low_name = (None if path is None else path.name for path in (high, low))
        found += _misplaced("LoRA", high_place, low_place, high_name, low_name)
    if expert.config.family == "t2v":
        for path in dict.fromkeys(path for path in (high, low) if path is not None):
            reason = _image_to_video(path)
            if reason is not None:
                found.append(
                    f"{path.name} is a LoRA for image to video ({reason}), and the model is text to video: choose the "
                    "LoRA for text to video"
                )
    return found


def _misplaced(
    what: str, high: Named | None, low: Named | None, high_name: str | None, low_name: str | None
) -> list[str]:
    if high is not None and low is not None and (high.place, low.place) == ("low", "high"):
        return [
            f"the {what}s look swapped: {high_name} is chosen as high_noise, {low_name} as low_noise: exchange them"
        ]
    found = []
    for named, name, place in ((high, high_name, "high"), (low, low_name, "low")):
        if named is not None and named.clear and named.place != place:
            found.append(
                f"{name} is chosen as {place}_noise, and its name says {named.place} noise: choose the other {what}"
            )
    return found


def _place_of(path: Path) -> Named | None:
    """The expert that a file is by its name, by its folder's, or by the name it was made under."""
    if path.name in {"transformer", "transformer_2"}:  # of a diffusers pipeline of two
        return Named("low", clear=True) if path.name.endswith("2") else _first_of_two(path)
    own = named_place(path.stem if path.is_file() else path.name)
    if own is not None:
        return own
    folder = named_place(path.parent.name)
    if folder is not None and folder.clear:
        return folder
    return next(filter(None, map(named_place, _texts(path, OWN_NAMES))), None)


def _first_of_two(path: Path) -> Named | None:
    return Named("high", clear=True) if (path.parent / "transformer_2").is_dir() else None


def _image_to_video(path: Path) -> str | None:
    """The reason to take a LoRA for one of image to video."""
    for key, tensor in read_header(path).tensors.items():
        meaning = key_meaning(key)
        if meaning is None:
            continue
        if IMAGE_BRANCH.match(meaning.parameter):
            return f"{key} changes an image branch"
        if meaning.parameter == "patch_embedding.weight" and meaning.role in {"down", "diff"}:
            channels = math.prod(tensor.shape[1:]) // 4  # of a patch of 1 x 2 x 2
            if channels == LATENT_CHANNELS + IMAGE_CONDITION_CHANNELS:
                return f"{key} takes {channels} channels"
    if names_image_to_video(path.stem):
        return "its name says so"
    if any(map(names_image_to_video, _texts(path, OWN_NAMES + BASE_NAMES))):
        return "its header says so"
    return None


def _texts(path: Path, fields: Iterable[str]) -> list[str]:
    if not path.is_file():
        return []
    metadata = (read_gguf_header if is_gguf(path) else read_header)(path).metadata
    return [metadata[field] for field in fields if isinstance(metadata.get(field), str)]


def _is_same_file(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def _is_same_weights(high: Expert, low: Expert) -> bool:
    """True if the compared tensors are equal, bit for bit; False if they are stored in another form."""
    pairs = [(high.weights.get(name), low.weights.get(name)) for name in _COMPARED]
    for one, other in pairs:
        if one is None or other is None or one.packing is not None or other.packing is not None:
            return False
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
    first = read_tensors({name: high.weights[name] for name in _COMPARED})
    second = read_tensors({name: low.weights[name] for name in _COMPARED})
    return all(torch.equal(first[name], second[name]) for name in _COMPARED)
