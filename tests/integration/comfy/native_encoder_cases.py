"""Runs in ComfyUI's Python: streamed text encoders and checkpoints against ComfyUI's own loaders.

`answers(folder)` returns one JSON value per case. `test_native_encoders.py` checks the values.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.hooks
import comfy.lora
import comfy.model_management as mm
import comfy.sd
import comfy.text_encoders.wan
import torch
from comfy_extras import nodes_model_merging
from installed_pack import load_pack
from native_families import FAMILIES, results_of, sample
from safetensors.torch import load_file, save_file

load_pack()
from tiny_encoders import ENCODERS, T5, Encoder, Prompt, thin_encoders  # noqa: E402

from wanstream.host import current_host  # noqa: E402
from wanstream.host.comfy.native import encoders  # noqa: E402
from wanstream.host.comfy.native.encoders import load_encoders, stream_clip  # noqa: E402
from wanstream.host.comfy.native.load import load_checkpoint  # noqa: E402
from wanstream.host.native_models import EncoderFiles, ModelStreaming  # noqa: E402
from wanstream.offload.engine.run import EngineRun  # noqa: E402
from wanstream.offload.formats import CheckpointFileError  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

LIMITS = {"smallest_block": 10_000, "smallest_model": 1_000}
CHANGED = ("umt5", "clip-l and t5", "qwen2.5-vl")
STORED = ("clip-l and llama", "gpt-oss", "gemma4 and projection")
ANY_LAYER = {**LIMITS, "smallest_layer": 1}
"""Limits that would make blocks of layers outside the lists, if encoders had such blocks."""
POLICIES = {
    "layerwise": OffloadPolicy.layerwise(1),
    "block swap": OffloadPolicy.block_swap(2),
    "resident": OffloadPolicy.resident(),
    "RAM": OffloadPolicy.layerwise(1, source="pinned"),
}


class Pair:
    """ComfyUI's CLIP from files, and a streamed one."""

    def __init__(
        self, encoder: Encoder, paths: tuple[Path, ...], policy: str = "layerwise"
    ) -> None:
        self.own = encoder.load(paths)
        files = EncoderFiles(paths=paths, kind=encoder.kind)
        self.streamed = load_encoders(files, POLICIES[policy], ANY_LAYER, encoder.options)
        self.weights = self.streamed.cond_stage_model.weights

    def equal(self, prompt: Prompt, change: Callable[[Any], Any] = lambda clip: clip) -> bool:
        own, streamed = (
            # A copy: some encoders take the images out.
            change(clip).encode_from_tokens(copy.deepcopy(prompt), return_dict=True)
            for clip in (self.own, self.streamed)
        )
        return _equal(own, streamed)


def _equal(one: Any, other: Any) -> bool:
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        assert value.isfinite().all()
        yield value
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from _tensors(value[name])


def encoded(encoder: Encoder, folder: Path) -> dict[str, Any]:
    """Prompts in two lengths, each twice, and an image."""
    pair = Pair(encoder, encoder.write(folder))
    peaks: list[int] = []
    fetched: list[int] = []
    leave = EngineRun.__exit__

    def counting(run: EngineRun, *error: Any) -> None:
        peaks.append(pair.weights.loaded_bytes - pair.weights.outside_bytes)
        fetched.extend(fetch.block.block for fetch in run.fetched)
        leave(run, *error)

    with patch.object(EngineRun, "__exit__", counting):
        equal = [pair.equal(encoder.prompt(length)) for length in (50, 90, 50)]
        per_prompt = len(fetched) / 3
        if encoder.sees:
            image = torch.rand(1, 336, 336, 3, generator=torch.Generator().manual_seed(1))
            equal += [pair.equal(encoder.prompt(60, image)) for _ in range(2)]
    return {
        "equal": equal,
        "blocks": len(pair.weights.blocks),
        "fetched": per_prompt,
        "buffers": max(peaks) / pair.weights.buffer_bytes,
        "kept": [
            pair.weights.loaded_bytes - pair.weights.outside_bytes,
            pair.weights.host_bytes,
        ],
        "outside": pair.weights.outside_bytes / pair.weights.buffer_bytes,
    }


def stored_as(form: str, encoder: Encoder, folder: Path) -> list[bool]:
    """Texts without and with a LoRA, and whether the token table stays in the file."""
    if form == "scaled fp8":
        paths = encoder.write(folder)
        for path in paths:
            _scale(path)
    else:
        paths = encoder.write(folder, getattr(torch, form))
    pair = Pair(encoder, paths)
    in_file = pair.streamed.cond_stage_model.in_file
    return [
        *(pair.equal(encoder.prompt(length)) for length in (50, 90)),
        pair.equal(encoder.prompt(50), partial(_with_lora, 0.5, pair.own)),
        any(key.endswith(("shared.weight", "embed_tokens.weight")) for key in in_file),
    ]


def _scale(path: Path) -> None:
    stored = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for key, tensor in load_file(path).items():
        is_table = key == "embed_tokens.weight"  # in GPT-OSS: old versions know no scales there
        is_matrix = tensor.dim() == 2 or key.endswith("_proj.weight")  # an expert bank
        is_matrix = is_matrix and tensor.is_floating_point() and "embed" not in key
        if is_table or (is_matrix and "bias" not in key and (".block." in key or "layers." in key)):
            scale = tensor.float().abs().amax() / 400
            stored[key] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            stored[f"{key.removesuffix('weight')}scale_weight"] = scale
        else:
            stored[key] = tensor
    save_file(stored, path)


def _with_lora(strength: float, own: Any, clip: Any) -> Any:
    """Return a clone with a LoRA on all matrices, also on the token table."""
    if not strength:
        return clip
    generator = torch.Generator().manual_seed(3)
    lora = {}
    keys = {}
    for key, tensor in own.cond_stage_model.state_dict().items():
        if tensor.dim() == 2 and key.endswith(".weight"):
            layer = key.removesuffix(".weight")
            keys[layer] = key
            rows, columns = tensor.shape
            lora[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator)
            lora[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator)
    changed = clip.clone()
    changed.add_patches(comfy.lora.load_lora(lora, keys), 0.1 * strength)
    return changed


def patched(encoder: Encoder, folder: Path) -> dict[str, Any]:
    """LoRAs with several strengths in turn, and none."""
    pair = Pair(encoder, encoder.write(folder))
    prompt = encoder.prompt(50)
    plain = pair.own.encode_from_tokens(prompt)
    changed = _with_lora(0.7, pair.own, pair.own).encode_from_tokens(prompt)
    return {
        "equal": [
            pair.equal(prompt, partial(_with_lora, strength, pair.own))
            for strength in (0.7, 0, 0.3, 0.3, 0.7)
        ],
        "differs": not torch.equal(plain, changed),
        "hook": _refused_hook(pair.streamed),
        "hook for the MODEL": _refused_hook(pair.streamed, 0.0),
    }


def _refused_hook(clip: Any, strength: float = 1.0) -> str:
    key = next(iter(clip.cond_stage_model.stored))
    try:
        clip.patcher.add_hook_patches(comfy.hooks.WeightHook(), {key: ()}, strength)
    except ValueError as err:
        return str(err)
    return "not refused"


def stopped_early(encoder: Encoder, folder: Path) -> list[bool]:
    """CLIPSetLastLayer: some encoders compute it by skipping blocks."""
    pair = Pair(encoder, encoder.write(folder))

    def ending_at(layer: int | None, clip: Any) -> Any:
        changed = clip.clone()
        changed.clip_layer(layer)
        return changed

    return [
        pair.equal(encoder.prompt(50), partial(ending_at, layer)) for layer in (-2, -1, None, -3)
    ]


def saved(encoder: Encoder, folder: Path) -> Any:
    """CLIPSave without and with a LoRA: tensors in the files. The reason where it is refused."""
    pair = Pair(encoder, encoder.write(folder))
    found = []
    for strength in (0, 0.5):
        files: list[dict[str, torch.Tensor]] = []
        for name, plain in (("own", pair.own), ("streamed", pair.streamed)):
            clip = _with_lora(strength, pair.own, plain).clone()
            clip.tokenizer = SimpleNamespace(state_dict=dict)
            save = nodes_model_merging.CLIPSave()
            save.output_dir = str(folder / f"{name} {strength}")
            try:
                save.save(clip, "saved")
            except ValueError as err:
                return str(err)
            files.append({})
            for path in sorted(Path(save.output_dir).iterdir()):
                files[-1] |= {f"{path.name} {key}": each for key, each in load_file(path).items()}
        for tensors in files:  # without values where no file has them
            tensors.pop("saved_clip_l_00001_.safetensors text_projection.weight", None)
        found.append(files[0].keys() == files[1].keys() and _equal(*files))
    return found


def generated(encoder: Encoder, folder: Path) -> dict[str, Any]:
    if not hasattr(comfy.sd.CLIP, "generate"):
        return {"skip_reason": "this ComfyUI generates no text"}
    pair = Pair(encoder, encoder.write(folder))
    own, streamed = (
        [
            clip.generate(encoder.prompt(20), max_length=6, do_sample=sampled, seed=5)
            for sampled in (False, True)
        ]
        for clip in (pair.own, pair.streamed)
    )
    return {"own": own, "streamed": streamed, "after": pair.equal(encoder.prompt(50))}


def under(policy: str, encoder: Encoder, folder: Path) -> dict[str, Any]:
    """Encodings, unloading, and encodings again."""
    pair = Pair(encoder, encoder.write(folder), policy)
    weights = pair.weights
    equal = [pair.equal(encoder.prompt(length)) for length in (50, 90)]
    device = (weights.loaded_bytes - weights.outside_bytes) / weights.buffer_bytes
    kept = [device, weights.host_bytes > 0]
    mm.unload_all_models()
    unloaded = [weights.loaded_bytes, weights.host_bytes]
    equal.append(pair.equal(encoder.prompt(50)))
    network = weakref.ref(pair.streamed.cond_stage_model)
    del pair, weights
    mm.cleanup_models()
    gc.collect()
    return {"equal": equal, "kept": kept, "unloaded": unloaded, "freed": network() is None}


def stream_clips(encoder: Encoder, folder: Path) -> dict[str, Any]:
    """CLIPs from ComfyUI's loader, with and without a LoRA and an earlier last layer."""
    paths = encoder.write(folder)
    names = [str(path) for path in paths]
    own = comfy.sd.load_clip(names, clip_type=encoder.type, model_options=encoder.options)
    own.clip_layer(-2)
    changed = _with_lora(0.5, own, own)
    try:
        streamed = stream_clip(own, POLICIES["layerwise"], LIMITS)
    except ValueError as err:
        return {"skip_reason": str(err)}
    pairs = [(own, streamed), (changed, stream_clip(changed, POLICIES["block swap"], LIMITS))]
    pairs.append((changed, stream_clip(pairs[-1][1], POLICIES["resident"], LIMITS)))
    prompt = encoder.prompt(50)
    return {
        "equal": [
            torch.equal(*(clip.encode_from_tokens(prompt) for clip in pair)) for pair in pairs
        ],
        "weights": len({id(clip.cond_stage_model.weights) for _, clip in pairs}),
    }


def refusals(encoder: Encoder, folder: Path) -> dict[str, str]:
    """Errors: two files that are too small, a wrong policy, a wrong file, and a cut file."""
    paths = encoder.write(folder)
    files = EncoderFiles(paths=paths, kind=encoder.kind)
    found: dict[str, str] = {}

    def refuse(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (ValueError, OSError) as err:
            found[name] = str(err)

    load = partial(load_encoders, files, POLICIES["layerwise"])
    refuse("small", lambda: load({}, encoder.options))
    refuse(
        "policy",
        lambda: load_encoders(files, OffloadPolicy.block_swap(99), LIMITS, encoder.options),
    )
    other = folder / "lora.safetensors"
    save_file({"lora_unet.lora_up.weight": torch.zeros(2, 2)}, other)
    wrong = EncoderFiles(paths=(other, paths[1]), kind=encoder.kind)
    refuse("wrong", lambda: load_encoders(wrong, POLICIES["layerwise"], LIMITS, encoder.options))
    clip = load(LIMITS, encoder.options)
    clip.encode_from_tokens(encoder.prompt(50))
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole[: len(whole) // 2])
    refuse("cut while it streams", lambda: clip.encode_from_tokens(encoder.prompt(50)))
    found["running"] = str(clip.cond_stage_model.weights.running)
    refuse("cut", lambda: load(LIMITS, encoder.options))
    return found


def without_vision(encoder: Encoder, folder: Path) -> dict[str, Any]:
    """A text and an image for a file without the vision part."""
    (path,) = encoder.write(folder)
    save_file({key: each for key, each in load_file(path).items() if "visual" not in key}, path)
    files = EncoderFiles(paths=(path,), kind=encoder.kind)
    with patch.object(encoders, "SMALLEST_BLOCK", 1000):
        clip = load_encoders(files, POLICIES["layerwise"], LIMITS, encoder.options)
    text = encoder.prompt(50)
    own = encoder.load((path,)).encode_from_tokens(text)
    found = {"equal": torch.equal(clip.encode_from_tokens(text), own), "image": ""}
    try:
        clip.encode_from_tokens(encoder.prompt(50, torch.zeros(1, 56, 56, 3)))
    except CheckpointFileError as err:
        found["image"] = str(err)
    return found


def checkpoint(folder: Path, prefix: str) -> dict[str, Any]:
    """A file with a MODEL and a CLIP, or with a bare MODEL."""
    family = FAMILIES["wan_t2v"]
    encoder = ENCODERS["umt5"]
    stored = {prefix + family.key(key): each.half() for key, each in family.weights().items()}
    if prefix:
        (text,) = encoder.write(folder)
        start = "text_encoders.umt5xxl.transformer."
        stored |= {start + key: each for key, each in load_file(text).items()}
    path = folder / "checkpoint.safetensors"
    save_file(stored, path)
    thin = partial(_thin_umt5, comfy.text_encoders.wan.UMT5XXlModel)
    with patch.object(comfy.text_encoders.wan, "UMT5XXlModel", thin):
        own, own_clip, own_vae, _ = comfy.sd.load_checkpoint_guess_config(str(path))
        streaming = ModelStreaming(policy=OffloadPolicy.layerwise(1))
        read = partial(load_checkpoint, path, streaming, current_host())
        parts = read(LIMITS)
        found = {
            "model": torch.equal(sample(parts.model, family), sample(own, family)),
            "vae": [type(parts.vae).__name__, vars(parts.vae).keys() == vars(own_vae).keys()],
            "clip": parts.clip is None,
        }
        if parts.clip is not None:
            prompt = encoder.prompt(50)
            texts = [clip.encode_from_tokens(prompt) for clip in (own_clip, parts.clip)]
            # With a limit between the two, the MODEL streams and ComfyUI loads the CLIP.
            small = read({**LIMITS, "smallest_block": 100_000})
            texts.append(small.clip.encode_from_tokens(prompt))
            found["clip"] = [torch.equal(texts[0], text) for text in texts[1:]]
            found["streams"] = [hasattr(each.clip.patcher, "weights") for each in (parts, small)]
            found["hook"] = _refused_hook(parts.clip)
        refused = {
            "small": partial(read, {}),
            "copy": partial(parts.model.clone, force_deepcopy=True),
        }
        for name, act in refused.items():
            try:
                act()
            except ValueError as err:
                found[name] = str(err)
    return found


def _thin_umt5(own: Callable[..., Any], *, model_options: Any, **settings: Any) -> Any:
    return own(model_options={**model_options, "umt5xxl_model_config": T5}, **settings)


def answers(folder: str) -> dict[str, Any]:
    """Return every case's value."""
    cases: dict[str, Callable[[Path], Any]] = {}
    for name, encoder in ENCODERS.items():
        cases[name] = partial(encoded, encoder)
    for name in ENCODERS.keys() & {*CHANGED, *STORED}:
        for form in ("float32", "bfloat16", "scaled fp8"):
            cases[f"{name}, {form}"] = partial(stored_as, form, ENCODERS[name])
    for name in CHANGED:
        cases[f"{name}, LoRA"] = partial(patched, ENCODERS[name])
        cases[f"{name}, layers"] = partial(stopped_early, ENCODERS[name])
        cases[f"{name}, saved"] = partial(saved, ENCODERS[name])
    for name in ("gemma2", "gemma2 with a head"):
        cases[f"{name}, generated"] = partial(generated, ENCODERS[name])
    for policy in POLICIES:
        cases[f"policy {policy}"] = partial(under, policy, ENCODERS["umt5"])
    cases["stream clips"] = partial(stream_clips, ENCODERS["clip-l and t5"])
    cases["without vision"] = partial(without_vision, ENCODERS["qwen2.5-vl"])
    cases["refusals"] = partial(refusals, ENCODERS["clip-l and t5"])
    for name, prefix in (("checkpoint", "model.diffusion_model."), ("bare checkpoint", "")):
        cases[name] = partial(checkpoint, prefix=prefix)
    each = {name: partial(_in_own_folder, case, Path(folder)) for name, case in cases.items()}
    with torch.inference_mode(), thin_encoders():
        return results_of(each)


def _in_own_folder(case: Callable[[Path], Any], folder: Path) -> Any:
    with TemporaryDirectory(dir=folder) as made:
        return case(Path(made))
