"""Shapes of videos and experts: tokens, FLOPs, weight bytes and activation memory of Wan models, from widths alone.

The formulas follow the tensors of diffusers' `WanTransformer3DModel`. D is the width of the model, F that of its
feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

PIXELS_PER_LATENT = 8
"""Pixels per latent pixel along each side, for the VAE of Wan2.1 and Wan2.2 A14B."""
WAN22_PIXELS_PER_LATENT = 16
"""Pixels per latent pixel along each side, for the VAE of Wan2.2 5B."""
FRAMES_PER_LATENT = 4
PATCH = (1, 2, 2)
"""Latent frames, rows and columns of one token."""
TEXT_TOKENS = 512
IMAGE_TOKENS = 257
"""Tokens of an image from CLIP ViT-H/14: 16 x 16 patches and one class token."""
HEAD_DIM = 128

BF16_BYTES = 2
FP32_BYTES = 4

SHORT_CHUNK = 15
"""Largest remainder in tokens that is added to the last full chunk instead of forming its own."""
OUTPUT_TOKENS = 1024
"""Tokens per chunk of the norm after the last block."""

INT8_VALUES = 2**26
"""Largest number of inputs, and of results, that torch multiplies at once in int8: 268 MB in fp32."""
FEWEST_INT8_TOKENS = 32
"""Tokens that are multiplied at once at least: CUDA multiplies int8 matrices of more than 16 rows only."""


def piece_tokens(rows: int, columns: int) -> int:
    """Return the most tokens that torch multiplies at once by an int8 matrix [rows, columns]."""
    return max(FEWEST_INT8_TOKENS, INT8_VALUES // max(rows, columns))


def patch_grid(latent: Sequence[int], patch: Sequence[int] = PATCH) -> tuple[int, int, int]:
    """Return the patches along time, height and width for this latent size. Patches at an edge may be padded."""
    frames, height, width = (-(-size // of_patch) for size, of_patch in zip(latent, patch, strict=True))
    return frames, height, width


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """Size of a video that the experts and their VAE can generate.

    Raises ValueError unless width and height are multiples of 16 (Wan2.2 5B: 32) and frames are 4n + 1.
    """

    width: int
    height: int
    frames: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels per latent pixel along each side: 8, or 16 for Wan2.2 5B."""

    def __post_init__(self) -> None:
        per_token = self.per_latent * PATCH[1]
        for side, pixels in (("width", self.width), ("height", self.height)):
            if pixels < per_token or pixels % per_token:
                raise ValueError(
                    f"{side} is {pixels}, it must be a multiple of {per_token}: "
                    f"use {_nearest(pixels, per_token, first=per_token)}"
                )
        if self.frames < 1 or self.frames % FRAMES_PER_LATENT != 1:
            raise ValueError(
                f"frames is {self.frames}, it must be a multiple of {FRAMES_PER_LATENT} plus 1: "
                f"use {_nearest(self.frames, FRAMES_PER_LATENT, first=1)}"
            )

    @property
    def latent(self) -> tuple[int, int, int]:
        """Shape (frames, height, width) of the latent."""
        return (
            (self.frames - 1) // FRAMES_PER_LATENT + 1,
            self.height // self.per_latent,
            self.width // self.per_latent,
        )

    @property
    def tokens(self) -> int:
        """Sequence length of one lane in the blocks."""
        return prod(patch_grid(self.latent))


def _nearest(value: int, step: int, *, first: int) -> int:
    """Return the member of first, first + step, first + 2 step, ... that is nearest to `value`."""
    return first + max(0, (value - first + step // 2) // step) * step


@dataclass(frozen=True, kw_only=True)
class KernelNeeds:
    """Memory that the kernels of the blocks allocate in addition to their results."""

    attention_bytes: int = 0
    """Bytes that the kernel of self-attention allocates per value of its result, which it returns in a layout that has
    to be copied; 0: it allocates the result alone."""
    linear_format: str = ""
    """Format in which linear layers are multiplied: "int8", "fp8", or "" for the compute dtype. The scratch memory of
    both is taken as that of torch's int8: fp8 needs no more, and that of comfy-kitchen is not documented."""


PLAIN_KERNELS = KernelNeeds()


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Widths of one expert. Bytes are those of bf16 weights unless stated otherwise."""

    width: int = 5120
    ffn_width: int = 13824
    blocks: int = 40
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    time_frequencies: int = 256
    image_width: int | None = None
    """Input width of the image branch (Wan2.1 I2V: 1280); None: no image branch."""

    @property
    def streamed_parameters(self) -> int:
        """Parameters of the 10 matrices of a block: q, k, v and out of two attentions, and the feed-forward pair.

        An image branch adds two: the key and value projections of the image.
        """
        square_matrices = 8 if self.image_width is None else 10
        return square_matrices * self.width**2 + 2 * self.width * self.ffn_width

    @property
    def small_parameters(self) -> int:
        """Parameters of the 17 other tensors: modulation 6D, 8 attention biases, 4 q/k norms, norm2, 2 ffn biases.

        An image branch adds three: two biases and a norm.
        """
        image = 0 if self.image_width is None else 3
        return (6 + 8 + 4 + 2 + image) * self.width + (self.ffn_width + self.width)

    @property
    def non_block_parameters(self) -> int:
        """Parameters outside the blocks."""
        patch = self.width * (self.in_channels * prod(PATCH) + 1)
        output = self.out_channels * prod(PATCH) * (self.width + 1)
        embedders = self._time_embedder + self._time_projection + self._text_embedder + self._image_embedder
        return patch + embedders + self._output_modulation + output

    def resident_bytes(self) -> int:
        """Return the bytes that are resident in addition to the buffers, without the tables of positions.

        These are all tensors that do not stream, except the time and text embedders, which are loaded only while the
        embeddings of a run are computed. The modules that diffusers keeps in fp32 count as such: modulation and norm2
        of each block, the output modulation, and the norms of an image branch.
        """
        outer = self.non_block_parameters - self._time_embedder - self._time_projection - self._text_embedder
        parameters = outer + self.blocks * self.small_parameters
        in_fp32 = self._output_modulation + self._image_norms + self.blocks * (6 + 2) * self.width
        return parameters * BF16_BYTES + in_fp32 * (FP32_BYTES - BF16_BYTES)

    def streamed_bytes(self, *, bytes_per_weight: int = BF16_BYTES) -> int:
        """Return the bytes that one fetch of a block moves (fp8: 1 byte per weight)."""
        return self.streamed_parameters * bytes_per_weight

    def int8_bytes(self) -> int:
        """Return the bytes of a block whose matrices are int8 with an fp32 scale for each row."""
        rows = (8 if self.image_width is None else 10) * self.width + self.ffn_width + self.width
        return self.streamed_parameters + rows * FP32_BYTES

    def block_flops(self, tokens: int) -> int:
        """Return the floating point operations of one block for one lane; a multiply-add counts as two."""
        return self.linear_flops(tokens) + self.attention_flops(tokens)

    def linear_flops(self, tokens: int) -> int:
        """Return the operations of the linear layers of one block for one lane: projections and feed-forward."""
        width = self.width
        return 2 * tokens * (6 * width**2 + 2 * width * self.ffn_width) + 2 * self._attended * 2 * width**2

    def attention_flops(self, tokens: int) -> int:
        """Return the operations of self-attention and of cross-attention of one block for one lane.

        Cross-attention is over 512 text tokens and, with an image branch, 257 image tokens.
        """
        return 4 * tokens**2 * self.width + 4 * tokens * self._attended * self.width

    def working_bytes(  # noqa: PLR0913 (the values of a step)
        self,
        tokens: int,
        *,
        lanes: int,
        value_bytes: int = BF16_BYTES,
        chunk_tokens: int | None = None,
        ring: int = 1,
        ulysses: int = 1,
        cached_states: int = 0,
        kernels: KernelNeeds = PLAIN_KERNELS,
        shorter: Sequence[int] = (),
    ) -> int:
        """Return the peak device memory of a step's activations, in addition to the weights.

        It is the sum of the hidden states of all lanes (D values of `value_bytes` per token each), the rotary tables
        (128 fp32 values per token, shared by lanes of equal length), the embedded texts of both experts, and the
        activations of one block for one lane. It is at least the size of the time embedder, which is loaded before the
        blocks begin. The latents (a 100th of a hidden state) are not counted.

        Args:
            tokens: sequence length of the longest lane, of all workers together.
            lanes: lanes of the step.
            value_bytes: bytes of one activation value.
            chunk_tokens: tokens that go through feed-forward and norms at once; None: all of them.
            ring: workers along the ring axis; `ring * ulysses` workers share the tokens of every lane. Each keeps its
                part, but all tokens of one lane enter the first block, and the rotary tables are not divided.
            ulysses: workers along the Ulysses axis.
            cached_states: tensors of the size of a hidden state that a cache keeps for each lane.
            kernels: what the kernels of the blocks allocate.
            shorter: sequence lengths of those of the lanes that have fewer than `tokens`.
        """
        width, value = self.width, value_bytes
        local_tokens = -(-tokens // (ring * ulysses))
        chunk = local_tokens if chunk_tokens is None else min(local_tokens, chunk_tokens + SHORT_CHUNK)
        if chunk == local_tokens:
            in_block = local_tokens * self._block_bytes_per_token(value)
        else:
            in_block = self._chunked_block_bytes(local_tokens, chunk, value)
            if kernels.attention_bytes:
                # q, k, v, their input and the result, next to what the kernel allocates or the copy of the result.
                in_block = max(in_block, local_tokens * width * (5 * value + max(kernels.attention_bytes, value)))
        if kernels.linear_format:
            in_block = max(in_block, self._int8_block_bytes(local_tokens, chunk, value))
        if local_tokens < tokens:
            in_block = max(in_block, local_tokens * self._shared_bytes_per_token(value, ring, ulysses))
        rotary = (tokens + sum(set(shorter))) * HEAD_DIM * FP32_BYTES
        # Hidden states of the lanes that are not in the block, and embedded texts, in rows of D values.
        waiting = (lanes - 1) * local_tokens + tokens - local_tokens + (2 * lanes + 2) * TEXT_TOKENS
        waiting += cached_states * lanes * local_tokens
        waiting -= (1 + cached_states) * sum(local_tokens - -(-length // (ring * ulysses)) for length in shorter)
        if self.image_width is not None:
            # Every lane has one tensor of image and text rows, and a block their keys and values.
            waiting += (lanes + 2) * (TEXT_TOKENS + IMAGE_TOKENS)
        embedding = self._time_embedder * FP32_BYTES + self._time_projection * value
        return max(in_block + rotary + waiting * width * value, embedding)

    def lanes_bytes(self, lane_tokens: Sequence[int], **settings: Any) -> int:
        """Return `working_bytes` of lanes with these sequence lengths, which may differ."""
        longest = max(lane_tokens)
        shorter = [tokens for tokens in lane_tokens if tokens < longest]
        return self.working_bytes(longest, lanes=len(lane_tokens), shorter=shorter, **settings)

    def _shared_bytes_per_token(self, value: int, ring: int, ulysses: int) -> int:
        """Return the peak bytes per local token while workers share an attention.

        Counted in tensors of D values per token:

        * the block: q, k, v and its input;
        * Ulysses: eight more for q, k and v in send order, as received, and reordered; not all exist at once;
        * ring: k and v to send, those of all its workers, q, k, v and the result in the kernel's layout, and in fp32
          the accumulated result, the new one and a temporary.
        """
        narrow = 4 + (8 if ulysses > 1 else 0)
        narrow += 2 * ring + 6 if ring > 1 else 0
        return self.width * (narrow * value + (3 * FP32_BYTES if ring > 1 else 0))

    def _block_bytes_per_token(self, value: int) -> int:
        """Return the peak bytes per token in a block, with the kernels that need most.

        It is the maximum of two places:

        * rotary embedding of k: input and its norm, and `_rotary_bytes_per_token`;
        * feed-forward: input, state, attention to the text, and output or norm, and the inner state: 4 D + F values.
        """
        rotary = 2 * self.width * value + self._rotary_bytes_per_token(value)
        return max(rotary, (4 * self.width + self.ffn_width) * value)

    def _rotary_bytes_per_token(self, value: int) -> int:
        """Return the bytes per token of the rotary embedding of k.

        q, k before and after its norm, and after the rotation; in half precision, two tensors of D fp32 values too.
        """
        return self.width * (4 * value + (2 * FP32_BYTES if value < FP32_BYTES else FP32_BYTES * 3 // 2))

    def _chunked_block_bytes(self, tokens: int, chunk: int, value: int) -> int:
        """Return the peak bytes in a block that computes in chunks.

        It is the maximum of four places:

        * attention: input, q, k, v and output, D values per token each;
        * rotary embedding: four of these, and that of the chunk;
        * feed-forward: input, state and attention to the text, and per token of the chunk its norm, or sum and output
          with fp32 copies, and the inner state;
        * the norm after the last block: its input and output, and three fp32 tensors for some tokens.
        """
        width, every = self.width, tokens * self.width * value
        inside = max((2 * width + self.ffn_width) * value, (2 * value + 2 * FP32_BYTES) * width)
        return max(
            5 * every,
            4 * every + chunk * self._rotary_bytes_per_token(value),
            3 * every + chunk * inside,
            2 * every + min(tokens, OUTPUT_TOKENS) * 3 * FP32_BYTES * width,
        )

    def _int8_block_bytes(self, tokens: int, chunk: int, value: int) -> int:
        """Return the peak bytes in a block while one of its linear layers is multiplied in int8.

        It is the maximum of two places, of which each has the scratch memory of a layer:

        * k of self-attention: input, q, k and v of all tokens, or of those so far; the norm and the result of a chunk;
        * feed-forward: input, state and attention to the text; norm or result of a chunk, and its inner state.
        """
        width, inner, every = self.width, self.ffn_width, tokens * self.width * value
        square, first, second = (
            _int8_scratch(chunk, rows, columns) for rows, columns in ((width, width), (inner, width), (width, inner))
        )
        of_chunk = chunk * width * value
        attention = 2 * every + 3 * of_chunk if chunk == tokens else 4 * every + 2 * of_chunk
        return max(attention + square, 3 * every + of_chunk + chunk * inner * value + max(first, second))

    @property
    def _attended(self) -> int:
        """Tokens of cross-attention: of the text, and of an image."""
        return TEXT_TOKENS + (0 if self.image_width is None else IMAGE_TOKENS)

    @property
    def _time_embedder(self) -> int:
        return self.width * (self.time_frequencies + 1) + self.width * (self.width + 1)

    @property
    def _time_projection(self) -> int:
        return 6 * self.width * (self.width + 1)

    @property
    def _text_embedder(self) -> int:
        return self.width * (self.text_width + 1) + self.width * (self.width + 1)

    @property
    def _image_norms(self) -> int:
        """Parameters of the two norms, each with a bias, around the feed-forward layer of the image embedder."""
        return 0 if self.image_width is None else 2 * (self.image_width + self.width)

    @property
    def _image_embedder(self) -> int:
        if self.image_width is None:
            return 0
        return self._image_norms + (self.image_width + self.width) * (self.image_width + 1)

    @property
    def _output_modulation(self) -> int:
        return 2 * self.width


def _int8_scratch(tokens: int, rows: int, columns: int) -> int:
    """Return the bytes of torch's multiplication of `tokens` by an int8 matrix, besides input and result.

    It is the maximum of two moments of a piece of the tokens: three fp32 copies of the input while it is rotated, and
    its codes, the int32 sums and the fp32 results.
    """
    return min(tokens, piece_tokens(rows, columns)) * max(3 * FP32_BYTES * columns, columns + 8 * rows)


T2V_A14B = ExpertShape()
TI2V_5B = ExpertShape(width=3072, ffn_width=14336, blocks=30, in_channels=48, out_channels=48)
