"""Both VAEs: equal to diffusers' VAE in frames, tiles and bf16, smaller tiles, refused inputs."""

from __future__ import annotations

import itertools
import random
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.schema import StateError
from wanstream.wan.latents.space import WAN21, WAN22
from wanstream.wan.vae.memory import (
    DecodeNeeds,
    TensorMemoryTracker,
    VaeMemoryError,
    decode_pixel_bytes,
    encode_pixel_bytes,
)
from wanstream.wan.vae.tiles import TileBlender, Tiling, crop, decoded_frames
from wanstream.wan.vae.vae import (
    DecodeOutOfMemoryError,
    VaeInputError,
    open_vae,
    retry_with_smaller_tiles,
)

BF16 = torch.bfloat16


def noise(*shape):
    # Large values reach beyond -1 to 1, where clamping before blending would show.
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["Wan2.1", "Wan2.2"], scope="module")
def case(request, tiny_pipeline, wan22_vae):
    """A VAE: `folder`, `space`, our `vae`, diffusers' `own` and a small `tiling`."""
    folder, space = (tiny_pipeline(), WAN21) if request.param == "Wan2.1" else (wan22_vae, WAN22)
    own = AutoencoderKLWan.from_pretrained(folder / "vae").eval().requires_grad_(False)
    tiling = Tiling.of(8 * space.pixels, space.pixels)
    with open_vae(folder) as vae:
        yield SimpleNamespace(folder=folder, space=space, vae=vae, own=own, tiling=tiling)


def latents_for(case, frames, height, width, batch=1):
    return noise(batch, case.space.channels, frames, height, width)


@contextmanager
def tiled(own, size, stride):
    own.enable_tiling(size, size, stride, stride)
    yield
    own.disable_tiling()


def decoded(own, latents):
    """Decode with diffusers, one video at a time."""
    videos = [own.decode(one).sample[0].movedim(0, -1) for one in latents.split(1)]
    return (torch.stack(videos) + 1) / 2


def encoded(own, video):
    return own.encode(video.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist.mode()


def test_decoded_frames_equal_diffusers(case):
    latents = latents_for(case, 3, 2, 3, batch=2)
    side = case.space.pixels
    videos = case.vae.decode(latents, device="cpu")
    assert videos.shape == (2, 9, 2 * side, 3 * side, 3)
    assert torch.equal(videos, decoded(case.own, latents))
    assert 0 <= videos.min() < videos.max() <= 1


@pytest.mark.parametrize(("frames", "size"), [(2, (9, 5)), (1, (8, 8))], ids=str)
def test_tiles_in_any_order_equal_diffusers(case, frames, size):
    latents = latents_for(case, frames, *size)
    tiling = case.tiling
    with tiled(case.own, tiling.pixels, tiling.stride):
        expected = decoded(case.own, latents)
    found = case.vae.decode(latents, device="cpu", tiling=tiling)
    assert torch.equal(found, expected)
    # Tiles of an untrained VAE differ from the whole.
    assert torch.equal(found, decoded(case.own, latents)) == (size == (8, 8))
    tiles = list(tiling.tiles(*size))
    random.Random(1).shuffle(tiles)
    shuffled = torch.full_like(expected[0], torch.nan)
    blender = TileBlender(tiling, into=shuffled)
    for tile in tiles:
        blender.put(tile, case.vae.decode_tile(crop(latents, tile), device="cpu"))
    assert torch.equal(shuffled, expected[0])


def test_frames_leave_as_they_are_made(case):
    latents = latents_for(case, 3, 2, 2)
    checks = itertools.count()
    side = 2 * case.space.pixels
    parts = case.vae.stream(latents, device="cpu", check=lambda: next(checks))
    first = next(parts)
    assert (first.shape, first.dtype, next(checks)) == ((1, side, side, 3), torch.uint8, 1)
    shown = torch.cat([first, *parts])
    whole = case.vae.decode(latents, device="cpu")[0]
    assert torch.equal(shown, whole.mul(255).round().to(torch.uint8))


def test_stopped_decode_ends_before_the_next_latent_frame(case):
    calls = []

    def check():
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    for decode in (case.vae.decode, case.vae.decode_tile):
        calls.clear()
        with pytest.raises(InterruptedError):
            decode(latents_for(case, 5, 2, 2), device="cpu", check=check)
        assert calls == [0, 1]


def test_repeated_tiles_are_reported(case):
    first, *_, last = case.tiling.tiles(8, 20)
    side = case.space.pixels
    blender = TileBlender(case.tiling, into=torch.empty(1, 8 * side, 20 * side, 3))
    frames = torch.zeros(3, 1, 8 * side, 8 * side)
    for tile in (first, last):
        part = frames[..., : side * len(tile.columns)]
        blender.put(tile, part)
        with pytest.raises(StateError, match="was added before"):
            blender.put(tile, part)


def test_later_uses_give_the_same(case):
    latents = latents_for(case, 1, 2, 2)
    with torch.inference_mode():
        first = case.vae.decode(latents, device="cpu")
    assert torch.equal(case.vae.decode(latents, device="cpu"), first)
    case.vae.close()
    assert torch.equal(case.vae.decode(latents, device="cpu"), first)


def test_mode_of_the_latents_equals_diffusers(case):
    video = noise(5, 32, 48, 3).sigmoid()
    raw = case.vae.encode(video, device="cpu")
    side = case.space.pixels
    assert raw.shape == (1, case.space.channels, 2, 32 // side, 48 // side)
    assert torch.equal(raw, encoded(case.own, video))


def test_encoded_tiles_equal_diffusers(case):
    """diffusers counts the sides of its tiles in patches."""
    side = case.space.pixels
    video = noise(1, 9 * side, 10 * side, 3).sigmoid()
    small = video[:, : 8 * side, : 8 * side]
    found, uncut, whole = (
        case.vae.encode(given, device="cpu", tiling=tiling)
        for given, tiling in ((video, case.tiling), (small, case.tiling), (video, None))
    )
    assert torch.equal(whole, encoded(case.own, video)), "the next one is whole again"
    assert torch.equal(uncut, encoded(case.own, small)), "no larger than a tile"
    with tiled(case.own, 64, 48):
        assert torch.equal(found, encoded(case.own, video))
    assert not torch.equal(found, whole)


def test_other_videos_are_refused(case):
    for shape, message in (
        ((4, 16, 16, 3), "4 frames"),
        ((1, 16, 12, 3), r"12x16: give multiples of \d+"),
        ((1, 16, 16, 4), "give frames"),
        ((16, 16, 3), "give frames"),
        ((0, 16, 16, 3), "give frames"),
    ):
        for use in (case.vae.encode_needs, lambda video: case.vae.encode(video, device="cpu")):
            with pytest.raises(VaeInputError, match=message):
                use(torch.zeros(shape))


def test_other_latents_are_refused(case):
    for shape in ((1, 47, 1, 2, 2), (16, 1, 2, 2), (1, 16, 0, 2, 2)):
        with pytest.raises(VaeInputError, match=r"give \[B, 16 or 48, T, h, w\]"):
            case.vae.decode(torch.zeros(shape), device="cpu")


def test_latents_of_the_other_vae_are_refused(case):
    other = 64 - case.space.channels
    models = {16: r"Wan2\.1 and Wan2\.2 A14B", 48: r"Wan2\.2 5B"}
    file = {16: r"wan_2\.1_vae", 48: r"wan2\.2_vae"}[other]
    said = rf"\[1, {other}, 1, 2, 2\], of {models[other]}, .*of {models[64 - other]}, for "
    said += rf"{64 - other} channels: take {file}"
    for use in (
        case.vae.decode_needs,
        lambda given: case.vae.decode(given, device="cpu"),
        lambda given: case.vae.decode_tile(given, device="cpu"),
        lambda given: next(case.vae.stream(given, device="cpu")),
    ):
        with pytest.raises(VaeInputError, match=said):
            use(noise(1, other, 1, 2, 2))


def test_needs_are_in_pixels_of_the_vae(case):
    side = case.space.pixels
    needs = case.vae.decode_needs(noise(1, case.space.channels, 2, 3, 4), to_file=True)
    assert (needs.height, needs.width, needs.per_latent, needs.frames) == (3, 4, side, 5)
    pixels = 3 * side * 4 * side * 3
    # A latent frame in fp32, and as it is stored.
    assert needs.host_bytes(None) == 4 * pixels * 5
    needs = case.vae.encode_needs(noise(5, 64, 48, 3))
    assert (needs.height, needs.width, needs.per_latent) == (64 // side, 48 // side, side)
    # Wan2.2's VAE has the video as pixels and as patches.
    assert (needs.frames, needs.value_bytes) == (5, 4 if side == 8 else 8)


@pytest.fixture
def own(case):
    loaded = AutoencoderKLWan.from_pretrained(case.folder / "vae", torch_dtype=BF16)
    return loaded.eval().requires_grad_(False)


def test_bf16_equals_diffusers(case, own):
    latents = latents_for(case, 2, 2, 2)
    video = noise(5, 32, 16, 3).sigmoid()
    with open_vae(case.folder, BF16) as vae:
        frames = vae.decode(latents, device="cpu")
        raw = vae.encode(video, device="cpu")
    expected = own.decode(latents.to(BF16)).sample[0].movedim(0, -1).float()
    assert torch.equal(frames[0], (expected + 1) / 2)
    assert torch.equal(raw, encoded(own, video.to(BF16)).float())
    assert frames.dtype == raw.dtype == torch.float32


@pytest.mark.slow  # decodes whole videos
def test_bf16_takes_half_the_memory_as_estimated(case, own):
    latents = latents_for(case, 2, 9, 5)
    config = own.config
    with open_vae(case.folder, BF16) as vae:
        whole = case.vae.decode_needs(latents)
        half = vae.decode_needs(latents)
        assert vae.weight_bytes * 2 == case.vae.weight_bytes
        vae.decode(latents[:, :, :1, :2, :2], device="cpu")
        assert {weight.dtype for weight in vae._loaded.parameters()} == {BF16}
    assert half.pixel_bytes * 2 == pytest.approx(whole.pixel_bytes, rel=0.01)
    assert half.host_bytes(None) == whole.host_bytes(None), "frames are fp32"
    encode = encode_pixel_bytes(config, 2)
    assert encode_pixel_bytes(config, 2, BF16) * 2 == pytest.approx(encode, rel=0.01)
    with TensorMemoryTracker() as tracker:
        for frames in decoded_frames(own, latents_for(case, 3, 6, 6).to(BF16)):
            del frames
    estimate = decode_pixel_bytes(config, 3, BF16) * 36
    assert tracker.convolution_peak == pytest.approx(estimate, rel=0.01)


NEED = DecodeNeeds(
    height=13, width=20, frames=5, pixel_bytes=1000, value_bytes=4, keeps_frames=True
)
NO_RAM = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"


class Tries:
    """Decode that raises `error` for tiles above a size."""

    def __init__(self, fits: int, error: Exception | None = None) -> None:
        self._fits = fits
        self._error = error
        self.sizes: list[int] = []
        self.left: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, tiling: Tiling | None) -> str:
        # Tensors of a failed attempt are freed before the next one.
        assert all(tensor() is None for tensor in self.left)
        self.sizes.append(0 if tiling is None else tiling.pixels)
        made = torch.zeros(10)
        self.left.append(weakref.ref(made))
        if tiling is None or tiling.pixels > self._fits:
            raise self._error or torch.OutOfMemoryError
        return f"decoded in {tiling.pixels}"


def test_tiles_get_smaller_until_they_fit():
    tries = Tries(fits=80)
    changes = []
    assert retry_with_smaller_tiles(tries, NEED, None, changes.append) == "decoded in 64"
    assert tries.sizes == [0, 88, 64]
    assert changes == [
        "no memory for decoding whole frames: retrying with tiles of 88 pixels",
        "no memory for decoding tiles of 88 pixels: retrying with tiles of 64 pixels",
    ]


def test_ram_that_cannot_be_had_is_a_shortage_too():
    for tries, sizes in ((Tries(128), [128]), (Tries(64, RuntimeError(NO_RAM)), [128, 80, 64])):
        assert retry_with_smaller_tiles(tries, NEED, Tiling.of(128)) == f"decoded in {sizes[-1]}"
        assert tries.sizes == sizes


def test_smallest_tile_is_the_last_try():
    tries = Tries(fits=0)
    said = "tiles of 64 pixels, the smallest size: OutOfMemoryError"
    with pytest.raises(DecodeOutOfMemoryError, match=said) as none:
        retry_with_smaller_tiles(tries, NEED, Tiling.of(72))
    assert tries.sizes == [72, 64]
    assert isinstance(none.value, VaeMemoryError)
    assert isinstance(none.value, torch.OutOfMemoryError)


def test_another_error_ends_it_at_once():
    tries = Tries(64, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        retry_with_smaller_tiles(tries, NEED, None)
    assert tries.sizes == [0]
