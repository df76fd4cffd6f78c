"""Runs in ComfyUI's own Python: patches on streamed native models, compared with ComfyUI's.

`answers(folder)` returns one JSON value per case. `test_native_patches.py` checks the values.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import comfy.hooks
import comfy.ldm.wan.model
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sd
import comfy.utils
import native_families as families
import torch
import torch._dynamo
from comfy.ldm.modules.attention import attention_pytorch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_lora_extract, nodes_model_merging, nodes_torch_compile
from installed_pack import load_pack
from safetensors.torch import load_file, save, save_file

load_pack()
from native_loading import load_native  # noqa: E402

from wanstream.host import current_host  # noqa: E402
from wanstream.host.comfy import versions  # noqa: E402
from wanstream.host.comfy.native.stream_model import ModelStreamer  # noqa: E402
from wanstream.host.native_models import WEIGHT_DTYPES, ModelStreaming  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

STREAMER = ModelStreamer(current_host())
POLICY = OffloadPolicy.layerwise(1)
SWAP = OffloadPolicy.block_swap(2, prefetch_blocks=1)
LIMITS = {"smallest_block": 200_000, "smallest_model": 1000}
NUMBER_FORMATS = {"fp32": "default", "bf16": "bf16", "fp8": "fp8_e4m3fn"}
"""Loader weight type by the file's number format. "bf16" keeps bf16 weights, which the CPU casts to
compute."""


def stream_model(model: Any, policy: OffloadPolicy, **limits: int) -> Any:
    return STREAMER.stream(model, ModelStreaming(policy=policy), **limits)


class Side:
    """One model: files in every number format, loaded by ComfyUI and by us, and LoRAs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.family = folder, families.FAMILIES[name]
        with torch.inference_mode(False):
            for dtype in NUMBER_FORMATS:
                self.family.write(self.file(dtype), dtype)
        state = self.native("fp32").model.diffusion_model.state_dict()
        self.shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}

    def file(self, dtype: str) -> Path:
        return self.folder / f"{self.family.name}_{dtype}.safetensors"

    def native(self, dtype: str) -> Any:
        return families.native(self.file(dtype), self.family, weight_dtype=NUMBER_FORMATS[dtype])

    def streamed(self, dtype: str, policy: OffloadPolicy = POLICY, **limits: int) -> Any:
        # LoRAs are on layers outside the lists too.
        limits = {**LIMITS, "smallest_layer": 20_000, **limits}
        with families.given_configuration(self.family):
            return load_native(self.file(dtype), NUMBER_FORMATS[dtype], policy, **limits)

    def lora(self, kind: str, *, streamed: bool = False) -> Path:
        """Return a LoRA for everything, or only for layers that stream."""
        path = self.folder / f"{self.family.name}_{kind}_{streamed}.safetensors"
        shapes = self.shapes
        if streamed:
            layers = {
                key.removesuffix(".weight") for key, shape in shapes.items() if len(shape) == 2
            }
            layers = {layer for layer in layers if "blocks." in layer}
            shapes = {
                key: shape for key, shape in shapes.items() if key.rpartition(".")[0] in layers
            }
        if not path.exists():
            families.write_lora(kind, path, shapes)
        return path

    def sample(self, model: Any, **settings: Any) -> torch.Tensor:
        return families.sample(model, self.family, **{"steps": 2, **settings})


def _with_lora(model: Any, path: Path, strength: float = 1.0) -> Any:
    return comfy.sd.load_lora_for_models(model, None, load_file(path), strength, 0)[0]


@contextmanager
def counted_patches() -> Iterator[list[int]]:
    """Count the weights that get patches in the last value of the list."""
    counts, patched = [0], versions.patched_weight

    def counting(*args: Any, **settings: Any) -> torch.Tensor:
        counts[-1] += 1
        return patched(*args, **settings)

    with patch.object(versions, "patched_weight", counting):
        yield counts


def kind_case(side: Side, kind: str, dtype: str) -> object:
    """LoRAs of one kind in one number format, which ComfyUI adds while loading the weights."""
    lora = side.lora(kind)
    theirs = side.sample(_with_lora(side.native(dtype), lora))
    streamed = side.streamed(dtype)
    ours = side.sample(_with_lora(streamed, lora))
    return {
        "equal": torch.equal(ours, theirs),
        "effect": float((ours - side.sample(streamed)).abs().max()),
    }


def clones_case(side: Side) -> object:
    """One streamed model with a LoRA, without, with another strength, and again."""
    lora, native, ours = side.lora("kohya"), side.native("fp32"), side.streamed("fp32", SWAP)
    strengths = (1.0, None, 0.5, None, 1.0)
    pairs = [
        [
            model if strength is None else _with_lora(model, lora, strength)
            for model in (native, ours)
        ]
        for strength in strengths
    ]
    results = [[side.sample(model) for model in pair] for pair in pairs]
    (first, plain, *_), again = [pair[1] for pair in pairs], _with_lora(ours, lora)
    return {
        "equal": [torch.equal(*pair) for pair in results],
        "different": len({float(pair[0].sum()) for pair in results}),
        "is_clone": [plain.is_clone(first), first.is_clone(again), first.is_clone(native)],
        "same weights": [
            bool(one.clone_has_same_weights(other))
            for one, other in (
                (plain, plain.clone()),
                (first, first.clone()),
                (first, plain),
                (first, again),
            )
        ],
        "one engine": len({id(pair[1].model.weights.loaded_engine) for pair in pairs}),
    }


def arrival_case(side: Side) -> object:
    """LoRA additions to the blocks in RAM, without a function in a layer."""
    found: dict[str, Any] = {}
    lora = side.lora("lora", streamed=True)
    for dtype in NUMBER_FORMATS:
        policies = {"kept": replace(POLICY, source="pinned"), "resident": OffloadPolicy.resident()}
        for name, policy in policies.items():
            ours = _with_lora(side.streamed(dtype, policy), lora)
            with counted_patches() as counts:
                for _ in range(2):
                    side.sample(ours)
                    counts.append(0)
            functions = [getattr(each, "weight_function", None) for each in ours.model.modules()]
            found[f"{dtype} {name}"] = {"additions": counts, "functions": any(functions)}
        found[f"{dtype} matrices"] = len(ours.model.stored.keys() & ours.patches.keys())
    return found


def multigpu_case(side: Side) -> object:
    """Clones for further GPUs, which ComfyUI makes with a MODEL's loader."""
    if not hasattr(comfy.model_patcher.ModelPatcher, "deepclone_multigpu"):
        return {"skip_reason": "not in this ComfyUI"}
    native = side.native("fp32")
    patched = _with_lora(side.streamed("fp32"), side.lora("lora"))
    models = [patched, stream_model(_with_lora(native, side.lora("lora")), POLICY, **LIMITS)]
    clones = [model.deepclone_multigpu(new_load_device=torch.device("cpu")) for model in models]
    expected = side.sample(_with_lora(native, side.lora("lora")))
    return {
        "equal": [torch.equal(side.sample(each), expected) for each in (*clones, *models)],
        "own weights": len({id(each.model.weights) for each in (*clones, *models)}),
    }


def compute_dtype_case(side: Side) -> object:
    """Another dtype to compute with, as nodes set it."""
    results = []
    for model in (side.native("bf16"), side.streamed("bf16")):
        changed = model.clone()
        changed.set_model_compute_dtype(torch.bfloat16)
        results.append([side.sample(changed), side.sample(model)])
    (theirs, their_plain), (ours, plain) = results
    return {
        "equal": [torch.equal(ours, theirs), torch.equal(plain, their_plain)],
        "same": torch.equal(ours, plain),
    }


def wrapper_case(side: Side) -> object:
    """Other nodes' functions on streamed weights, and on one that does not stream."""
    results = []
    for model in (side.native("fp32"), side.streamed("fp32")):
        changed = model.clone()
        for key in ("blocks.1.ffn.0.weight", "blocks.1.ffn.0.bias", "text_embedding.0.weight"):
            changed.add_weight_wrapper(f"diffusion_model.{key}", lambda weight: weight * 1.5)
        results.append(side.sample(_with_lora(changed, side.lora("lora"))))
    return {"equal": torch.equal(*results)}


def foreign_lora_case(side: Side, other: Side) -> object:
    """A LoRA for another architecture: ComfyUI loads none of it."""
    lora = other.lora("lora")
    native, ours = (
        _with_lora(model, lora) for model in (side.native("fp32"), side.streamed("fp32"))
    )
    return {
        "patches": [len(native.patches), len(ours.patches)],
        "equal": torch.equal(*map(side.sample, (native, ours))),
    }


def _decorated(model: Any) -> tuple[Any, list[str]]:
    """Return a clone with every kind of addition to a MODEL, and a list of calls."""
    changed, calls = model.clone(), []
    extension = comfy.patcher_extension

    def called(name: str, result: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if name not in calls:
                calls.append(name)
            return result(*args, **settings)

        return call

    changed.set_model_attn2_patch(called("attn2", lambda given: given["x"] * 1.1))
    changed.set_model_unet_function_wrapper(
        called(
            "function",
            lambda apply, given: apply(given["input"], given["timestep"], **given["c"]) * 0.9,
        )
    )
    changed.set_model_sampler_post_cfg_function(
        called("post cfg", lambda given: given["denoised"] * 1.05)
    )
    network = model.model.diffusion_model
    changed.add_object_patch(
        "diffusion_model.unpatchify", MethodType(_halved(type(network).unpatchify), network)
    )
    for kind in (extension.WrappersMP.DIFFUSION_MODEL, extension.WrappersMP.SAMPLER_SAMPLE):
        changed.add_wrapper_with_key(
            kind,
            "test",
            called(kind, lambda executor, *args, **settings: executor(*args, **settings)),
        )
    changed.add_callback_with_key(extension.CallbacksMP.ON_PRE_RUN, "test", called("pre run"))
    changed.set_injections(
        "test", [extension.PatcherInjection(inject=called("inject"), eject=called("eject"))]
    )
    changed.set_attachments("test", "attached")
    changed.add_weight_wrapper(
        "diffusion_model.blocks.0.ffn.0.weight", called("weight", lambda weight: weight * 1.5)
    )
    return changed, calls


def _halved(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self, *args) * 0.5


def stream_model_case(side: Side) -> object:
    """Stream Model behind a loader and other nodes: from the file, a whole checkpoint, and RAM."""
    found: dict[str, Any] = {}
    checkpoint = side.folder / "checkpoint.safetensors"
    save_file(
        {
            f"model.diffusion_model.{key}": each
            for key, each in load_file(side.file("fp32")).items()
        },
        checkpoint,
    )
    loaders = {
        "file": lambda: side.native("fp32"),
        "fp8 file": lambda: side.native("fp8"),
        "checkpoint": lambda: comfy.sd.load_checkpoint_guess_config(
            str(checkpoint), output_vae=False, output_clip=False
        )[0],
        "memory": lambda: _of_unknown_file(side.native("fp32")),
    }
    for name, load in loaders.items():
        given = load()
        plain = side.sample(given)
        dressed, calls = _decorated(
            _with_lora(given, side.lora("lora", streamed=name == "fp8 file"))
        )
        theirs = side.sample(dressed)
        their_calls = [*calls]
        calls.clear()
        with Logged("wanstream.memory") as log:
            ours = stream_model(dressed, POLICY, **LIMITS)
        samples = side.sample(ours)
        again = stream_model(ours, SWAP, **LIMITS)
        other = stream_model(given, POLICY, **LIMITS)
        found[name] = {
            "equal": torch.equal(samples, theirs),
            "calls": [their_calls, calls],
            "attached": ours.get_attachment("test"),
            "bound": ours.object_patches["diffusion_model.unpatchify"].__self__
            is ours.model.diffusion_model,
            "again": [
                torch.equal(side.sample(again), samples),
                again.policy == SWAP,
                again.model is ours.model,
            ],
            "other": [torch.equal(side.sample(other), plain), other.model is ours.model],
            "given": [
                torch.equal(side.sample(given), plain),
                torch.equal(side.sample(dressed), side.sample(dressed)),
            ],
            "ours after theirs": torch.equal(side.sample(ours), samples),
            "log": log.lines,
        }
    return found


def _of_unknown_file(model: Any) -> Any:
    model.cached_patcher_init = None
    return model


class Logged:
    """Lines logged in the body of a `with`."""

    def __init__(self, name: str) -> None:
        self.lines: list[str] = []
        self._log, self._handler = logging.getLogger(name), logging.Handler()
        self._handler.emit = lambda record: self.lines.append(record.getMessage())

    def __enter__(self) -> Logged:
        self._level = self._log.level
        self._log.setLevel(logging.INFO)
        self._log.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self._handler)
        self._log.setLevel(self._level)


def merge_case(side: Side) -> object:
    """Model merging nodes on pairs of native and streamed MODELs, the second with a LoRA."""
    nodes = nodes_model_merging
    merging = {
        "simple": lambda one, two: nodes.ModelMergeSimple().merge(one, two, 0.3),
        "blocks": lambda one, two: nodes.ModelMergeBlocks().merge(
            one, two, **{"": 0.7, "blocks.1": 0.2}
        ),
        "subtract": lambda one, two: nodes.ModelSubtract().merge(one, two, 0.5),
        "add": lambda one, two: nodes.ModelAdd().merge(one, two),
    }

    def matrices(one: Any, two: Any) -> tuple[Any]:
        """Merge as the nodes do, but only streamed matrices.

        ComfyUI rounds other weights to fp8 only if they are loaded.
        """
        merged = one.clone()
        for key, weight in two.get_key_patches("diffusion_model.blocks.1.ffn").items():
            merged.add_patches({key: weight}, 0.7, 0.3)
        return (merged,)

    found: dict[str, Any] = {}
    for dtype, merges in {"fp32": merging, "fp8": {"matrices": matrices}}.items():
        lora = side.lora("lora", streamed=dtype == "fp8")
        models = [
            (load(dtype), _with_lora(load(dtype), lora)) for load in (side.native, side.streamed)
        ]
        for name, merge in merges.items():
            results = []
            for one, two in ((0, 0), (1, 0), (0, 1), (1, 1)):
                if name in ("simple", "matrices") or one == two:
                    (merged,) = merge(models[one][0], models[two][1])
                    results.append(side.sample(merged))
            found[f"{name} {dtype}"] = [torch.equal(result, results[0]) for result in results[1:]]
    return found


def cast_merge_case(side: Side) -> object:
    """Weights that ComfyUI rounds while loading a file are rounded for merging as well."""
    path = side.file("fp32")
    models = [
        families.native(path, side.family, weight_dtype="fp8_e4m3fn"),
        load_native(path, "fp8_e4m3fn", POLICY, **LIMITS),
    ]
    key, network = "diffusion_model.blocks.0.ffn.0.weight", side.native("fp32")
    return {
        "dtypes": [str(model.get_key_patches()[key][0][0].dtype) for model in models],
        "read": sum(
            models[1].get_key_patches()[key][0][0] is not view
            for key, view in models[1].model.stored.items()
        ),
        "equal": torch.equal(
            *(
                side.sample(nodes_model_merging.ModelAdd().merge(network, each)[0])
                for each in models
            )
        ),
    }


def save_case(side: Side) -> object:
    """Save Model for models without and with a LoRA, byte by byte.

    The reason where ComfyUI is too old for it.
    """
    saves_lazily = hasattr(comfy.model_patcher.ModelPatcher, "state_dict_for_saving")
    found: dict[str, Any] = {}
    for kind, dtype in (("lora", "fp32"), ("diff", "fp32"), ("lora", "fp8"), (None, "bf16")):
        files = []
        for load in (side.native, side.streamed):
            model = load(dtype)
            if kind is not None:
                model = _with_lora(model, side.lora(kind, streamed=dtype != "fp32"))
            side.sample(model, steps=1)
            path = side.folder / f"saved_{load.__name__}.safetensors"
            if not saves_lazily and load == side.streamed:
                return _refused(partial(comfy.sd.save_checkpoint, str(path), model))
            comfy.sd.save_checkpoint(str(path), model, metadata={"of": "test"})
            side.sample(model, steps=1)
            files.append(path.read_bytes())
        found[f"{kind} {dtype}"] = [len(files[0]) > 1e6, files[0] == files[1]]
    return found


def _roads(side: Side, dtype: str, folder: Path) -> dict[str, Callable[[Any], object]]:
    """Everything that reads a streamed MODEL's weights."""

    def merged(model: Any) -> object:
        (both,) = nodes_model_merging.ModelMergeSimple().merge(side.native(dtype), model, 0.5)
        return side.sample(both, steps=1)

    def patched(model: Any) -> object:
        changed = _with_lora(model, side.lora("lora", streamed=True))
        return [
            changed.patch_weight_to_device(key, return_weight=True) + 0 for key in changed.patches
        ]

    def extracted(model: Any) -> object:
        kind = nodes_lora_extract.LORAType.FULL_DIFF
        return nodes_lora_extract.calc_lora_model(
            model, 4, "diffusion_model.", "", {}, kind, bias_diff=False
        )

    def state(model: Any) -> list[torch.Tensor]:
        # Without quantised weights, because some ComfyUI versions cannot copy them.
        return [each for key, each in model.model_state_dict().items() if key in model.model.stored]

    return {
        "sample": lambda model: side.sample(model, steps=1),
        "sample a clone": lambda model: side.sample(model.clone(), steps=1),
        "save": lambda model: comfy.sd.save_checkpoint(str(folder / "saved.safetensors"), model),
        "merge": merged,
        "patch": patched,
        "extract": extracted,
        "state dict": lambda model: [each.clone() for each in state(model)],
        "save the state dict": lambda model: save(
            {str(at): each for at, each in enumerate(state(model))}
        ),
        "numpy": lambda model: [each.view(torch.uint8).numpy() for each in state(model)],
        "deep copy": lambda model: [each + 0 for each in copy.deepcopy(state(model))],
        "key patches": lambda model: [
            patches[0][0].clone() for patches in model.get_key_patches().values()
        ],
    }


def _change(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind in {"cut", "empty"}:
        os.truncate(path, len(content) // 2 if kind == "cut" else 0)
        return
    path.unlink() if kind in {"replaced", "gone"} else None
    if kind != "gone":
        path.write_bytes(content[:1000] + bytes(len(content) - 1000))
        os.utime(path, ns=(1, 1))


def changed_file_case(side: Side) -> object:
    """Outcomes when a file changes after opening, for everything that reads weights."""
    found: dict[str, dict[str, str]] = {}
    changes = {
        "fp32": ("cut", "empty", "rewritten", "replaced", "gone"),
        "fp8": ("cut", "replaced"),
    }
    for dtype, kinds in changes.items():
        for kind in kinds:
            path = side.folder / f"changed_{dtype}_{kind}.safetensors"
            outcomes = found[f"{dtype} {kind}"] = {}
            for road, read in _roads(side, dtype, side.folder).items():
                path.write_bytes(side.file(dtype).read_bytes())
                with families.given_configuration(side.family):
                    model = load_native(path, NUMBER_FORMATS[dtype], POLICY, **LIMITS)
                _change(path, kind)
                try:
                    read(model)
                    outcomes[road] = "no error"
                except Exception as err:  # noqa: BLE001 - any exception is an outcome for the test
                    outcomes[road] = f"{type(err).__name__}: {err}"
                model.detach()
            path.unlink(missing_ok=True)
    return found


def extract_case(side: Side) -> object:
    """Extract and Save Lora for the difference between a model with a LoRA and without.

    The reason where it is refused.
    """
    if not hasattr(comfy.model_patcher.ModelPatcher, "state_dict_for_saving"):
        calc = nodes_lora_extract.calc_lora_model
        return _refused(
            lambda: calc(
                side.streamed("fp32"), 4, "", "", {}, nodes_lora_extract.LORAType.FULL_DIFF
            )
        )
    results = []
    for load in (side.native, side.streamed):
        model = load("fp32")
        (difference,) = nodes_model_merging.ModelSubtract().merge(
            _with_lora(model, side.lora("lora")), model, 1.0
        )
        output: dict[str, torch.Tensor] = {}
        kind = nodes_lora_extract.LORAType.FULL_DIFF
        prefix = "diffusion_model."
        nodes_lora_extract.calc_lora_model(
            difference, 4, prefix, prefix, output, kind, bias_diff=True
        )
        results.append(output)
    theirs, ours = results
    return {
        "keys": theirs.keys() == ours.keys(),
        "count": len(ours),
        "equal": all(torch.equal(theirs[key], ours[key]) for key in theirs),
        "largest": max(float(each.abs().max()) for each in ours.values()),
    }


def hooks_case(side: Side) -> object:
    """Condition hooks: hooks without weights work, and a LoRA as a hook is refused."""
    found: dict[str, Any] = {}
    lora = load_file(side.lora("lora"))
    hooks = {
        "transformer options": comfy.hooks.TransformerOptionsHook(
            {"patches": {"attn2_patch": [lambda given: given["x"] * 1.2]}}
        ),
        "weights": comfy.hooks.create_hook_lora(lora, 1.0, 0.0).hooks[0],
        "weights of another model": comfy.hooks.create_hook_lora(
            {"unknown": lora.popitem()[1]}, 1.0, 0.0
        ).hooks[0],
    }
    for name, hook in hooks.items():
        group = comfy.hooks.HookGroup()
        group.add(hook)
        keyframes = comfy.hooks.HookKeyframeGroup()
        keyframes.add(comfy.hooks.HookKeyframe(strength=0.5, start_percent=0.3))
        group.set_keyframes_on_hooks(keyframes)
        conditions = side.family.conditioning
        changed = [
            [(text, {**values, "hooks": group}) for text, values in each] for each in conditions()
        ]
        with patch.object(families.Family, "conditioning", lambda *_, changed=changed: changed):
            results = []
            for model in (side.native("fp32"), side.streamed("fp32")):
                try:
                    results.append(side.sample(model))
                except ValueError as err:
                    results.append(str(err))
        theirs, ours = results
        found[name] = ours if isinstance(ours, str) else torch.equal(ours, theirs)
        found[f"{name} change"] = not torch.equal(theirs, side.sample(side.native("fp32")))
    return found


# ComfyUI's attention for a CPU is many graphs, and their number depends on the free memory.
@patch.object(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
def compile_case(side: Side) -> object:
    """Compiled blocks, by ComfyUI's wrapper and by object patches, and compiled whole models."""
    graphs: list[int] = []

    def backend(graph: Any, _: object) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def by_wrapper(model: Any, *keys: str) -> Any:
        changed = model.clone()
        set_torch_compile_wrapper(
            changed, backend=backend, options={"guard_filter_fn": unguarded}, keys=[*keys]
        )
        return changed

    def by_patches(model: Any, *keys: str) -> Any:
        changed = model.clone()
        for key in keys:
            layer = changed.get_model_object(key)
            changed.add_object_patch(
                key, torch.compile(layer, backend=backend, options={"guard_filter_fn": unguarded})
            )
        return changed

    # ComfyUI 0.3.64 has no filter.
    unguarded = getattr(
        nodes_torch_compile, "skip_torch_compile_dict", lambda entries: [True] * len(entries)
    )
    native, streamed, lora = (
        side.native("fp32"),
        side.streamed("fp32", smallest_layer=10**9),
        side.lora("diff"),
    )
    blocks = [f"diffusion_model.blocks.{i}" for i in (0, 2)]  # enough to share graphs
    plain, changed = side.sample(native), side.sample(_with_lora(native, lora))
    found: dict[str, Any] = {}
    for name, compiled in {"wrapper": by_wrapper, "object patches": by_patches}.items():
        counts = []
        models = [(model, _with_lora(model, lora)) for model in (native, streamed)]
        pairs = [[compiled(model, *blocks) for model in pair] for pair in models]
        for one, _ in pairs:
            torch._dynamo.reset()
            graphs.clear()
            first = side.sample(one)
            counts.append(len(graphs))
        ours, ours_changed = pairs[1]
        results = [first, side.sample(ours), side.sample(streamed), side.sample(ours)]
        session = ours.model.runs.last.session
        found[name] = {
            "equal": [torch.equal(result, plain) for result in results],
            "with a LoRA": torch.equal(side.sample(ours_changed), changed),
            "graphs": counts,
            "visits": [session.visits, session.fetches, session.recompiled],
            "whole": _refused(
                lambda compiled=compiled: side.sample(compiled(streamed, "diffusion_model"))
            ),
        }
    (node,) = nodes_torch_compile.TorchCompileModel.execute(streamed, "inductor").args
    found["node"] = _refused(lambda: side.sample(node))
    found["stream model behind"] = [
        _refused(
            lambda compiled=compiled: stream_model(compiled(native, *blocks), POLICY, **LIMITS)
        )
        for compiled in (by_wrapper, by_patches)
    ]
    return found


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as err:
        return f"{type(err).__name__}: {err}"
    return "not refused"


def refused_case(side: Side) -> object:
    """Models refused by Stream Model, and a node that needs all weights."""
    small, bare, quantised, dynamic = (_of_unknown_file(side.native("fp32")) for _ in range(4))
    bare.model.diffusion_model.blocks = torch.nn.Sequential(*bare.model.diffusion_model.blocks)
    weight = quantised.model.diffusion_model.blocks[0].ffn[0]
    weight.weight = torch.nn.Parameter(_Quantised(weight.weight.detach()), requires_grad=False)
    dynamic.is_dynamic = lambda: True
    return {
        "small": _refused(lambda: stream_model(small, POLICY)),
        "small file": _refused(lambda: stream_model(side.native("fp32"), POLICY)),
        "no lists": _refused(lambda: stream_model(bare, POLICY, **LIMITS)),
        "quantised": _refused(lambda: stream_model(quantised, POLICY, **LIMITS)),
        "dynamic": _refused(lambda: stream_model(dynamic, POLICY, **LIMITS)),
        "force_patch_weights": _refused(
            lambda: comfy.model_management.load_models_gpu(
                [side.streamed("fp32")], force_patch_weights=True
            )
        ),
    }


class _Quantised(torch.Tensor):
    """Another pack's tensor."""


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case. ComfyUI runs nodes in inference mode as well."""
    torch.set_num_threads(1)
    options = {**families.WEIGHT_DTYPES, "bf16": {"dtype": torch.bfloat16}}
    with (
        patch.dict(WEIGHT_DTYPES, {"bf16": torch.bfloat16}),
        patch.object(families, "WEIGHT_DTYPES", options),
    ):
        wan, flux = Side(Path(folder), "wan_t2v"), Side(Path(folder), "flux")
        cases: dict[str, Callable[[], object]] = {
            **{
                f"{kind} {side.family.name} {dtype}": partial(kind_case, side, kind, dtype)
                for side in (wan, flux)
                for kind in families.LORAS
                for dtype in NUMBER_FORMATS
                if (
                    kind in ("lora", "offset") or dtype == "fp32"
                    if side is flux
                    else kind != "offset"
                )
            },
            **{
                name.removesuffix("_case"): partial(case, wan)
                for name, case in globals().items()
                if name.endswith("_case") and list(inspect.signature(case).parameters) == ["side"]
            },
            "foreign lora": partial(foreign_lora_case, wan, flux),
        }
        return families.results_of(cases)
