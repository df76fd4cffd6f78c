"""Wan transformers on the meta device, built in a tenth of a second and filled tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...offload.formats import FileTensor, decode_tensor, streamed_names
from ...shapes import HEAD_DIM
from .detect import Shape, WanConfig

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

FIRST_BLOCK = "blocks.0."
EMBEDDER = "condition_embedder."

EmbedderPart = Literal["time", "text"]

PARTS: tuple[EmbedderPart, ...] = ("time", "text")


class NoInitialValues(TorchFunctionMode):
    """Function mode that skips `torch.nn.init`, for modules built on meta.

    Initial values have no effect on meta, but computing them takes three quarters of the build
    time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def model_on_meta(config: WanConfig) -> WanTransformer3DModel:
    """Return diffusers' model with all parameters on meta."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"), NoInitialValues():
        model = WanTransformer3DModel(**config.model_arguments())
        if config.reference_channels is not None:
            patch = config.patch_size[1:]
            model.ref_conv = nn.Conv2d(
                config.reference_channels, config.width, kernel_size=patch, stride=patch
            )
        return model


@functools.cache
def position_tables(patch_size: tuple[int, int, int], positions: int) -> WanRotaryPosEmbed:
    """Return the RoPE tables for every position, cached because both experts have the same ones."""
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    return WanRotaryPosEmbed(HEAD_DIM, patch_size, positions)


@functools.cache
def parameter_shapes(config: WanConfig) -> Mapping[str, Shape]:
    """Return the name and shape of every parameter in a `config` model."""
    # Build one block and repeat its shapes, because all blocks are equal.
    one_block = model_on_meta(replace(config, num_layers=1))
    shapes = {name: tuple(parameter.shape) for name, parameter in one_block.named_parameters()}
    block = {
        name.removeprefix(FIRST_BLOCK): shapes.pop(name)
        for name in list(shapes)
        if name.startswith(FIRST_BLOCK)
    }
    for index in range(config.num_layers):
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    # Read-only, because the cache returns it to every caller.
    return MappingProxyType(shapes)


@functools.cache
def block_streams(config: WanConfig) -> tuple[str, ...]:
    """Return the names of streamed parameters within a block."""
    return streamed_names(model_on_meta(replace(config, num_layers=1)).blocks[0])


@functools.cache
def streamed_parameters(config: WanConfig) -> frozenset[str]:
    """Return the full names of all streamed parameters."""
    return frozenset(
        f"blocks.{index}.{name}"
        for index in range(config.num_layers)
        for name in block_streams(config)
    )


@functools.cache
def table_bytes(config: WanConfig) -> int:
    """Return the size of one model's position tables, in bytes."""
    positions = model_on_meta(replace(config, num_layers=1)).config.rope_max_seq_len
    return sum(table.nbytes for table in position_tables(config.patch_size, positions).buffers())


def embedder_part(parameter: str) -> EmbedderPart | None:
    """Return the embedder part of a model parameter.

    None for other parameters, including the image branch.
    """
    if not parameter.startswith(EMBEDDER) or parameter.startswith(f"{EMBEDDER}image_embedder."):
        return None
    if parameter.startswith(f"{EMBEDDER}text_embedder."):
        return "text"
    return "time"


def parameter_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """Return a parameter's dtype: fp32 if diffusers always keeps it so, else `compute_dtype`."""
    from diffusers import WanTransformer3DModel

    # diffusers looks for these names among all parts of a parameter's name.
    in_fp32 = set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules)
    return torch.float32 if in_fp32 else compute_dtype


def set_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters by these tensors, by full name."""
    # Register a new parameter because assigning to `.data` of a meta parameter raises an error.
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(
            leaf, nn.Parameter(tensor, requires_grad=False)
        )


def decoded(
    tensor: FileTensor, stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor's values in `dtype`, on the device of `stored`.

    Returns `stored` itself if it needs no decoding.
    """
    if tensor.packing is None and scale is None:
        return stored.to(dtype)
    values = torch.empty(tensor.shape, dtype=dtype, device=stored.device)
    decode_tensor(stored, values, packing=tensor.packing, scale=scale)
    return values


@contextmanager
def called_before(modules: Iterable[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each forward pass of these modules inside the `with`.

    An exception from it ends the computation.
    """
    hooks = [module.register_forward_pre_hook(lambda *_: check()) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
