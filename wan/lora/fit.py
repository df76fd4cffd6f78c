"""Whether a LoRA was made for a model of the shape of an expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..checkpoint.detect import IMAGE_BRANCH, IMAGE_CONDITION_CHANNELS, LATENT_CHANNELS, Shape, WanConfig
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.meta_model import parameter_shapes
from .apply import LoraStack
from .file import LoraFile, LowRank, logger

# Widths of the models and of their feed-forward layers.
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


def fitted(lora: LoraFile, config: WanConfig) -> LoraFile:
    """Return `lora` as it can be added to an expert of that shape.

    That is all of it, but for two things, which are logged: the layer that takes the latents stays as it is where a
    LoRA of text to video meets an expert of image to video, or the reverse; and what changes the image branch of Wan2.1
    I2V is left out where an expert has none.

    Raises:
        CheckpointError: names the first layer that does not fit, with both shapes.
    """
    shapes = parameter_shapes(config)
    if config.image_dim is None:
        lora = _without_image_branch(lora)
    for parameter in (*lora.low_rank, *lora.differences):
        if parameter not in shapes:
            raise CheckpointError(
                lora.path, f"changes {both_names(parameter)}; the expert has {config.num_layers} blocks, from 0 on"
            )
    lora = _without_other_latents(lora, shapes[LATENT_LAYER])
    for parameter, low in lora.low_rank.items():
        made_for, expected = _product_shape(lora, low), _as_matrix(shapes[parameter])
        if made_for != expected:
            raise CheckpointError(
                lora.path,
                f"{low.up} and {low.down} change a weight of {list(made_for)}; {both_names(parameter)} of the expert "
                f"is {list(expected)}{_model_of(made_for)}",
            )
    for parameter, difference in lora.differences.items():
        shape = lora.tensors[difference.key].shape
        if shape != shapes[parameter]:
            raise CheckpointError(
                lora.path,
                f"{difference.key} is {list(shape)}; {both_names(parameter)} of the expert is "
                f"{list(shapes[parameter])}{_model_of(shape)}",
            )
    return lora


def fitted_stack(stack: LoraStack, config: WanConfig) -> LoraStack:
    """Each of them `fitted`. Raises ValueError for a strength that is no finite number."""
    for lora, strength in stack:
        if not math.isfinite(strength):
            raise ValueError(f"the strength of {lora.path} is {strength}: give a finite number")
    return [(fitted(lora, config), strength) for lora, strength in stack]


def _without_other_latents(lora: LoraFile, expected: Shape) -> LoraFile:
    """Leave the layer that takes the latents alone if the LoRA's takes those of the other family."""
    low, difference = lora.low_rank.get(LATENT_LAYER), lora.differences.get(LATENT_LAYER)
    made_for = {_product_shape(lora, low)} if low else set()
    made_for |= {_as_matrix(lora.tensors[difference.key].shape)} if difference else set()
    patch = math.prod(expected[2:])
    families = {(expected[0], channels * patch) for channels in (LATENT_CHANNELS, CONDITIONED_CHANNELS)}
    if not made_for or not made_for <= families - {_as_matrix(expected)}:
        return lora
    logger.warning(
        "%s: was made for an expert with other latents (text to video, image to video); its change of %s is not used",
        lora.path.name,
        both_names(LATENT_LAYER),
    )
    return _only(lora, lambda name: name != LATENT_LAYER)


def _without_image_branch(lora: LoraFile) -> LoraFile:
    """Leave out what changes an image branch, as LoRAs of Wan2.1 I2V do."""
    changed = {*lora.low_rank, *lora.differences}
    dropped = {name for name in changed if IMAGE_BRANCH.match(name)}
    if not dropped:
        return lora
    if dropped == changed:
        raise CheckpointError(
            lora.path, "changes the image branch of Wan2.1 I2V alone, which this expert does not have"
        )
    logger.warning(
        "%s: its changes of %d parameters of an image branch (Wan2.1 I2V) are not used: this expert has none",
        lora.path.name,
        len(dropped),
    )
    return _only(lora, lambda name: name not in dropped)


def _only(lora: LoraFile, kept: Callable[[str], bool]) -> LoraFile:
    """`lora` as far as it changes the parameters that are kept."""
    return replace(
        lora,
        low_rank={name: product for name, product in lora.low_rank.items() if kept(name)},
        differences={name: change for name, change in lora.differences.items() if kept(name)},
    )


def _product_shape(lora: LoraFile, low: LowRank) -> tuple[int, int]:
    return lora.tensors[low.up].shape[0], _as_matrix(lora.tensors[low.down].shape)[1]


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _model_of(shape: Shape) -> str:
    models = [KNOWN_SIZES[size] for size in shape if size in KNOWN_SIZES]
    return f": this LoRA is for {models[0]}" if models else ""
