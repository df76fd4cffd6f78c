"""Likely mismatches between experts, LoRAs and guidance, found in names, headers and a few tensors.

No finding is certain, so all are notices. Expert (high noise, low noise) and family (image to
video) come from file names, because both experts of a model have equal headers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...offload.formats import read_header
from ...offload.sources import read_tensors
from ...schema import StepStrengths
from ...schema.records import Notice
from ...schema.refs import ExpertsRef
from ..checkpoint.detect import IMAGE_BRANCH, IMAGE_CONDITION_CHANNELS, LATENT_CHANNELS
from ..checkpoint.files import read_checkpoint
from ..checkpoint.open import Expert
from ..lora.keys import key_meaning

Place = Literal["high", "low"]

FULL_STRENGTH = StepStrengths(usual=1.0)

TITLE_FIELDS = ("ss_output_name", "modelspec.title", "general.name")
"""Metadata fields with the original file name."""
BASE_MODEL_FIELDS = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")
"""Metadata fields with a LoRA's base model.

A LoRA for both experts names one of them here, so these fields do not determine a place.
"""

_NOISE = re.compile(r"(high|low)[\W_]*noise", re.IGNORECASE)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ABBREVIATIONS: Mapping[str, Place] = {"high": "high", "hn": "high", "low": "low", "ln": "low"}
_IMAGE = re.compile(r"(?<![a-z])(i2v|img2vid|image[\W_]*(to|2)[\W_]*video)", re.IGNORECASE)
_TEXT = re.compile(r"(?<![a-z])(t2v|txt2vid|text[\W_]*(to|2)[\W_]*video)", re.IGNORECASE)

_FEW_STEPS = re.compile(
    r"light(ning|x2v)|(?<!\d)[1-9][\W_]*steps?(?![a-z])|distill|causvid|accvid|fusionx|fastwan|dmd|self[\W_]*forcing"
    r"|(?<![a-z])(turbo|hyper|rcm|lcm)(?![a-z])",
    re.IGNORECASE,
)
"""Names of models and LoRAs distilled to a few steps. Distillation includes the guidance."""
_WITH_CFG = re.compile(
    r"(?<![a-z])(?<!no[-_ ])cfg(?![a-z]|[-_ ]?1(?!\.?\d))(?!.*distill)", re.IGNORECASE
)
"""Names of models and LoRAs with guidance: "CFG" as a word, not as the object of distillation."""

# Small tensors changed by training. If all are equal, both experts are the same one.
_FINGERPRINT = (
    "scale_shift_table",
    "blocks.0.scale_shift_table",
    "patch_embedding.bias",
    "proj_out.bias",
)


class NamedPlace(NamedTuple):
    """Place in the pair (high or low noise) stated by a name."""

    place: Place
    clear: bool
    """True if the name contains "noise".

    A mere "high" or "low" may mean something else and counts only against its opposite.
    """


def place_from_name(name: str) -> NamedPlace | None:
    """Return the place stated by a name. None if it states neither or both."""
    clear = {place.lower() for place in _NOISE.findall(name)}
    words = [word.lower() for word in _WORDS.findall(name)]
    places = {_ABBREVIATIONS[word] for word in words if word in _ABBREVIATIONS} | clear
    if len(places) != 1:
        return None
    return NamedPlace("high" if "high" in places else "low", clear=bool(clear))


def is_image_to_video_name(name: str) -> bool:
    """Return True if a name states image to video and not text to video."""
    return _IMAGE.search(name) is not None and _TEXT.search(name) is None


def expert_mismatches(high: Expert, low: Expert) -> list[Notice]:
    """Return notices about a pair of experts, each with a remedy."""
    if high.path.exists() and low.path.exists() and high.path.samefile(low.path):
        text = f"{high.path.name} is both experts: choose the low-noise file of the model as "
        return [Notice(text=f"{text}low_noise", level="wrong")]
    if _is_same_weights(high, low):
        text = f"{high.path.name} and {low.path.name} hold the same weights, so they are copies of "
        return [Notice(text=f"{text}one expert: download the other expert again", level="wrong")]
    return _swapped_or_misplaced("expert", high.path, low.path)


def lora_mismatches(
    high: Path | None, low: Path | None, expert: Expert, *, single: bool
) -> list[Notice]:
    """Return notices about the LoRAs for a model's two experts, each with a remedy.

    Args:
        high: LoRA for the high-noise expert.
        low: LoRA for the low-noise expert.
        expert: one of the model's experts.
        single: the model has no other expert.

    Raises:
        CheckpointFileError: a file cannot be read.
    """
    found = [] if single else _swapped_or_misplaced("LoRA", high, low)
    if expert.config.family == "t2v":
        for path in dict.fromkeys(path for path in (high, low) if path is not None):
            reason = _image_to_video(path)
            if reason is not None:
                text = (
                    f"{path.name} is a LoRA for image to video ({reason}), and the model is "
                    "text to video: choose the LoRA for text to video"
                )
                found.append(Notice(text=text, level="wrong"))
    return found


class GuidedStep(NamedTuple):
    """Expert and CFG scale of one step."""

    step: int
    expert: str
    scale: float


def guidance_mismatches(ref: ExpertsRef, steps: Iterable[GuidedStep]) -> list[Notice]:
    """Return a notice per expert distilled to few steps, by itself or by a LoRA, and run with CFG.

    A LoRA counts only in steps with a strength other than 0.
    """
    guided = [each for each in steps if each.scale > 1]
    found = []
    for expert in dict.fromkeys(each.expert for each in guided):
        for path, strength in _files_of(ref, expert):
            scales = [
                each.scale for each in guided if each.expert == expert and strength.at(each.step)
            ]
            if scales and _is_for_few_steps(path):
                text = (
                    f"{path.name} needs no CFG, and guidance_{expert} is {max(scales):g}: set "
                    "it to 1, or the video gets harsh colours and takes twice the time"
                )
                found.append(Notice(text=text, level="wrong"))
                break
    return found


def _files_of(ref: ExpertsRef, expert: str) -> list[tuple[Path, StepStrengths]]:
    """Return the weight files of this expert, with their strengths."""
    files: list[tuple[Path | None, StepStrengths]] = [(ref.high_noise, FULL_STRENGTH)]
    files += [(each.high_noise, each.high) for each in ref.loras]
    if expert == "low":
        files = [(ref.low_noise, FULL_STRENGTH)]
        files += [(each.low_noise, each.low) for each in ref.loras]
    return [(path, strengths) for path, strengths in files if path is not None]


def is_for_few_steps(name: str) -> bool:
    """Return True if a file or folder name states a model distilled to few steps without CFG."""
    return _FEW_STEPS.search(name) is not None and _WITH_CFG.search(name) is None


def _is_for_few_steps(path: Path) -> bool:
    """Return True if the file name, the folder name or the header states a distilled model."""
    names = [_own_name(path), *_metadata_values(path, TITLE_FIELDS)]
    if any(map(_WITH_CFG.search, names)):
        return False
    return any(map(_FEW_STEPS.search, [*names, path.parent.name]))


def _swapped_or_misplaced(kind: str, high: Path | None, low: Path | None) -> list[Notice]:
    found = []
    stated = []
    for place, path in (("high", high), ("low", low)):
        if path is None:
            continue
        named = _place_of(path)
        if named is None:
            continue
        stated.append(named.place)
        if named.clear and named.place != place:
            text = (
                f"{path.name} is chosen as {place}_noise, and its name says {named.place} noise: "
                f"choose the other {kind}"
            )
            found.append(Notice(text=text, level="wrong"))
    if high is not None and low is not None and stated == ["low", "high"]:
        text = (
            f"the {kind}s look swapped: {high.name} is chosen as high_noise, {low.name} as "
            "low_noise: exchange them"
        )
        return [Notice(text=text, level="wrong", exchange=("high_noise", "low_noise"))]
    return found


def _place_of(path: Path) -> NamedPlace | None:
    """Return the place stated by the file name, the folder name or the metadata."""
    if path.name == "transformer_2":  # a folder in a diffusers pipeline
        return NamedPlace("low", clear=True)
    if path.name == "transformer":
        # Wan2.1 has one too. It is the high-noise expert only next to a second one.
        is_first = (path.parent / "transformer_2").is_dir()
        return NamedPlace("high", clear=True) if is_first else None
    stated = place_from_name(_own_name(path))
    if stated is not None:
        return stated
    folder = place_from_name(path.parent.name)
    if folder is not None and folder.clear:
        return folder
    return next(filter(None, map(place_from_name, _metadata_values(path, TITLE_FIELDS))), None)


def _own_name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _image_to_video(path: Path) -> str | None:
    """Return the reason why a LoRA seems to be for image to video, or None."""
    for key, tensor in read_header(path).tensors.items():
        meaning = key_meaning(key)
        if meaning is None:
            continue
        if IMAGE_BRANCH.match(meaning.parameter):
            return f"{key} changes an image branch"
        if meaning.parameter == "patch_embedding.weight" and meaning.role in {"down", "diff"}:
            channels = math.prod(tensor.shape[1:]) // 4  # a patch is 1 x 2 x 2
            if channels == LATENT_CHANNELS + IMAGE_CONDITION_CHANNELS:
                return f"{key} takes {channels} channels"
    if is_image_to_video_name(path.stem):
        return "its name says so"
    if any(map(is_image_to_video_name, _metadata_values(path, TITLE_FIELDS + BASE_MODEL_FIELDS))):
        return "its header says so"
    return None


def _metadata_values(path: Path, fields: Iterable[str]) -> list[str]:
    if not path.is_file():
        return []
    metadata = read_checkpoint(path).metadata
    return [metadata[field] for field in fields if isinstance(metadata.get(field), str)]


def _is_same_weights(high: Expert, low: Expert) -> bool:
    """Return True if the fingerprint tensors are bit-equal.

    False if they are packed or differ in dtype or shape.
    """
    prints = [{name: expert.weights[name] for name in _FINGERPRINT} for expert in (high, low)]
    for one, other in zip(*(each.values() for each in prints), strict=True):
        if one.packing is not None or other.packing is not None:
            return False
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
    first, second = map(read_tensors, prints)
    return all(torch.equal(first[name], second[name]) for name in _FINGERPRINT)
