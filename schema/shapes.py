"""How much there is to compute and to move: tokens, FLOPs and bytes of Wan2.2 from widths alone.

Sums over the tensors of one transformer of diffusers' `WanTransformer3DModel`. D is the model's width, F that of its
feed-forward layer.
"""

from __future__ import annotations

from dataclasses import dataclass

PIXELS_PER_LATENT = 8
"""Along either side, of Wan2.1 and Wan2.2 A14B."""
WAN22_PIXELS_PER_LATENT = 16
"""Of Wan2.2 5B."""
FRAMES_PER_LATENT = 4
PATCH = (1, 2, 2)
TEXT_TOKENS = 512
IMAGE_TOKENS = 257
"""What CLIP ViT-H/14 sees of an image: 16 x 16 patches and one for the whole."""
HEAD_DIM = 128

BF16_BYTES = 2
FP32_BYTES = 4

SHORT_CHUNK = 15
"""Tokens at the end that are not worth a chunk: they join the one before."""
OUTPUT_TOKENS = 1024
"""Tokens that the norm behind the last block takes at once."""


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """A video that the experts and their VAE can make.

    Raises ValueError unless width and height are multiples of 16, of Wan2.2 5B of 32, and frames are 4n + 1.
    """

    width: int
    height: int
    frames: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels for each latent pixel, along either side: 8, of Wan2.2 5B 16."""

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
        """(frames, height, width) of the latent."""
        return (
            (self.frames - 1) // FRAMES_PER_LATENT + 1,
            self.height // self.per_latent,
            self.width // self.per_latent,
        )

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see, one lane."""
        frames, height, width = self.latent
        return (frames // PATCH[0]) * (height // PATCH[1]) * (width // PATCH[2])


def _nearest(value: int, step: int, *, first: int) -> int:
    """The member of first, first + step, first + 2 step, ... that is nearest to `value`."""
    return first + max(0, (value - first + step // 2) // step) * step


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Widths of one expert. All counts are of parameters, all bytes bf16 unless they say otherwise."""

    width: int = 5120
    ffn_width: int = 13824
    blocks: int = 40
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    time_frequencies: int = 256
    image_width: int | None = None
    """Of what an image branch takes (Wan2.1 I2V: 1280); None: there is none."""

    @property
    def streamed_parameters(self) -> int:
        """The 10 matrices of a block: q, k, v, out of two attentions, and the feed-forward pair.

        An image branch adds two, the keys and values of the image.
        """
        return self._square_matrices * self.width**2 + 2 * self.width * self.ffn_width

    @property
    def small_parameters(self) -> int:
        """The 17 other tensors of a block: modulation 6D, eight attention biases, four q/k norms, norm2, ffn biases.

        An image branch adds three: two biases and a norm.
        """
        image = 0 if self.image_width is None else 3
        return (6 + 8 + 4 + 2 + image) * self.width + (self.ffn_width + self.width)

    @property
    def outer_parameters(self) -> int:
        """Everything outside the blocks."""
        patch = self.width * (self.in_channels * _volume(PATCH) + 1)
        output = self.out_channels * _volume(PATCH) * (self.width + 1)
        embedders = self._time_embedder + self._time_projection + self._text_embedder + self._image_embedder
        return patch + embedders + self._output_modulation + output

    @property
    def parameters(self) -> int:
        return self.blocks * (self.streamed_parameters + self.small_parameters) + self.outer_parameters

    def block_bytes(self, *, fp32_islands: bool = False) -> int:
        """Bytes of one block; `fp32_islands` counts its modulation and norm2 as fp32, the way diffusers holds them."""
        islands = (6 + 2) * self.width
        return _bytes(self.streamed_parameters + self.small_parameters, islands if fp32_islands else 0)

    def non_block_bytes(self, *, fp32_islands: bool = False) -> int:
        """Bytes outside the blocks; `fp32_islands` counts as fp32 what diffusers holds so.

        That is the time embedder, the output modulation, and the norms of an image branch.
        """
        islands = self._time_embedder + self._output_modulation + self._image_norms
        return _bytes(self.outer_parameters, islands if fp32_islands else 0)

    def resident_bytes(self) -> int:
        """Bytes that stay beside the buffers, fp32 islands counted as fp32, without the tables of positions.

        That is everything that does not stream but the embedders of time and text, which are there for a moment only.
        """
        outer = self.outer_parameters - self._time_embedder - self._time_projection - self._text_embedder
        small = self.block_bytes(fp32_islands=True) - self.streamed_bytes()
        return _bytes(outer, self._output_modulation + self._image_norms) + self.blocks * small

    def streamed_bytes(self, *, bytes_per_weight: int = BF16_BYTES) -> int:
        """Bytes that one fetch of a block moves (1 byte per weight: fp8)."""
        return self.streamed_parameters * bytes_per_weight

    def block_flops(self, tokens: int) -> int:
        """Floating point operations of one block for one lane of `tokens`, a multiplication and an addition being two.

        Projections and feed-forward, self-attention, cross-attention over 512 text tokens and, with an image branch,
        257 of the image, and their keys and values.
        """
        width, attended = self.width, TEXT_TOKENS + self._image_tokens
        linear = 2 * tokens * (6 * width**2 + 2 * width * self.ffn_width) + 2 * attended * 2 * width**2
        self_attention = 4 * tokens**2 * width
        cross_attention = 4 * tokens * attended * width
        return linear + self_attention + cross_attention

    def working_bytes(
        self,
        tokens: int,
        *,
        lanes: int,
        value_bytes: int = BF16_BYTES,
        chunk_tokens: int | None = None,
        ring: int = 1,
        ulysses: int = 1,
        kept_states: int = 0,
    ) -> int:
        """Device memory that a step computes in, beside the weights: what is alive at once when most is.

        Every lane of `tokens` keeps its hidden state (D values of `value_bytes` per token), all share the rotary tables
        (2 x 128 fp32 values per token), the embedded texts of both experts lie there, and one lane at a time is in a
        block, which takes `chunk_tokens` at once where tokens do not meet (None: all of them). The latents themselves
        (a 100th of a hidden state) and the workspace of the attention kernel are not counted. It is at least what
        embeds the time, which is there before the blocks begin.

        `ring` x `ulysses` workers share the tokens of every lane: each keeps its own of them, but of one lane at a time
        all enter the first block, and the rotary tables stay whole. A cache keeps `kept_states` tensors of the size of
        each lane's hidden state. With an image branch every lane has rows of image and text together, and in a block
        their keys and values lie beside as much as self-attention takes.
        """
        width, value = self.width, value_bytes
        own = tokens // (ring * ulysses)
        if chunk_tokens is None:
            in_block = own * self._block_bytes_per_token(value)
        else:
            in_block = self._chunked_block_bytes(own, min(own, chunk_tokens + SHORT_CHUNK), value)
        if own < tokens:
            in_block = max(in_block, own * self._shared_bytes_per_token(value, chunk_tokens, ring, ulysses))
        rotary = tokens * 2 * HEAD_DIM * FP32_BYTES
        waiting = (lanes - 1) * own + tokens - own + (2 * lanes + 2) * TEXT_TOKENS
        waiting += kept_states * lanes * own
        if self.image_width is not None:
            waiting += (lanes + 2) * (TEXT_TOKENS + IMAGE_TOKENS)
        embedding = self._time_embedder * FP32_BYTES + self._time_projection * value
        return max(in_block + rotary + waiting * width * value, embedding)

    def _shared_bytes_per_token(self, value: int, chunk_tokens: int | None, ring: int, ulysses: int) -> int:
        """What a worker's token holds while workers share an attention, D values each, beside q, k and v of

        * the block: its input and the norm of that, which v takes the place of in a chunked block;
        * Ulysses: eight more, which are q, k and v as they are sent, as they come and in their new order, where some
          of these are there at a time;
        * a ring: k and v as they are sent, those of all its workers, q, k, v and the result as the kernel wants them,
          and the result so far, this one and what lies between them in fp32.
        """
        narrow = 5 if chunk_tokens is None else 4
        narrow += 8 if ulysses > 1 else 0
        narrow += 2 * ring + 6 if ring > 1 else 0
        return self.width * (narrow * value + (3 * FP32_BYTES if ring > 1 else 0))

    def _block_bytes_per_token(self, value: int) -> int:
        """The most that a token holds along diffusers' `WanTransformerBlock.forward`, of

        * rotary embedding: input, its norm, q, k, v and the rotated q, and three fp32 halves of a product: 6 D values
          and 6 D bytes;
        * the norm of a q, or the end of a residual: five tensors of D values, and three of them in fp32 between: 5 D
          values and 12 D bytes, beside the k and v of the text;
        * feed-forward: input, state, norm and the output of attention, and its inside before and after the
          activation: 4 D + 2 F values.
        """
        width = self.width
        return max((6 * value + 6) * width, (5 * value + 12) * width, (4 * width + 2 * self.ffn_width) * value)

    def _chunked_block_bytes(self, tokens: int, chunk: int, value: int) -> int:
        """The most that is there at once in a block whose forward is chunked, of

        * attention: input, q, k, v and output, D values for every token each;
        * norm of q or k: four of these, and for a token of the chunk three tensors in fp32 and the narrower input;
        * feed-forward: input and state, and for a token of the chunk its norm and the inside before and after the
          activation, or output, gated output, state and sum;
        * the norm behind the last block: its input and output, and three tensors in fp32 for some tokens.
        """
        width, every = self.width, tokens * self.width * value
        narrow = value if value < FP32_BYTES else 0
        inside = max((width + 2 * self.ffn_width) * value, (4 * FP32_BYTES + narrow) * width)
        return max(
            5 * every,
            4 * every + chunk * (3 * FP32_BYTES + narrow) * width,
            2 * every + chunk * inside,
            2 * every + min(tokens, OUTPUT_TOKENS) * 3 * FP32_BYTES * width,
        )

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
    def _square_matrices(self) -> int:
        return 8 if self.image_width is None else 10

    @property
    def _image_tokens(self) -> int:
        return 0 if self.image_width is None else IMAGE_TOKENS

    @property
    def _image_norms(self) -> int:
        """The two norms around the feed-forward layer that embeds the image, each with a bias."""
        return 0 if self.image_width is None else 2 * (self.image_width + self.width)

    @property
    def _image_embedder(self) -> int:
        if self.image_width is None:
            return 0
        return self._image_norms + (self.image_width + self.width) * (self.image_width + 1)

    @property
    def _output_modulation(self) -> int:
        return 2 * self.width


T2V_A14B = ExpertShape()
I2V_A14B = ExpertShape(in_channels=36)
TI2V_5B = ExpertShape(width=3072, ffn_width=14336, blocks=30, in_channels=48, out_channels=48)
WAN21_I2V_14B = ExpertShape(in_channels=36, image_width=1280)


def _bytes(parameters: int, fp32_parameters: int) -> int:
    return parameters * BF16_BYTES + fp32_parameters * (FP32_BYTES - BF16_BYTES)


def _volume(patch: tuple[int, int, int]) -> int:
    return patch[0] * patch[1] * patch[2]
