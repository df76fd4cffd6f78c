"""Expert shape: FLOPs, weight bytes and activation memory per block, from widths alone.

The formulas follow the tensors in diffusers' `WanTransformer3DModel`. D is the model width, F the
feed-forward width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..schema import Mesh
from .latent_grid import PATCH

# ComfyUI and diffusers pad prompts with zeros to 512 tokens.
TEXT_TOKENS = 512
IMAGE_TOKENS = 257
"""Tokens per CLIP ViT-H/14 image: 16 x 16 patches and one class token."""
HEAD_DIM = 128

BF16_BYTES = 2
FP32_BYTES = 4

# MKL has other kernels for fewer than 16 fp32 rows, so a short chunk can change the last bits.
SHORT_CHUNK = 15
"""Largest remainder in tokens that is added to the last full chunk instead of forming its own."""
OUTPUT_TOKENS = 1024
"""Tokens per chunk in the norm after the last block."""

INT8_VALUES = 2**26
"""Most inputs, and most results, that torch multiplies at once in int8: 268 MB in fp32."""
FEWEST_INT8_TOKENS = 32
"""Fewest tokens multiplied at once. CUDA needs more than 16 rows in int8 products."""


def piece_tokens(rows: int, columns: int) -> int:
    """Return the most tokens that torch multiplies at once by an int8 matrix [rows, columns]."""
    return max(FEWEST_INT8_TOKENS, INT8_VALUES // max(rows, columns))


@dataclass(frozen=True, kw_only=True)
class KernelNeeds:
    """Memory allocated by block kernels in addition to their results."""

    attention_bytes: int = 0
    """Bytes the self-attention kernel allocates per result value. It returns the result in a layout
    that has to be copied. 0: it allocates the result alone."""
    linear_format: str = ""
    """Format for linear layer products: "int8", "fp8", or "" for the compute dtype.

    Scratch memory for both is taken from torch's int8: fp8 needs no more, and comfy-kitchen does
    not document its own.
    """


PLAIN_KERNELS = KernelNeeds()
ONE_WORKER = Mesh()


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Widths in one expert. Bytes are for bf16 weights unless stated otherwise."""

    width: int = 5120
    ffn_width: int = 13824
    blocks: int = 40
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    time_frequencies: int = 256
    image_width: int | None = None
    """Input width of the image branch (Wan2.1 I2V: 1280). None: no image branch."""

    @property
    def streamed_parameters(self) -> int:
        """Parameters in a block's 10 matrices: q, k, v and out in 2 attentions, feed-forward pair.

        An image branch adds two: the key and value projections for the image.
        """
        return self._square_matrices * self.width**2 + 2 * self.width * self.ffn_width

    @property
    def small_parameters(self) -> int:
        """Parameters in a block's 17 other tensors.

        These are modulation (6D), 8 attention biases, 4 q/k norms, norm2 and 2 ffn biases. An image
        branch adds three: two biases and a norm.
        """
        image = 3 * (self.image_width is not None)
        return (6 + 8 + 4 + 2 + image) * self.width + (self.ffn_width + self.width)

    @property
    def non_block_parameters(self) -> int:
        """Parameters outside the blocks."""
        # Each `+ 1` stands for a bias.
        patch = self.width * (self.in_channels * prod(PATCH) + 1)
        output = self.out_channels * prod(PATCH) * (self.width + 1)
        embedders = (
            self._time_embedder + self._time_projection + self._text_embedder + self._image_embedder
        )
        # `2 * width` is the output modulation. The norm before it has no parameters.
        return patch + embedders + 2 * self.width + output

    def resident_bytes(self) -> int:
        """Return the resident bytes in addition to the buffers, without position tables.

        These are all tensors that do not stream, except the time and text embedders, which are
        loaded only while a run's embeddings are computed. Modules that diffusers keeps in fp32
        count in fp32: modulation and norm2 in each block, the output modulation, and the norms in
        an image branch.
        """
        embedders = self._time_embedder + self._time_projection + self._text_embedder
        parameters = self.non_block_parameters - embedders + self.blocks * self.small_parameters
        # The output modulation has 2 rows, and each block 6 rows of modulation and 2 of norm2.
        in_fp32 = 2 * self.width + self._image_norms + self.blocks * (6 + 2) * self.width
        return parameters * BF16_BYTES + in_fp32 * (FP32_BYTES - BF16_BYTES)

    def streamed_bytes(self, *, bytes_per_weight: int = BF16_BYTES) -> int:
        """Return the bytes moved by one block fetch (fp8: 1 byte per weight)."""
        return self.streamed_parameters * bytes_per_weight

    def int8_bytes(self) -> int:
        """Return the bytes in a block with int8 matrices and an fp32 scale per row."""
        # The first feed-forward matrix has F rows. All others have D.
        rows = (self._square_matrices + 1) * self.width + self.ffn_width
        return self.streamed_parameters + rows * FP32_BYTES

    def block_flops(self, tokens: int) -> int:
        """Return the floating point operations in one block for one lane.

        A multiply-add counts as two.
        """
        return self.linear_flops(tokens) + self.attention_flops(tokens)

    def linear_flops(self, tokens: int) -> int:
        """Return one lane's operations in a block's linear layers, including feed-forward."""
        width = self.width
        # Six D x D products per token: q, k, v and out in self-attention, q and out in
        # cross-attention. Keys and values in cross-attention have the attended tokens only.
        return (
            2 * tokens * (6 * width**2 + 2 * width * self.ffn_width)
            + 2 * self._attended * 2 * width**2
        )

    def attention_flops(self, tokens: int) -> int:
        """Return the operations in self-attention and cross-attention, per block and lane.

        Cross-attention is over 512 text tokens and, with an image branch, 257 image tokens.
        """
        # Queries times keys, and scores times values: a product with n keys takes 2 n D per token.
        return 4 * tokens**2 * self.width + 4 * tokens * self._attended * self.width

    def working_bytes(
        self,
        lane_tokens: Sequence[int],
        *,
        value_bytes: int = BF16_BYTES,
        chunk_tokens: int | None = None,
        workers: Mesh = ONE_WORKER,
        cached_states: int = 0,
        kernels: KernelNeeds = PLAIN_KERNELS,
    ) -> int:
        """Return the peak device memory for a step's activations, in addition to the weights.

        It adds up all lanes' hidden states (D values with `value_bytes` per token each), the rotary
        tables (128 fp32 values per token, shared between lanes with equal length), the embedded
        texts for both experts, and the activations in one block for one lane. It is at least as
        large as the time embedder, which is loaded before the blocks begin. Latents (a 100th of a
        hidden state) are not counted.

        Args:
            lane_tokens: sequence length per lane in the step, over all workers together.
            value_bytes: bytes per activation value.
            chunk_tokens: tokens that pass through feed-forward and norms at once. None: all tokens.
            workers: the ring and Ulysses workers share the tokens in every lane. Each keeps its
                part, but all tokens of one lane enter the first block, and the rotary tables are
                not divided.
            cached_states: tensors as large as a hidden state that a cache keeps per lane.
            kernels: memory allocated by the block kernels.
        """
        width = self.width
        value = value_bytes
        lanes = len(lane_tokens)
        tokens = max(lane_tokens)
        # The workers' shares differ by at most one token. The largest decides.
        shares = [-(-each // (workers.ring * workers.ulysses)) for each in lane_tokens]
        local_tokens = max(shares)
        chunk = local_tokens
        if chunk_tokens is not None:
            # A short remainder joins the last full chunk.
            chunk = min(local_tokens, chunk_tokens + SHORT_CHUNK)
        if chunk == local_tokens:
            in_block = local_tokens * self._block_bytes_per_token(value)
        else:
            in_block = self._chunked_block_bytes(local_tokens, chunk, value)
            if kernels.attention_bytes:
                # q, k, v, their input and the result, next to the kernel's own memory or the copied
                # result.
                in_block = max(
                    in_block,
                    local_tokens * width * (5 * value + max(kernels.attention_bytes, value)),
                )
        if kernels.linear_format:
            in_block = max(in_block, self._int8_block_bytes(local_tokens, chunk, value))
        if local_tokens < tokens:
            in_block = max(in_block, local_tokens * self._shared_bytes_per_token(value, workers))
        # A set: lanes of equal length share their table.
        rotary = sum(set(lane_tokens)) * HEAD_DIM * FP32_BYTES
        # Hidden states for the lanes outside the block, and embedded texts, in rows of D values.
        # One lane counts in the block, and one enters the first block whole. The text has a row set
        # per lane and expert, and two in the block (keys and values).
        waiting = sum(shares) - 2 * local_tokens + tokens + (2 * lanes + 2) * TEXT_TOKENS
        waiting += cached_states * sum(shares)
        if self.image_width is not None:
            # Every lane has one tensor with image and text rows, and a block their keys and values.
            waiting += (lanes + 2) * (TEXT_TOKENS + IMAGE_TOKENS)
        # diffusers keeps the time embedder in fp32.
        embedding = self._time_embedder * FP32_BYTES + self._time_projection * value
        return max(in_block + rotary + waiting * width * value, embedding)

    def _shared_bytes_per_token(self, value: int, workers: Mesh) -> int:
        """Return the peak bytes per local token while workers share an attention.

        Counted in tensors with D values per token:

        * the block: q, k, v and the input;
        * Ulysses: eight more for q, k and v in send order, as received, and reordered; not all
          exist at once;
        * ring: k and v to send, k and v from all workers in the ring, q, k, v and the result in the
          kernel's layout, and in fp32 the accumulated result, the new one and a temporary.
        """
        rings = workers.ring > 1
        narrow = 4 + 8 * (workers.ulysses > 1) + (2 * workers.ring + 6) * rings
        return self.width * (narrow * value + 3 * FP32_BYTES * rings)

    def _block_bytes_per_token(self, value: int) -> int:
        """Return the peak bytes per token in a block, with the kernels that need most.

        It is the maximum over two places:

        * rotary embedding of k: input and its norm, and `_rotary_bytes_per_token`;
        * feed-forward: input, state, attention to the text, and output or norm, and the inner
          state: 4 D + F values.
        """
        rotary = 2 * self.width * value + self._rotary_bytes_per_token(value)
        return max(rotary, (4 * self.width + self.ffn_width) * value)

    def _rotary_bytes_per_token(self, value: int) -> int:
        """Return the bytes per token for the rotary embedding of k.

        q, k before and after the norm, and after the rotation. In half precision, two tensors with
        D fp32 values too.
        """
        return self.width * (
            4 * value + (2 * FP32_BYTES if value < FP32_BYTES else FP32_BYTES * 3 // 2)
        )

    def _chunked_block_bytes(self, tokens: int, chunk: int, value: int) -> int:
        """Return the peak bytes in a block that computes in chunks.

        It is the maximum over four places:

        * attention: input, q, k, v and output, D values per token each;
        * rotary embedding: four such tensors, and the chunk's rotary embedding;
        * feed-forward: input, state and attention to the text, and per chunk token the norm, or sum
          and output with fp32 copies, and the inner state;
        * the norm after the last block: input and output, and three fp32 tensors for some tokens.
        """
        width = self.width
        every = tokens * self.width * value
        inside = max((2 * width + self.ffn_width) * value, (2 * value + 2 * FP32_BYTES) * width)
        return max(
            5 * every,
            4 * every + chunk * self._rotary_bytes_per_token(value),
            3 * every + chunk * inside,
            2 * every + min(tokens, OUTPUT_TOKENS) * 3 * FP32_BYTES * width,
        )

    def _int8_block_bytes(self, tokens: int, chunk: int, value: int) -> int:
        """Return the peak bytes in a block while an int8 linear layer is multiplied.

        It is the maximum over two places, each with a layer's scratch memory:

        * k in self-attention: input, q, k and v for all tokens, or for the chunks so far; the norm
          and the result for a chunk;
        * feed-forward: input, state and attention to the text; norm or result for a chunk, and the
          inner state.
        """
        width = self.width
        inner = self.ffn_width
        every = tokens * self.width * value
        square, first, second = (
            _int8_scratch(chunk, rows, columns)
            for rows, columns in ((width, width), (inner, width), (width, inner))
        )
        of_chunk = chunk * width * value
        attention = 2 * every + 3 * of_chunk if chunk == tokens else 4 * every + 2 * of_chunk
        return max(
            attention + square, 3 * every + of_chunk + chunk * inner * value + max(first, second)
        )

    @property
    def _square_matrices(self) -> int:
        return 8 + 2 * (self.image_width is not None)

    @property
    def _attended(self) -> int:
        """Tokens in cross-attention, from the text and an image."""
        return TEXT_TOKENS + IMAGE_TOKENS * (self.image_width is not None)

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
        """Parameters in two norms, with biases, around the image embedder's feed-forward layer."""
        if self.image_width is None:
            return 0
        return 2 * (self.image_width + self.width)

    @property
    def _image_embedder(self) -> int:
        if self.image_width is None:
            return 0
        return self._image_norms + (self.image_width + self.width) * (self.image_width + 1)


def _int8_scratch(tokens: int, rows: int, columns: int) -> int:
    """Return torch's scratch bytes for `tokens` times an int8 matrix.

    Input and result are not counted. It is the maximum over two moments per piece: three fp32
    copies of the input while it is rotated, and then the codes, the int32 sums and the fp32
    results.
    """
    # Bytes per token: int8 codes have 1 per input, int32 sums and fp32 results 8 per output.
    return min(tokens, piece_tokens(rows, columns)) * max(
        3 * FP32_BYTES * columns, columns + 8 * rows
    )


T2V_A14B = ExpertShape()
TI2V_5B = ExpertShape(width=3072, ffn_width=14336, blocks=30, in_channels=48, out_channels=48)
