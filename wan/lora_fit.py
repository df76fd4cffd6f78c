"""Whether a LoRA was made for a model of the shape of an expert."""

from __future__ import annotations

import math

from .detect import Shape, WanConfig
from .key_map import both_names
from .lora import LoraFile
from .meta_model import parameter_shapes
from .stored import CheckpointError

# Widths of the models and of their feed-forward layers.
KNOWN_SIZES = {
    1536: "Wan2.1 1.3B",
    8960: "Wan2.1 1.3B",
    3072: "Wan2.2 5B",
    14336: "Wan2.2 5B",
    5120: "a 14B model",
    13824: "a 14B model",
}


def check_fit(lora: LoraFile, config: WanConfig) -> None:
    """Refuse a LoRA that cannot be added to an expert of that shape.

    Raises:
        CheckpointError: names the first layer that does not fit, with both shapes.
    """
    shapes = parameter_shapes(config)
    for parameter in (*lora.low_rank, *lora.differences):
        if parameter not in shapes:
            raise CheckpointError(
                lora.path, f"changes {both_names(parameter)}; the expert has {config.num_layers} blocks, from 0 on"
            )
    for parameter, low in lora.low_rank.items():
        rows, columns = _as_matrix(shapes[parameter])
        up, down = lora.tensors[low.up].shape, lora.tensors[low.down].shape
        made_for = (up[0], math.prod(down[1:]))
        if made_for != (rows, columns):
            raise CheckpointError(
                lora.path,
                f"{low.up} and {low.down} change a weight of {list(made_for)}; {both_names(parameter)} of the expert "
                f"is [{rows}, {columns}]{_model_of(made_for)}",
            )
    for parameter, difference in lora.differences.items():
        shape = lora.tensors[difference.key].shape
        if shape != shapes[parameter]:
            raise CheckpointError(
                lora.path,
                f"{difference.key} is {list(shape)}; {both_names(parameter)} of the expert is "
                f"{list(shapes[parameter])}{_model_of(shape)}",
            )


def _as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _model_of(shape: Shape) -> str:
    models = [KNOWN_SIZES[size] for size in shape if size in KNOWN_SIZES]
    return f": this LoRA is for {models[0]}" if models else ""
