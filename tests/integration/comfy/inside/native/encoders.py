"""Runs in ComfyUI's Python: streamed text encoders and checkpoints against ComfyUI's loaders."""

import copy
import gc
import weakref
from functools import partial
from operator import methodcaller
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from unittest.mock import patch

import comfy.lora
import comfy.model_management as mm
import comfy.text_encoders.wan
import torch
from comfy import hooks, sd
from comfy_extras import nodes_model_merging
from safetensors.torch import load_file, save_file

from wanstream.host import EncoderFiles, ModelStreaming, current_host
from wanstream.host.comfy import versions
from wanstream.host.comfy.native import encoders
from wanstream.host.comfy.native.encoders import load_encoders, stream_clip
from wanstream.host.comfy.native.load import load_checkpoint
from wanstream.offload.engine.run import EngineRun
from wanstream.offload.formats import CheckpointFileError
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import scaled_fp8

from ..checks import for_each, refused, require
from ..families import sample
from ..incidents import is_cut
from ..patches import on_clone
from ..tiny_encoders import CANDIDATES, ENCODERS, T5, thin_encoders
from ..tiny_models import POLICIES, WAN, has_ended
from .formats import QUANT_ALGOS, cpu_kernels, quantised

LIMITS = {"smallest_block": 10_000, "smallest_model": 1_000}
CHANGED = ("umt5", "clip-l and t5", "qwen2.5-vl")
ANY_LAYER = {**LIMITS, "smallest_layer": 1}
"""Limits that would make blocks of layers outside the lists, if encoders had such blocks."""
LAYERWISE = POLICIES["layerwise"](0)


class Pair:
    """ComfyUI's CLIP from files in a new folder, and a streamed one."""

    def __init__(self, folder, name, policy="layerwise", form="float16"):
        require(name in ENCODERS, name)
        self.encoder = ENCODERS[name]
        self.folder = Path(mkdtemp(dir=folder))
        self.paths = self.encoder.write(self.folder, getattr(torch, form, torch.float16))
        for path in self.paths:
            if form == "scaled fp8":
                _scale(path)
            elif not hasattr(torch, form):
                _quantise(path, form)
        self.own = self.encoder.load(self.paths)
        self.streamed = _load(self.encoder, self.paths, ANY_LAYER, POLICIES[policy](4))
        self.weights = self.streamed.cond_stage_model.weights

    def equal_texts(self, *lengths, change=lambda clip: clip):
        return all(self.equal(self.encoder.prompt(length), change) for length in lengths)

    def equal(self, prompt, change=lambda clip: clip):
        own, streamed = (
            # A copy: some encoders take the images out.
            change(clip).encode_from_tokens(copy.deepcopy(prompt), return_dict=True)
            for clip in (self.own, self.streamed)
        )
        return _equal(own, streamed)


def _equal(one, other):
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        assert value.isfinite().all()
        yield value
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from _tensors(value[name])


def setup(folder):
    with thin_encoders():
        yield folder


@for_each(*(name for name in CANDIDATES if name != "gemma2 with a head"))
def check_encodings_take_two_blocks_of_memory(folder, name):
    """Prompts in two lengths, one of them twice, and an image twice."""
    pair = Pair(folder, name)
    encoder = pair.encoder
    weights = pair.weights
    leave = EngineRun.__exit__
    peaks = []
    fetched = []

    def counting(run, *error):
        peaks.append(weights.loaded_bytes - weights.outside_bytes)
        fetched.extend(fetch.block.block for fetch in run.fetched)
        leave(run, *error)

    with patch.object(EngineRun, "__exit__", counting):
        assert pair.equal_texts(50, 90, 50)
        # Only the first encoding may fetch one part that the text does not need.
        assert len(fetched) / 3 <= len(weights.blocks) + 1
        if encoder.sees:
            image = torch.rand(1, 336, 336, 3, generator=torch.Generator().manual_seed(1))
            for _ in range(2):
                assert pair.equal(encoder.prompt(60, image))
    assert max(peaks) == 2 * weights.buffer_bytes
    # The tokens' table, by far the largest tensor, is not among them.
    assert weights.outside_bytes < weights.buffer_bytes
    assert weights.loaded_bytes == weights.outside_bytes
    assert weights.host_bytes == 0


@for_each(
    ("umt5", "float32"), ("umt5", "scaled fp8"), ("clip-l and t5", "bfloat16"),
    ("clip-l and t5", "scaled fp8"), ("qwen2.5-vl", "scaled fp8"),
    ("clip-l and llama", "scaled fp8"), ("gpt-oss", "bfloat16"), ("gpt-oss", "scaled fp8"),
    ("gemma4 and projection", "float32"), ("gemma4 and projection", "scaled fp8"),
    ("umt5", "nvfp4"), ("umt5", "int8_tensorwise"),
    ("clip-l and t5", "mxfp8"), ("qwen2.5-vl", "nvfp4"), ("qwen2.5-vl", "mxfp8"),
    ("clip-l and llama", "int8_tensorwise"), ("gemma4 and projection", "nvfp4"),
)  # fmt: skip
def check_format(folder, name, form):
    """Texts without and with a LoRA. The token table stays in the file."""
    pair = Pair(folder, name, form=form)
    assert pair.equal_texts(50, 90)
    assert pair.equal_texts(50, change=partial(_with_lora, 0.5, pair.own))
    in_file = pair.streamed.cond_stage_model.in_file
    # ComfyUI converts some fp32 tables when it loads them.
    tables = ("shared.weight", "embed_tokens.weight")
    assert form == "float32" or any(key.endswith(tables) for key in in_file)


def _is_matrix(key, tensor):
    """Return True for a matrix in a block."""
    is_in_block = ".block." in key or "layers." in key
    is_weight = tensor.is_floating_point() and "embed" not in key and "bias" not in key
    return tensor.dim() == 2 and is_in_block and is_weight


def _quantise(path, kind):
    require(kind in QUANT_ALGOS, kind)
    stored = {}
    with cpu_kernels():
        for key, tensor in load_file(path).items():
            if _is_matrix(key, tensor):
                stored |= quantised(key.removesuffix(".weight"), tensor, kind)
            else:
                stored[key] = tensor
    save_file(stored, path)


def _scale(path):
    stored = {}
    layers = {}
    for key, tensor in load_file(path).items():
        is_table = key == "embed_tokens.weight"  # in GPT-OSS: old versions know no scales there
        is_bank = key.endswith("_proj.weight")
        if is_table or _is_matrix(key, tensor) or (is_bank and "layers." in key):
            layers[key.removesuffix(".weight")] = SimpleNamespace(weight=tensor.float())
        else:
            stored[key] = tensor
    save_file(stored | scaled_fp8(layers).tensors, path)


def _with_lora(strength, own, clip):
    """Return a clone with a LoRA on all matrices, also on the token table."""
    if not strength:
        return clip
    generator = torch.Generator().manual_seed(3)
    lora = {}
    keys = {}
    # The state dict has packed shapes.
    for key, tensor in own.cond_stage_model.named_parameters(remove_duplicate=False):
        if tensor.dim() == 2 and key.endswith(".weight"):
            layer = key.removesuffix(".weight")
            keys[layer] = key
            rows, columns = tensor.shape
            lora[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator)
            lora[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator)
    changed = clip.clone()
    changed.add_patches(comfy.lora.load_lora(lora, keys), 0.1 * strength)
    return changed


def _hook_on(clip, strength=1.0):
    key = next(iter(clip.cond_stage_model.stored))
    clip.patcher.add_hook_patches(hooks.WeightHook(), {key: ()}, strength)


@for_each(*CHANGED)
def check_changes(folder, name):
    """LoRAs with several strengths in turn, and encodings that end at an earlier layer.

    Some encoders compute CLIPSetLastLayer by skipping blocks.
    """
    pair = Pair(folder, name)
    prompt = pair.encoder.prompt(50)
    changed = _with_lora(0.7, pair.own, pair.own).encode_from_tokens(prompt)
    assert not torch.equal(pair.own.encode_from_tokens(prompt), changed)
    for strength in (0.7, 0, 0.3, 0.3, 0.7):
        assert pair.equal_texts(50, change=partial(_with_lora, strength, pair.own))
    message = refused(lambda: _hook_on(pair.streamed), "a hook changes 1 weights that stream")
    loader = "Load CLIP (Dual)" if "and" in name else "Load CLIP"
    assert message.endswith(f"or load this model with {loader}")
    _hook_on(pair.streamed, 0.0)  # one for the MODEL

    for layer in (-2, -1, None, -3):
        ending = on_clone(methodcaller("clip_layer", layer))
        assert pair.equal_texts(50, change=ending)


def _saved(clip, folder):
    """Return the tensors in the files of CLIPSave."""
    clip = clip.clone()
    clip.tokenizer = SimpleNamespace(state_dict=dict)
    save = nodes_model_merging.CLIPSave()
    save.output_dir = str(folder)
    try:
        save.save(clip, "saved")
    except ValueError as err:
        require("which then saves models weight by weight" not in str(err), str(err))
        raise
    paths = sorted(folder.iterdir())
    found = {f"{path.name} {key}": each for path in paths for key, each in load_file(path).items()}
    # Without values where no file has them.
    found.pop("saved_clip_l_00001_.safetensors text_projection.weight", None)
    return found


@for_each(*CHANGED)
def check_clips_are_saved_with_their_patches(folder, name):
    """CLIPSave without and with a LoRA, where it does not need all weights in memory."""
    pair = Pair(folder, name)
    for strength in (0, 0.5):
        with_lora = partial(_with_lora, strength, pair.own)
        theirs = _saved(with_lora(pair.own), pair.folder / f"own {strength}")
        ours = _saved(with_lora(pair.streamed), pair.folder / f"streamed {strength}")
        assert theirs.keys() == ours.keys()
        assert _equal(theirs, ours)


@for_each("gemma2", "gemma2 with a head")
def check_generated_texts(folder, name):
    require(hasattr(sd.CLIP, "generate"), "generated texts")
    pair = Pair(folder, name)
    for is_sampled in (False, True):
        given = {"max_length": 6, "do_sample": is_sampled, "seed": 5}
        prompt = pair.encoder.prompt(20)
        assert pair.own.generate(prompt, **given) == pair.streamed.generate(prompt, **given)
    assert pair.equal_texts(50)


@for_each(
    ("layerwise", 0, False), ("block swap", 2, False), ("resident", 4, False), ("RAM", 0, True)
)
def check_an_encoding_keeps_only_what_the_policy_asks_for(folder, policy, blocks, in_ram):
    pair = Pair(folder, "umt5", policy)
    weights = pair.weights
    assert pair.equal_texts(50, 90)
    assert weights.loaded_bytes - weights.outside_bytes == blocks * weights.buffer_bytes
    assert (weights.host_bytes > 0) == in_ram
    mm.unload_all_models()
    assert weights.loaded_bytes == weights.host_bytes == 0
    assert pair.equal_texts(50)
    network = weakref.ref(pair.streamed.cond_stage_model)
    del pair, weights
    mm.cleanup_models()
    gc.collect()
    assert network() is None


def _load(encoder, paths, limits=LIMITS, policy=LAYERWISE):
    files = EncoderFiles(paths=paths, kind=encoder.kind)
    return load_encoders(files, policy, limits, encoder.options)


def check_clips_of_another_loader_stream_with_their_patches(folder):
    """CLIPs from ComfyUI's loader, with and without a LoRA and an earlier last layer."""
    encoder = ENCODERS["clip-l and t5"]
    names = [str(path) for path in encoder.write(Path(mkdtemp(dir=folder)))]
    own = sd.load_clip(names, clip_type=encoder.type, model_options=encoder.options)
    own.clip_layer(-2)
    require(versions.loaded_clip(own.patcher), "files of a CLIP")
    changed = _with_lora(0.5, own, own)
    swapping = stream_clip(changed, POLICIES["block swap"](4), LIMITS)
    pairs = [(own, stream_clip(own, LAYERWISE, LIMITS)), (changed, swapping)]
    pairs.append((changed, stream_clip(swapping, OffloadPolicy.resident(), LIMITS)))
    prompt = encoder.prompt(50)
    for pair in pairs:
        assert torch.equal(*(clip.encode_from_tokens(prompt) for clip in pair))
    # A streaming CLIP's weights are used again.
    assert len({id(clip.cond_stage_model.weights) for _, clip in pairs}) == 2


def check_files_and_policies_that_do_not_fit_are_refused(folder):
    """Files that are too small, a wrong policy, a wrong file, and a cut file."""
    encoder = ENCODERS["clip-l and t5"]
    paths = encoder.write(Path(mkdtemp(dir=folder)))
    load = partial(_load, encoder, paths)
    too_small = "is too small to be worth streaming"
    refused(partial(load, {}), too_small, "load it with Load CLIP (Dual)")
    refused(partial(load, policy=OffloadPolicy.block_swap(99)), "blocks_to_swap is 99")
    other = folder / "lora.safetensors"
    save_file({"lora_unet.lora_up.weight": torch.zeros(2, 2)}, other)
    words = "lora.safetensors: has no weights of the text encoders"
    refused(partial(_load, encoder, (other, paths[1])), words)
    clip = load()
    clip.encode_from_tokens(encoder.prompt(50))
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole[: len(whole) // 2])
    encode = partial(clip.encode_from_tokens, encoder.prompt(50))
    refused(encode, "changed after it was opened", kind=OSError)
    assert not clip.cond_stage_model.weights.running
    refused(load, "is truncated")


def check_one_of_two_files_may_be_too_small_to_stream(folder):
    encoder = ENCODERS["clip-l and t5"]
    paths = encoder.write(Path(mkdtemp(dir=folder)))
    limits = {**LIMITS, "smallest_block": 55_000}  # between the blocks of T5 and of CLIP-L
    clip = _load(encoder, paths, limits)
    assert {name.split(".")[0] for name in clip.cond_stage_model.weights.blocks} == {"clip_l"}
    clips = (clip, encoder.load(paths))
    prompt = encoder.prompt(50)
    assert _equal(*(each.encode_from_tokens(prompt, return_dict=True) for each in clips))


def check_an_image_for_a_file_without_vision_is_refused(folder):
    encoder = ENCODERS["qwen2.5-vl"]
    (path,) = encoder.write(Path(mkdtemp(dir=folder)))
    save_file({key: each for key, each in load_file(path).items() if "visual" not in key}, path)
    with patch.object(encoders, "SMALLEST_BLOCK", 1000):
        clip = _load(encoder, (path,))
    text = encoder.prompt(50)
    image = encoder.prompt(50, torch.zeros(1, 56, 56, 3))
    own = encoder.load((path,)).encode_from_tokens(text)
    assert torch.equal(clip.encode_from_tokens(text), own)
    words = ("visual.", "choose a file of the whole encoder")
    refused(lambda: clip.encode_from_tokens(image), *words, kind=CheckpointFileError)


@for_each("model.diffusion_model.", "")
def check_the_parts_of_a_checkpoint(folder, prefix):
    """A file with a MODEL and a CLIP, or with a bare MODEL."""
    encoder = ENCODERS["umt5"]
    folder = Path(mkdtemp(dir=folder))
    stored = {prefix + WAN.key(key): each.half() for key, each in WAN.weights().items()}
    if prefix:
        (text,) = encoder.write(folder)
        start = "text_encoders.umt5xxl.transformer."
        stored |= {start + key: each for key, each in load_file(text).items()}
    path = folder / "checkpoint.safetensors"
    save_file(stored, path)
    thin = partial(_thin_umt5, comfy.text_encoders.wan.UMT5XXlModel)
    streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))
    with patch.object(comfy.text_encoders.wan, "UMT5XXlModel", thin):
        own, own_clip, own_vae, _ = sd.load_checkpoint_guess_config(str(path))
        read = partial(load_checkpoint, path, streaming, current_host())
        parts = read(LIMITS)
        # With a limit between the two, the MODEL streams and ComfyUI loads the CLIP.
        small = read({**LIMITS, "smallest_block": 100_000})
        message = refused(lambda: read({}))
    expected = sample(own, WAN)
    assert torch.equal(sample(parts.model, WAN), expected)
    with is_cut(path, parts.model, at=len(parts.model.model.weights.blocks) + 2):
        refused(lambda: sample(parts.model, WAN), path.name, kind=OSError)
    has_ended(partial(sample, family=WAN), parts.model, expected)
    if not prefix:
        assert parts.clip is None
        return
    assert "load it with Load Checkpoint" in message
    assert type(parts.vae).__name__ == "VAE"
    assert vars(parts.vae).keys() == vars(own_vae).keys()
    prompt = encoder.prompt(50)
    text = own_clip.encode_from_tokens(prompt)
    for each, streams in ((parts, True), (small, False)):
        assert torch.equal(each.clip.encode_from_tokens(prompt), text)
        assert hasattr(each.clip.patcher, "weights") == streams
    message = refused(lambda: _hook_on(parts.clip))
    assert message.endswith("or load this model with Load Checkpoint")
    message = refused(lambda: parts.model.clone(force_deepcopy=True))
    assert message.endswith("load the model with Load Checkpoint for that node")


def check_checkpoints_without_a_model_are_refused(folder):
    path = folder / "vae.safetensors"
    save_file({"decoder.conv1.weight": torch.zeros(4, 4, 3, 3, 3)}, path)
    streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))
    words = "not a diffusion model that this ComfyUI detects"
    refused(lambda: load_checkpoint(path, streaming, current_host(), LIMITS), path.name, words)


def _thin_umt5(own, *, model_options, **settings):
    return own(model_options={**model_options, "umt5xxl_model_config": T5}, **settings)
