"""UMT5 text encoder, streamed: weights in all file formats, and prompt encoding.

| form                                              | sizes       | tokenizer                                      |
|---------------------------------------------------|-------------|------------------------------------------------|
| `text_encoder` folder in a diffusers pipeline     | config.json | folder next to it                              |
| ComfyUI's single file (`umt5_xxl_fp16` and such)  | from shapes | tensor `spiece_model`                          |
| file with the names in Wan's own release          | from shapes | from a file or a folder next to it             |
| GGUF by llama.cpp (`umt5-xxl-encoder-Q8_0.gguf`)  | from shapes | lists in the header                            |

Weights are in fp32, fp16, bf16, or in fp8 with or without scales. Block weights may also be int8, mxfp8, nvfp4 or
packed. Parameters get the names in transformers' UMT5EncoderModel. Only the tokenizer is loaded here.

In bf16 the real encoder has 9 GB of blocks and a 2.1 GB token table. A prompt needs at most 512 table rows, which are
read for each call. `attach_offload` streams the block matrices, once for all prompts in a call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...devices import AUTO, ComputeDtype, resolve_dtype
from ...offload import (
    FileSource,
    FileTensor,
    QuantFormat,
    attach_offload,
    copy_together,
    decode_tensor,
    read_scales,
    read_tensors,
    streamed_names,
)
from ...plan import BlockKey
from ...schema import OffloadPolicy
from ..checkpoint.components import (
    CONFIG,
    CONVERTED_DTYPES,
    STORED_DTYPES,
    ComponentFile,
    build_on_meta,
    component_file,
    component_folder,
    match_weights,
    read_config,
    require_config,
    require_sizes,
)
from ..checkpoint.files import CheckpointError, ModelVersion, is_gguf, model_version, read_checkpoint
from ..checkpoint.meta_model import called_before, set_parameters
from .sentence_model import gguf_sentence_model
from .tokenizer import (
    SENTENCE_MODEL,
    SentenceTokenizer,
    Tokenizer,
    clean_prompt,
    files_beside,
    open_sentence_tokenizer,
    open_tokenizer,
    sentence_processor,
    tokenizer_beside,
)

if TYPE_CHECKING:
    from transformers import UMT5EncoderModel


TEXT_WIDTH = 4096
REMEDY = "use umt5_xxl_fp16.safetensors or umt5_xxl_fp8_e4m3fn_scaled.safetensors"
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
_OTHER_BLOCK_NAME = re.compile(r"(?:blocks|enc\.blk)\.(\d{1,4})\.(.+)")

MARKS = (QUERIES, "blocks.0.attn.q.weight", "enc.blk.0.attn_q.weight")
"""Names of a tensor found in every encoder: in transformers, Wan's own release and llama.cpp."""
ROOTS = ("shared", "encoder", "token_embedding", "blocks", "norm", "token_embd", "enc", SENTENCE_MODEL)

_OTHER_BLOCK = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
    "attn_norm": "layer.0.layer_norm",
    **{f"attn_{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}
_OTHER = {
    **dict.fromkeys(("token_embedding", "token_embd"), "shared"),
    **dict.fromkeys(("norm", "enc.output_norm"), "encoder.final_layer_norm"),
}
"""Modules in Wan's own release, kept by other people's files, and in llama.cpp, with their names in transformers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Umt5:
    """Opened encoder."""

    model: UMT5EncoderModel
    """On `meta`."""
    weights: Mapping[str, FileTensor]
    """Location of each parameter."""
    scales: Mapping[str, FileTensor]
    """Scale locations of scaled fp8 parameters."""
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    """Sentences about unused tensors and the tokenizer's origin."""


def open_umt5_folder(folder: Path) -> Umt5:
    """Open a `text_encoder` folder with `tokenizer` next to it.

    Raises:
        CheckpointFileError: a file is missing, damaged, or for another model.
    """
    config = read_config(folder)
    require_config(folder, config, UMT5, "the text encoder of a Wan2.1 or Wan2.2 pipeline (UMT5-XXL)")
    require_sizes(folder, config, ["vocab_size", "d_kv", "d_ff", "num_heads", "num_layers"])
    model = build_on_meta(folder / CONFIG, lambda: _model(config))
    stored = component_file(read_checkpoint(folder, weights=WEIGHTS), marks=MARKS, roots=ROOTS)
    return _opened(folder, stored, stored.weights, model, CONFIG, open_tokenizer(folder.parent / "tokenizer"))


def open_umt5_file(path: Path) -> Umt5:
    """Open a single file, in any precision and with any names.

    Raises:
        CheckpointFileError: the file is missing, damaged, a pickle, or for another model, or there is no tokenizer in
            it or next to it.
    """
    # ComfyUI saves the tokenizer in a whole checkpoint as `text_encoders.spiece_model`, above the encoder names.
    stored = component_file(read_checkpoint(path), marks=MARKS, roots=ROOTS, shared=[SENTENCE_MODEL])
    tensors = {_name(key): tensor for key, tensor in stored.weights.items() if key != SENTENCE_MODEL}
    _refuse_other_models(path, tensors)
    config = _config_from_shapes(path, tensors)
    model = build_on_meta(path, lambda: _model(config))
    tokenizer, note = _tokenizer(path, stored, rows=config["vocab_size"])
    opened = _opened(path, stored, tensors, model, "the rest of the file", tokenizer)
    return opened if note is None else replace(opened, notes=(*opened.notes, note))


def _tokenizer(path: Path, stored: ComponentFile, *, rows: int) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer for a single file. One from another file comes with a sentence about it."""
    if SENTENCE_MODEL in stored.weights:
        return open_sentence_tokenizer(path, stored.weights, rows=rows), None
    data = gguf_sentence_model(path) if is_gguf(path) else None
    if data is not None:
        return SentenceTokenizer(sentence_processor(path, data, rows=rows)), None
    return tokenizer_beside(path, rows=rows)


def _opened(
    path: Path,
    stored: ComponentFile,
    tensors: Mapping[str, FileTensor],
    model: UMT5EncoderModel,
    described_by: str,
    tokenizer: Tokenizer,
) -> Umt5:
    streamed = _streamed(model.encoder.block)
    weights = match_weights(
        path,
        tensors,
        model,
        aliases=ALIASES,
        dtypes=(*STORED_DTYPES, *CONVERTED_DTYPES),
        described_by=described_by,
        packed=streamed | {name for name, each in tensors.items() if isinstance(each.packing, QuantFormat)},
    )
    scales = {
        ALIASES.get(name, name): scale for name, scale in ((_name(key), each) for key, each in stored.scales.items())
    }
    return Umt5(model=model, weights=weights, scales=scales, tokenizer=tokenizer, notes=stored.notes)


def _name(key: str) -> str:
    """Return the parameter name in transformers."""
    module, _, leaf = key.rpartition(".")
    if module in _OTHER:
        return f"{_OTHER[module]}.{leaf}"
    found = _OTHER_BLOCK_NAME.fullmatch(module)
    if found is None or found[2] not in _OTHER_BLOCK:
        return key
    return f"encoder.block.{found[1]}.{_OTHER_BLOCK[found[2]]}.{leaf}"


def _model(config: Mapping[str, Any]) -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**config))


def _refuse_other_models(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    if QUERIES not in tensors or POSITIONS not in tensors or GATE not in tensors:
        found = f"it has {len(tensors)} tensors, first: {next(iter(tensors), 'none')}"
        raise CheckpointError(path, f"is not a UMT5 text encoder: {REMEDY} ({found})")
    if SECOND_POSITIONS not in tensors and any(key.startswith("encoder.block.1.") for key in tensors):
        raise CheckpointError(
            path,
            f"is a T5 (of SD3, Flux and others), not UMT5: {REMEDY} ({SECOND_POSITIONS} is missing)",
        )


def _config_from_shapes(path: Path, weights: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the encoder sizes under the names in config.json.

    Raises:
        CheckpointError: they do not belong to a UMT5 encoder with width 4096.
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


MAX_TOKENS = 512

STACK = "umt5"
"""Block name in transfer programs."""


class PromptError(ValueError):
    """Prompts that cannot be encoded."""


def open_text_encoder(path: Path | str, *, compute_dtype: ComputeDtype = AUTO) -> TextEncoder:
    """Open the text encoder in a diffusers pipeline folder, a `text_encoder` folder, or a single file.

    `compute_dtype` is as in `open_experts`. A `text_encoder` folder needs `tokenizer` next to it. A single file is
    safetensors, with the names of transformers or of Wan's own release, or GGUF. Its tokenizer is in it or next to it.
    Reads only the tokenizer, the config and headers.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor GGUF. The config or the
            tensors do not belong to a UMT5 encoder with width 4096. The tokenizer is missing.
    """
    path, dtype = Path(path), resolve_dtype(compute_dtype)
    if path.is_file():
        return TextEncoder(open_umt5_file(path), compute_dtype=dtype)
    return TextEncoder(open_umt5_folder(component_folder(path, "text_encoder")), compute_dtype=dtype)


def encoder_version(path: Path) -> ModelVersion:
    """Return the files that `open_text_encoder` reads, with their versions, also for a tokenizer next to it.

    Raises:
        CheckpointError: the folder is not a text encoder.
    """
    if path.is_file():
        return model_version(path, *files_beside(path))
    folder = component_folder(path, "text_encoder")
    return model_version(folder, folder.parent / "tokenizer")


class TextEncoder(AbstractContextManager["TextEncoder"]):
    """An opened UMT5 encoder and its tokenizer."""

    def __init__(self, opened: Umt5, *, compute_dtype: torch.dtype) -> None:
        self._compute_dtype = compute_dtype
        self._model = opened.model
        self._weights = opened.weights
        self._scales = opened.scales
        self._tokenizer = opened.tokenizer
        self.notes = opened.notes
        """Sentences about unused tensors and the tokenizer's origin."""
        self._blocks: list[nn.Module] = list(self._model.encoder.block)
        for block in self._blocks:
            _split_batch(block)

    def encode(
        self,
        prompts: Sequence[str],
        *,
        device: torch.device | str,
        policy: OffloadPolicy | None = None,
        max_length: int = MAX_TOKENS,
        check: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Encode all prompts, reading the weights once.

        Args:
            prompts: texts, cut after `max_length` tokens.
            device: computes the blocks.
            policy: for the blocks. By default layerwise with one prefetched block.
            max_length: rows per embedding.
            check: called before every block. May raise to end the computation.

        Returns:
            One embedding for each prompt, fp32 [1, max_length, 4096] on the CPU. Rows after </s> are zero.

        Raises:
            PromptError: there are no prompts, or `max_length` is below 1.
            ValueError: the policy does not fit the number of blocks.
        """
        if not prompts or max_length < 1:
            raise PromptError(f"{len(prompts)} prompts of up to {max_length} tokens: give at least one of each")
        device = torch.device(device)
        tokens = self._tokenizer.tokens([clean_prompt(prompt) for prompt in prompts], length=max_length)
        self._read_small_tensors(device)
        embeds = self._token_rows(tokens.ids).to(device)
        policy = policy or OffloadPolicy.layerwise(1)
        # Attached for this call only: the experts need the buffer memory afterwards.
        with (
            attach_offload({STACK: self._blocks}, policy=policy, device=device, source=self._source()),
            called_before(self._blocks, check),
            torch.no_grad(),
        ):
            hidden = self._model.encoder(inputs_embeds=embeds, attention_mask=tokens.mask.to(device)).last_hidden_state
        return list(hidden.float().cpu().masked_fill_(tokens.mask[..., None] == 0, 0).split(1))

    def close(self) -> None:
        """Do nothing: only small tensors are kept between calls. Exists for `with`."""

    def _source(self) -> FileSource:
        blocks, scales = {}, {}
        for index, block in enumerate(self._blocks):
            path, names = f"encoder.block.{index}.", streamed_names(block)
            blocks[BlockKey(STACK, index)] = {name: self._weights[path + name] for name in names}
            scales[BlockKey(STACK, index)] = {
                name: self._scales[path + name] for name in names if path + name in self._scales
            }
        dtypes = {name: self._dtype(name) for name in next(iter(blocks.values()))}
        return FileSource(blocks, computed_dtypes=dtypes, scales=scales)

    def _read_small_tensors(self, device: torch.device) -> None:
        """Read the tensors that are not streamed: norms and position tables, half a megabyte in all."""
        large = _streamed(self._blocks) | {TOKEN_TABLE}
        small = {name: tensor for name, tensor in self._weights.items() if name not in large}
        # Parameters stay in the model after this call, so they must not be inference tensors: a later call outside
        # inference mode could not compute with them.
        with torch.inference_mode(False):
            stored = read_tensors(small)
            factors = self._factors(small)
            values = {
                name: _decode(tensor, stored[name], factors.get(name), self._dtype(name))
                for name, tensor in small.items()
            }
            set_parameters(self._model, copy_together(values, device))

    def _token_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the table's rows for `ids` [prompts, tokens], in the compute dtype: [prompts, tokens, 4096]."""
        # The table is never loaded as a whole (2.1 GB). Each distinct row is read from the file once.
        distinct, index = ids.unique(return_inverse=True)
        table = self._weights[TOKEN_TABLE]
        rows = read_tensors({str(row): table.rows(row, row + 1) for row in distinct.tolist()})
        factor = self._factors([TOKEN_TABLE]).get(TOKEN_TABLE)
        if factor is not None and factor.dim():
            factor = factor[distinct]
        read = replace(table, shape=(len(distinct), *table.shape[1:]))
        return _decode(read, torch.cat(list(rows.values())), factor, self._compute_dtype)[index]

    def _factors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the scales of scaled names: fp32, 0-d or [rows, 1]."""
        return read_scales({name: self._scales[name] for name in names if name in self._scales})

    def _dtype(self, name: str) -> torch.dtype:
        # As in transformers: `wo` outputs exceed the fp16 range, but not the bf16 range.
        needs_range = self._compute_dtype == torch.float16 and ".wo." in name
        return torch.float32 if needs_range else self._compute_dtype

    def __exit__(self, *_: object) -> None:
        self.close()


def _streamed(blocks: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names of the streamed parameters, within the model."""
    return frozenset(f"encoder.block.{i}.{name}" for i, block in enumerate(blocks) for name in streamed_names(block))


def _split_batch(block: nn.Module) -> None:
    """Make `block` compute the prompts in a batch one after the other while the weights are on the device.

    A prompt's result is then bit-equal in every batch. A batched matrix product does not guarantee this.
    """
    forward = block.forward

    @functools.wraps(forward)
    def forward_each(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = []
        for row in range(len(hidden)):
            own_args = [_row(value, row, hidden) for value in args]
            own_kwargs = {name: _row(value, row, hidden) for name, value in kwargs.items()}
            outputs.append(forward(hidden[row : row + 1], *own_args, **own_kwargs))
        return _concatenate(outputs)

    block.forward = forward_each


def _row(value: Any, row: int, hidden: torch.Tensor) -> Any:
    """Return one prompt's part of an argument. Only attention masks differ between prompts."""
    per_prompt = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(hidden)
    return value[row : row + 1] if per_prompt else value


def _concatenate(outputs: list[Any]) -> Any:
    """Concatenate hidden states. In transformers 4 they are the first of several values, the others unused by Wan."""
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs]), *outputs[0][1:])
    return torch.cat(outputs)


def _decode(place: FileTensor, stored: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Decode a tensor as the engine decodes streamed matrices."""
    decoded = torch.empty(place.shape, dtype=dtype)
    decode_tensor(stored, decoded, packing=place.packing, scale=factor)
    return decoded
