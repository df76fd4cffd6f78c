"""Model, weights and tokenizer of a UMT5 text encoder, from one of two forms.

| form                                              | sizes       | weights                  | tokenizer             |
|---------------------------------------------------|-------------|--------------------------|-----------------------|
| `text_encoder` folder of a diffusers pipeline     | config.json | fp32, fp16, bf16         | folder next to it     |
| single file of ComfyUI (`umt5_xxl_fp16` and such) | from shapes | these, fp8 with or       | tensor `spiece_model` |
|                                                   |             | without scales           |                       |

In both, parameters have the names of transformers' UMT5EncoderModel. Only the tokenizer is loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload import FileTensor, read_tensors
from ..checkpoint.components import (
    CONFIG,
    STORED_DTYPES,
    build_on_meta,
    component_weights,
    match_weights,
    read_config,
    require_config,
    require_sizes,
)
from ..checkpoint.files import CheckpointError, read_stored
from ..checkpoint.fp8_layouts import FP8_DTYPES, resolve_scales
from .tokenizer import SENTENCE_MODEL, Tokenizer, open_sentence_tokenizer, open_tokenizer

if TYPE_CHECKING:
    from transformers import UMT5EncoderModel

TEXT_WIDTH = 4096
WEIGHTS = "model.safetensors"

UMT5 = {"model_type": "umt5", "d_model": TEXT_WIDTH, "feed_forward_proj": "gated-gelu"}

TOKEN_TABLE = "shared.weight"
ALIASES = {"encoder.embed_tokens.weight": TOKEN_TABLE}

FIRST_BLOCK = "encoder.block.0.layer."
QUERIES = FIRST_BLOCK + "0.SelfAttention.q.weight"
POSITIONS = FIRST_BLOCK + "0.SelfAttention.relative_attention_bias.weight"
SECOND_POSITIONS = POSITIONS.replace(".block.0.", ".block.1.")
GATE = FIRST_BLOCK + "1.DenseReluDense.wi_0.weight"
BLOCK = re.compile(r"encoder\.block\.(\d{1,4})\.")

# Name in Wan's own release, and in files converted from it, which have no tokenizer.
ORIGINAL_MARK = "token_embedding.weight"

# Added by ComfyUI's CLIPSave; Wan's text encoder does not use it.
UNUSED = "logit_scale"


@dataclass(frozen=True, kw_only=True, eq=False)
class Umt5:
    """Opened encoder."""

    model: UMT5EncoderModel
    """On `meta`."""
    weights: Mapping[str, FileTensor]
    """Location of each parameter."""
    scales: Mapping[str, FileTensor]
    """Location of the scales of scaled fp8 parameters."""
    tokenizer: Tokenizer


def open_umt5_folder(folder: Path) -> Umt5:
    """Open a `text_encoder` folder with `tokenizer` next to it.

    Raises:
        CheckpointFileError: a file is missing, damaged, or of another model.
    """
    config = read_config(folder)
    require_config(folder, config, UMT5, "the text encoder of a Wan2.1 or Wan2.2 pipeline (UMT5-XXL)")
    require_sizes(folder, config, ["vocab_size", "d_kv", "d_ff", "num_heads", "num_layers"])
    model = build_on_meta(folder / CONFIG, lambda: _model(config))
    weights = component_weights(folder, model, weights=WEIGHTS, aliases=ALIASES)
    return Umt5(model=model, weights=weights, scales={}, tokenizer=open_tokenizer(folder.parent / "tokenizer"))


def open_umt5_file(path: Path) -> Umt5:
    """Open ComfyUI's single file, in any of its precisions.

    Raises:
        CheckpointFileError: the file is missing, damaged, a pickle, of another model, or has no tokenizer.
    """
    stored = read_stored(path)
    _refuse_other_models(path, stored.tensors)
    tensors = {key: tensor for key, tensor in stored.tensors.items() if key not in (SENTENCE_MODEL, UNUSED)}
    resolved = resolve_scales(path, tensors, stored.metadata, read_tensors)
    config = _config_from_shapes(path, resolved.weights)
    model = build_on_meta(path, lambda: _model(config))
    weights = match_weights(
        path,
        resolved.weights,
        model,
        aliases=ALIASES,
        dtypes=(*STORED_DTYPES, *FP8_DTYPES),
        described_by="the rest of the file",
    )
    scales = {ALIASES.get(name, name): scale for name, scale in resolved.scales.items()}
    tokenizer = open_sentence_tokenizer(path, stored.tensors, rows=weights[TOKEN_TABLE].shape[0])
    return Umt5(model=model, weights=weights, scales=scales, tokenizer=tokenizer)


def _model(config: Mapping[str, Any]) -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**config))


def _refuse_other_models(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    if ORIGINAL_MARK in tensors:
        raise CheckpointError(
            path,
            f"has the names of Wan's own release ({ORIGINAL_MARK}), which has no tokenizer: use "
            "umt5_xxl_fp16.safetensors or umt5_xxl_fp8_e4m3fn_scaled.safetensors, which are made for ComfyUI",
        )
    if QUERIES not in tensors or POSITIONS not in tensors or GATE not in tensors:
        first = next(iter(tensors), "none")
        raise CheckpointError(path, f"is not a UMT5 text encoder: it has {len(tensors)} tensors (first: {first})")
    if SECOND_POSITIONS not in tensors and any(key.startswith("encoder.block.1.") for key in tensors):
        raise CheckpointError(
            path,
            f"is a T5 (of SD3, Flux and others), not UMT5: {SECOND_POSITIONS} is missing; use "
            "umt5_xxl_fp16.safetensors",
        )


def _config_from_shapes(path: Path, weights: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the sizes of the encoder under the names of config.json.

    Raises:
        CheckpointError: they are not those of a UMT5 encoder of width 4096.
    """
    table = next((weights[name] for name in (TOKEN_TABLE, *ALIASES) if name in weights), None)
    if table is None:
        raise CheckpointError(path, f"{TOKEN_TABLE} is missing")
    queries, positions, gate = (weights[name].shape for name in (QUERIES, POSITIONS, GATE))
    for name, shape in ((TOKEN_TABLE, table.shape), (QUERIES, queries), (GATE, gate)):
        if len(shape) != 2 or shape[1] != TEXT_WIDTH or not shape[0]:
            raise CheckpointError(path, f"{name} is {list(shape)}; [rows, {TEXT_WIDTH}] is expected (UMT5-XXL)")
    if len(positions) != 2 or not positions[1] or queries[0] % positions[1]:
        raise CheckpointError(
            path,
            f"{POSITIONS} is {list(positions)}; [buckets, heads] is expected, with heads a divisor of {queries[0]}",
        )
    blocks = {int(found[1]) for name in weights if (found := BLOCK.match(name))}
    if gap := [index for index in range(len(blocks)) if index not in blocks]:
        raise CheckpointError(path, f"encoder.block.{gap[0]} is missing, but later blocks are present")
    return {
        **UMT5,
        "vocab_size": table.shape[0],
        "d_kv": queries[0] // positions[1],
        "d_ff": gate[0],
        "num_heads": positions[1],
        "num_layers": len(blocks),
    }
