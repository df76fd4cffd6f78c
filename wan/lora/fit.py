"""LoRA compatibility with an expert's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

from ...schema import StepStrengths
from ..checkpoint.detect import (
    IMAGE_BRANCH,
    IMAGE_CONDITION_CHANNELS,
    LATENT_CHANNELS,
    Shape,
    WanConfig,
)
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.meta_model import parameter_shapes
from .changes import Change
from .file import LoraFile, noted

# Models by width and feed-forward width.
KNOWN_SIZES = {
    1536: "Wan2.1 1.3B",
    8960: "Wan2.1 1.3B",
    3072: "Wan2.2 5B",
    14336: "Wan2.2 5B",
    5120: "a 14B model",
    13824: "a 14B model",
}

CONDITIONED_CHANNELS = LATENT_CHANNELS + IMAGE_CONDITION_CHANNELS
LATENT_LAYER = "patch_embedding.weight"


def fit_lora(lora: LoraFile, config: WanConfig) -> LoraFile:
    """Return the part of `lora` that can be added to an expert with this config.

    Two kinds of changes are dropped, with a note. A patch embedding change is dropped if a
    text-to-video LoRA meets an image-to-video expert, or the reverse. Changes to the Wan2.1 I2V
    image branch are dropped if the expert has none.

    Raises:
        CheckpointError: names the first layer that does not fit, with both shapes.
    """
    shapes = parameter_shapes(config)
    # First, because an expert without an image branch would refuse these parameters below.
    if config.image_dim is None:
        lora = _without_image_branch(lora)
    for parameter in lora.changes:
        if parameter not in shapes:
            reason = f"changes {both_names(parameter)}; the expert has {config.num_layers} blocks"
            raise CheckpointError(lora.path, f"{reason}, from 0 on")
    lora = _without_other_latents(lora, shapes[LATENT_LAYER])
    for parameter, changes in lora.changes.items():
        for change in changes:
            _refuse_other_shapes(lora, parameter, change, shapes[parameter])
    if not lora.changes:
        raise CheckpointError(
            lora.path, "changes nothing but layers that this expert does not have"
        )
    return lora


def _refuse_other_shapes(lora: LoraFile, parameter: str, change: Change, expected: Shape) -> None:
    shape = lora.tensors[change.first[0]].shape
    named = f"{change.first[0]} is"
    if not change.is_difference:
        shape = change.shape(lora.tensors)
        expected = _as_matrix(expected)
        named = f"{' and '.join(change.first + change.second)} change a weight of"
    if shape != expected:
        model = next(
            (f": this LoRA is for {KNOWN_SIZES[n]}" for n in shape if n in KNOWN_SIZES), ""
        )
        found = f"{named} {list(shape)}; {both_names(parameter)} of the expert is {list(expected)}"
        raise CheckpointError(lora.path, found + model)


class MultipliedWeightError(CheckpointError):
    """LoRA that cannot be computed next to a weight that is multiplied as stored."""


def fit_loras(
    loras: Sequence[tuple[LoraFile, float | StepStrengths]], config: WanConfig
) -> list[tuple[LoraFile, StepStrengths]]:
    """Return the LoRAs, each fitted to the expert, with their strength in each step.

    Raises:
        CheckpointError: as in `fit_lora`.
        ValueError: a strength is not a finite number.
    """
    fitted = []
    for lora, given in loras:
        strengths = given
        if not isinstance(strengths, StepStrengths):
            strengths = StepStrengths(usual=strengths)
        for strength in strengths.values:
            if not math.isfinite(strength):
                raise ValueError(f"the strength of {lora.path} is {strength}: give a finite number")
        fitted.append((fit_lora(lora, config), strengths))
    return fitted


def refuse_beside(lora: LoraFile, multiplied: Set[str]) -> None:
    """Refuse changes to weights multiplied as stored, unless a layer can compute them separately.

    Args:
        lora: LoRA for one expert.
        multiplied: weight names.

    Raises:
        MultipliedWeightError: the message has the first weight.
    """
    for name in multiplied & lora.changes.keys():
        for change in lora.changes[name]:
            if not change.is_product:
                raise MultipliedWeightError(
                    lora.path,
                    f"is {change.algorithm}, and {name} is multiplied as it is stored, "
                    "which takes plain LoRAs only: "
                    'choose arithmetic "decoded" in the loader, or leave this LoRA out',
                )


def _without_other_latents(lora: LoraFile, expected: Shape) -> LoraFile:
    """Drop the patch embedding change if it was made for the other family's latents."""
    lora_shape = {change.shape(lora.tensors) for change in lora.changes.get(LATENT_LAYER, ())}
    patch = math.prod(expected[2:])
    families = {
        (expected[0], channels * patch) for channels in (LATENT_CHANNELS, CONDITIONED_CHANNELS)
    }
    if not lora_shape or not lora_shape <= families - {_as_matrix(expected)}:
        return lora
    note = (
        f"{lora.path.name}: was made for an expert with other latents (text to video, image to "
        f"video); its change of {both_names(LATENT_LAYER)} is not used"
    )
    kept = {name: changes for name, changes in lora.changes.items() if name != LATENT_LAYER}
    return noted(replace(lora, changes=kept), notes=[note])


def _without_image_branch(lora: LoraFile) -> LoraFile:
    """Drop changes to an image branch, as in LoRAs for Wan2.1 I2V."""
    kept = {name: each for name, each in lora.changes.items() if not IMAGE_BRANCH.match(name)}
    if kept == lora.changes:
        return lora
    if not kept:
        raise CheckpointError(
            lora.path,
            "changes the image branch of Wan2.1 I2V alone, which this expert does not have",
        )
    note = (
        f"{lora.path.name}: its changes of {len(lora.changes) - len(kept)} parameters of an image "
        "branch (Wan2.1 I2V) are not used: this expert has none"
    )
    return noted(replace(lora, changes=kept), notes=[note])


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
