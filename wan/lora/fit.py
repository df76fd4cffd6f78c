"""Compatibility of a LoRA with the shape of an expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ...schema import StepStrengths
from ..checkpoint.detect import IMAGE_BRANCH, IMAGE_CONDITION_CHANNELS, LATENT_CHANNELS, Shape, WanConfig
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.meta_model import parameter_shapes
from .file import LoraFile, noted

# Models by their width and by the width of their feed-forward layers.
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

    Two kinds of changes are dropped, with a note: that of the patch embedding if a text-to-video LoRA is used with an
    image-to-video expert, or the reverse; and those of the image branch of Wan2.1 I2V if the expert has none.

    Raises:
        CheckpointError: names the first layer that does not fit, with both shapes.
    """
    shapes = parameter_shapes(config)
    # First, because an expert without an image branch would refuse these parameters below.
    if config.image_dim is None:
        lora = _without_image_branch(lora)
    for parameter in lora.changes:
        if parameter not in shapes:
            raise CheckpointError(
                lora.path, f"changes {both_names(parameter)}; the expert has {config.num_layers} blocks, from 0 on"
            )
    lora = _without_other_latents(lora, shapes[LATENT_LAYER])
    for parameter, change in ((name, change) for name, changes in lora.changes.items() for change in changes):
        shape = lora.tensors[change.first[0]].shape
        expected = shapes[parameter]
        named = f"{change.first[0]} is {list(shape)};"
        if not change.is_difference:
            shape = change.shape(lora.tensors)
            expected = _as_matrix(expected)
            named = f"{' and '.join(change.first + change.second)} change a weight of {list(shape)};"
        if shape != expected:
            raise CheckpointError(
                lora.path, f"{named} {both_names(parameter)} of the expert is {list(expected)}{_model_of(shape)}"
            )
    if not lora.changes:
        raise CheckpointError(lora.path, "changes nothing but layers that this expert does not have")
    return lora


class MultipliedWeightError(CheckpointError):
    """LoRA that cannot be computed beside a weight that is multiplied as it is stored."""


def fit_loras(
    loras: Sequence[tuple[LoraFile, float | StepStrengths]], config: WanConfig
) -> list[tuple[LoraFile, StepStrengths]]:
    """Return the LoRAs, each fitted to the expert, with their strength in each step.

    Raises:
        CheckpointError: as `fit_lora`.
        ValueError: a strength is not a finite number.
    """
    fitted = []
    for lora, given in loras:
        strengths = given if isinstance(given, StepStrengths) else StepStrengths(usual=given)
        for strength in strengths.values:
            if not math.isfinite(strength):
                raise ValueError(f"the strength of {lora.path} is {strength}: give a finite number")
        fitted.append((fit_lora(lora, config), strengths))
    return fitted


def refuse_beside(lora: LoraFile, multiplied: Set[str]) -> None:
    """Refuse changes to weights multiplied as stored, unless a layer can compute them beside the weights.

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
                    f"is {change.algorithm}, and {name} is multiplied as it is stored, which takes plain LoRAs only: "
                    'choose arithmetic "decoded" in the loader, or leave this LoRA out',
                )


def _without_other_latents(lora: LoraFile, expected: Shape) -> LoraFile:
    """Drop the change of the patch embedding if it was made for the latents of the other family."""
    lora_shape = {change.shape(lora.tensors) for change in lora.changes.get(LATENT_LAYER, ())}
    patch = math.prod(expected[2:])
    families = {(expected[0], channels * patch) for channels in (LATENT_CHANNELS, CONDITIONED_CHANNELS)}
    if not lora_shape or not lora_shape <= families - {_as_matrix(expected)}:
        return lora
    note = (
        f"{lora.path.name}: was made for an expert with other latents (text to video, image to video); its change of "
        f"{both_names(LATENT_LAYER)} is not used"
    )
    return noted(_filtered(lora, lambda name: name != LATENT_LAYER), notes=[note])


def _without_image_branch(lora: LoraFile) -> LoraFile:
    """Drop changes of an image branch, which LoRAs of Wan2.1 I2V have."""
    dropped = {name for name in lora.changes if IMAGE_BRANCH.match(name)}
    if not dropped:
        return lora
    if dropped == lora.changes.keys():
        raise CheckpointError(
            lora.path, "changes the image branch of Wan2.1 I2V alone, which this expert does not have"
        )
    note = (
        f"{lora.path.name}: its changes of {len(dropped)} parameters of an image branch (Wan2.1 I2V) are not used: "
        "this expert has none"
    )
    return noted(_filtered(lora, lambda name: name not in dropped), notes=[note])


def _filtered(lora: LoraFile, keep: Callable[[str], bool]) -> LoraFile:
    """Return `lora` with only the changes of parameters for which `keep` is true."""
    return replace(lora, changes={name: changes for name, changes in lora.changes.items() if keep(name)})


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _model_of(shape: Shape) -> str:
    models = [KNOWN_SIZES[size] for size in shape if size in KNOWN_SIZES]
    return f": this LoRA is for {models[0]}" if models else ""
