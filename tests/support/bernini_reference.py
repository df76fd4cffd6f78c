"""Bernini-R in float64: one forward pass of a Wan2.1 text-to-video model with context latents.

It was written from a description of the model, independently of the implementation under test, and
imports nothing from it. No original implementation was at hand, so agreement shows that two
readings of the description are the same.

The description: the tokens of every context latent, embedded by the same convolution, follow the
video's tokens. Each context starts at position (0, 0, 0). Each token from source s is turned
further, in all pairs j in a head with d elements, by s * 10000^(-2j / d). Every token attends to
all tokens, and is modulated for the step's timestep. The head computes the video's tokens alone.

The description leaves these points open. They are decided here as follows:

* The latent is in the model's normalised space. Contexts are raw and are always normalised, also
  where they are zero.
* The video has source id 0, and contexts have 1, 2, ... in list order.
* Pair j counts through the whole head: first the time axis pairs, then the pairs for height and
  width.
* A context belongs to each sample in the batch. The size is independent of the video's, but must
  divide into patches. The reference neither pads nor crops.
* Text is used as given: it is not padded, and no row is masked.
* The timestep's sinusoid is exact. fp32 implementations are up to 4e-5 away from it near
  timestep 1000, so `sinusoid` accepts theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]

HEAD_DIM = 128
THETA = 10000.0
EPS = 1e-6
SINUSOID = 256
PATCH = (1, 2, 2)

# fmt: off
MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on


def bernini_forward(
    tensors: Tensors,
    latent: torch.Tensor,
    timestep: torch.Tensor | float,
    text: torch.Tensor,
    contexts: Sequence[torch.Tensor] = (),
    *,
    source_ids: Sequence[int] | None = None,
    heads: int | None = None,
    sinusoid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the velocity for a latent, in float64 and normalised space, [B, 16, T, h, w].

    Args:
        tensors: Weights by their native names (`blocks.0.self_attn.q.weight`), in any
            floating-point type.
        latent: Noisy video in normalised space, [B, 16, T, h, w] with even h and w.
        timestep: 1000 * sigma: one value, or [B].
        text: Text embeddings, [B, L, width of `text_embedding.0`].
        contexts: Raw latents [1, 16, T_i, h_i, w_i] or [B, 16, T_i, h_i, w_i] with even h_i and
            w_i.
        source_ids: Source id of every context; 1, 2, ... by default.
        heads: Number of attention heads; by default, heads have 128 elements.
        sinusoid: Sinusoidal embedding of the timestep in place of the exact one, [B, 256].
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    batch, dim = len(latent), weights["head.modulation"].shape[-1]
    heads = heads or dim // HEAD_DIM
    source_ids = range(1, len(contexts) + 1) if source_ids is None else source_ids
    streams = [
        latent.double(),
        *(normalised(context).expand(batch, -1, -1, -1, -1) for context in contexts),
    ]
    tokens = torch.cat([_patches(weights, stream) for stream in streams], dim=1)
    angles = torch.cat(
        [
            position_angles(patch_grid(stream), dim // heads) + source * source_angles(dim // heads)
            for stream, source in zip(streams, (0, *source_ids), strict=True)
        ]
    )
    if sinusoid is None:
        sinusoid = timestep_sinusoid(torch.as_tensor(timestep).double().expand(batch))
    hidden = functional.silu(_linear(weights, "time_embedding.0", sinusoid.double()))
    time_rows = _linear(weights, "time_embedding.2", hidden)
    six_rows = _linear(weights, "time_projection.1", functional.silu(time_rows)).unflatten(
        1, (6, dim)
    )
    rows = _linear(weights, "text_embedding.0", text.double())
    rows = _linear(weights, "text_embedding.2", functional.gelu(rows, approximate="tanh"))
    for index in range(_blocks(weights)):
        tokens = _block(weights, f"blocks.{index}", tokens, rows, six_rows, angles, heads)
    video = tokens[:, : math.prod(patch_grid(latent))]
    shift, scale = (weights["head.modulation"] + time_rows.unsqueeze(1)).split(1, dim=1)
    return _unpatched(
        _linear(weights, "head.head", _layer_norm(video) * (1 + scale) + shift), patch_grid(latent)
    )


def normalised(raw: torch.Tensor) -> torch.Tensor:
    """Return a raw Wan2.1 VAE latent in float64, normalised per channel.

    The mean is 0 and the standard deviation 1.
    """
    mean, std = (
        torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1, 1) for each in (MEAN, STD)
    )
    return (raw.double() - mean) / std


def patch_grid(latent: torch.Tensor) -> tuple[int, int, int]:
    """Return a latent's number of patches along time, height and width."""
    sizes = latent.shape[2:]
    if any(size % step for size, step in zip(sizes, PATCH, strict=True)):
        raise ValueError(
            f"a latent of {tuple(sizes)} does not divide into patches of {PATCH}: give even sides"
        )
    time, height, width = (size // step for size, step in zip(sizes, PATCH, strict=True))
    return time, height, width


def position_angles(grid: tuple[int, int, int], head_dim: int) -> torch.Tensor:
    """Return the angle for every token and element pair, in radians, [tokens, head_dim / 2].

    Tokens are in the order time, height, width. The pairs for an axis follow each other, in the
    same order.
    """
    side = 2 * (head_dim // 6)
    sizes = (head_dim - 2 * side, side, side)
    positions = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64) for count in grid))
    return torch.cat(
        [positions[:, i, None] * _frequencies(size) for i, size in enumerate(sizes)], dim=1
    )


def source_angles(head_dim: int) -> torch.Tensor:
    """Return the angle added by source id 1 to each element pair, in radians, [head_dim / 2]."""
    return _frequencies(head_dim)


def timestep_sinusoid(timesteps: torch.Tensor) -> torch.Tensor:
    """Return cosines, then sines, for timesteps [B] in float64, [B, 256]."""
    angles = timesteps.double()[:, None] * _frequencies(SINUSOID)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _frequencies(size: int) -> torch.Tensor:
    """Return 10000^(-2k / size) for each pair k in `size` elements."""
    return THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def _rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring elements in [B, heads, tokens, head_dim] as complex numbers."""
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _blocks(weights: Tensors) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("blocks.")})


def _linear(weights: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].mT + weights[f"{name}.bias"]


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def _rms_norm(weights: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weights[f"{name}.weight"]


def _patches(weights: Tensors, latent: torch.Tensor) -> torch.Tensor:
    """Return a latent's tokens, [B, tokens, dim]: a matrix product for each patch."""
    (time, height, width), (_, rows, columns) = patch_grid(latent), PATCH
    cut = latent.unflatten(4, (width, columns)).unflatten(3, (height, rows))
    # [B, channels, time, height, rows, width, columns] to a row for each patch.
    cut = cut.permute(0, 2, 3, 5, 1, 4, 6).reshape(len(latent), time * height * width, -1)
    return cut @ weights["patch_embedding.weight"].flatten(1).mT + weights["patch_embedding.bias"]


def _unpatched(rows: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Return the latent for the head's rows. A row holds a patch, channels last."""
    _, patch_rows, columns = PATCH
    parts = rows.unflatten(2, (patch_rows, columns, -1)).unflatten(1, grid)
    # [B, time, height, width, rows, columns, channels] to [B, channels, time, height, rows, width,
    # columns].
    return parts.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def _block(
    weights: Tensors,
    name: str,
    x: torch.Tensor,
    text: torch.Tensor,
    six_rows: torch.Tensor,
    angles: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (
        weights[f"{name}.modulation"] + six_rows
    ).split(1, dim=1)
    given = _layer_norm(x) * (1 + scale) + shift
    x = x + gate * _attention(weights, f"{name}.self_attn", given, given, heads, angles)
    given = _layer_norm(x) * weights[f"{name}.norm3.weight"] + weights[f"{name}.norm3.bias"]
    x = x + _attention(weights, f"{name}.cross_attn", given, text, heads)
    given = _layer_norm(x) * (1 + ffn_scale) + ffn_shift
    hidden = functional.gelu(_linear(weights, f"{name}.ffn.0", given), approximate="tanh")
    return x + ffn_gate * _linear(weights, f"{name}.ffn.2", hidden)


def _attention(
    weights: Tensors,
    name: str,
    x: torch.Tensor,
    source: torch.Tensor,
    heads: int,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention from x to `source`.

    Queries and keys are normalised over all heads, then turned by angles.
    """
    query = _rms_norm(weights, f"{name}.norm_q", _linear(weights, f"{name}.q", x))
    key = _rms_norm(weights, f"{name}.norm_k", _linear(weights, f"{name}.k", source))
    value = _linear(weights, f"{name}.v", source)
    query, key, value = (
        each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (query, key, value)
    )
    if angles is not None:
        query, key = _rotated(query, angles), _rotated(key, angles)
    likeness = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return _linear(weights, f"{name}.o", (likeness @ value).transpose(1, 2).flatten(2))
