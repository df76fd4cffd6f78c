"""Runs in ComfyUI's own Python: changes by other packs to a MODEL, to compare its runs.

`PATCHES` has functions that return a patched MODEL clone. Each call gives the patch its own state.
"""

import inspect
from functools import wraps
from importlib import import_module
from operator import methodcaller

import torch
from comfy import controlnet, model_management, model_patcher, patcher_extension

WrappersMP = patcher_extension.WrappersMP


def node_results(node, **inputs):
    """Return a ComfyUI node's results, called only with inputs in this version.

    The set of V3 nodes depends on the ComfyUI version.
    """
    function = node.execute if hasattr(node, "execute") else getattr(node(), node.FUNCTION)
    taken = inspect.signature(function).parameters
    result = function(**{name: value for name, value in inputs.items() if name in taken})
    return tuple(result.args) if hasattr(result, "args") else tuple(result)


def on_clone(change):
    """Return a patch that changes a clone of a MODEL in place."""

    @wraps(change)
    def patched(model):
        clone = model.clone()
        change(clone)
        return clone

    return patched


def _patched(kind, change):
    return on_clone(methodcaller(f"set_model_{kind}_patch", change))


def _brighter(args):
    return {"img": args["img"] * 1.01, "txt": args["txt"]}


def _replaced(model, change):
    """Return a clone with blocks replaced by `change(arguments, original, index)`, in order."""
    clone = model.clone()
    network = model.model.diffusion_model
    index = 0
    kinds = {
        "double_block": ("blocks", "double_blocks", "transformer_blocks"),
        "single_block": ("single_blocks",),
    }
    for kind, names in kinds.items():
        for number in range(sum(len(getattr(network, name, ())) for name in names)):

            def block(args, extra, index=index):
                return change(args, extra["original_block"], index)

            clone.set_model_patch_replace(block, "dit", kind, number)
            index += 1
    return clone


def replaced(model):
    def change(args, original, _):
        return {name: value * 0.99 for name, value in original(args).items()}

    return _replaced(model, change)


def first_block_cache(model):
    """Compute all blocks but the first in every second pass only."""
    passes = 0

    def change(args, original, index):
        nonlocal passes
        passes += index == 0
        return args if index and passes % 2 == 0 else original(args)

    return _replaced(model, change)


def skipped_layer(model):
    return _replaced(model, lambda args, original, index: args if index == 2 else original(args))


def repeated_layer(model):
    """Compute a block twice in each pass."""

    def change(args, original, index):
        return original({**args, **original(args)} if index == 1 else args)

    return _replaced(model, change)


def _cached(call):
    """Return `call`, repeating its last result every second time."""
    calls = 0
    last = None

    def caching(*args, **options):
        nonlocal calls, last
        calls += 1
        if calls % 2:
            last = call(*args, **options)
        return last.clone()

    return caching


def _run(executor, *args, **options):
    return executor(*args, **options)


@on_clone
def tea_cache(clone):
    """Skip every second pass in a wrapper around the diffusion model."""
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", _cached(_run))


@on_clone
def apply_cache(clone):
    """Skip every second pass outside the diffusion model."""
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", _cached(_run))


def run_function(apply, args):
    return apply(args["input"], args["timestep"], **args["c"])


@on_clone
def function_cache(clone):
    clone.set_model_unet_function_wrapper(_cached(run_function))


@on_clone
def function_wrapper(clone):
    clone.set_model_unet_function_wrapper(
        lambda apply, args: apply(args["input"], args["timestep"] * 0.99, **args["c"]) * 0.98
    )


@on_clone
def wrappers(clone):
    for factor, kind in ((0.99, WrappersMP.DIFFUSION_MODEL), (0.98, WrappersMP.APPLY_MODEL)):
        clone.add_wrapper_with_key(
            kind, "test", lambda *args, by=factor, **options: _run(*args, **options) * by
        )


@on_clone
def replaced_forward(clone):
    """Replace a layer's method inside a block, as packs do for other attention kernels."""
    path = "diffusion_model.blocks.1.self_attn.forward"
    forward = clone.get_model_object(path)
    clone.add_object_patch(path, lambda *args, **options: forward(*args, **options) * 0.9)


def _by_node(module, name, **inputs):
    """Return a patch by a node of ComfyUI, which may be missing in older versions."""

    def patched(model):
        node = getattr(import_module(f"comfy_extras.{module}"), name)
        return node_results(node, model=model, **inputs)[0]

    return patched


NAG = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
ALWAYS = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
"""Step cache settings that skip steps even with random weights."""


class TinyControl(controlnet.ControlBase):  # type: ignore[misc]
    """A one-layer control net, whose weights ComfyUI loads next to the model."""

    def __init__(self, width):
        super().__init__()
        layer = torch.nn.Linear(16, width)
        for parameter in layer.parameters():
            generator = torch.Generator().manual_seed(3)
            parameter.requires_grad_(False).normal_(generator=generator)
        device = model_management.get_torch_device()
        self.model = model_patcher.ModelPatcher(layer, device, device)

    def get_models(self):
        return [self.model]

    def copy(self):
        return self

    def get_control(self, noisy, *_, **__):
        added = self.model.model(noisy.float().mean(dim=(2, 3)))[:, None].to(noisy.dtype)
        return {"input": [added, added * 0.5], "output": [added]}


# A third pass per step without two blocks.
layer_guidance = _by_node(
    "nodes_slg", "SkipLayerGuidanceDiT", double_layers="1, 2", single_layers="1", scale=2.0,
    start_percent=0.0, end_percent=1.0, rescaling_scale=0.0,
)  # fmt: skip
# Windows with four latent frames.
context_windows = _by_node(
    "nodes_context_windows", "WanContextWindowsManualNode", context_length=13, context_overlap=5,
    context_schedule="standard_static", context_stride=1, closed_loop=False, fuse_method="pyramid",
    freenoise=False,
)  # fmt: skip

PATCHES = {
    "attn1 patch": (_patched("attn1", lambda args: args["x"] * 0.9), ("wan_t2v",)),
    "attn2 patch": (_patched("attn2", lambda args: args["x"] * 0.9), ("wan_t2v",)),
    "double-block patch": (_patched("double_block", _brighter), ("qwen_image",)),
    "replaced blocks": (replaced, ("wan_vace", "flux")),
    "skipped layer": (skipped_layer, ("flux",)),
    "repeated layer": (repeated_layer, ("wan_t2v",)),
    "first-block cache": (first_block_cache, ("wan_t2v",)),
    "TeaCache": (tea_cache, ("flux",)),
    "cache of apply_model": (apply_cache, ("flux",)),
    "cache in a function wrapper": (function_cache, ("wan_t2v",)),
    "function wrapper": (function_wrapper, ("wan_t2v",)),
    "wrappers": (wrappers, ("flux",)),
    "replaced forward": (replaced_forward, ("wan_t2v",)),
    "shift": (_by_node("nodes_model_advanced", "ModelSamplingSD3", shift=3.0), ("wan_t2v",)),
    "skip-layer guidance": (layer_guidance, ("wan_t2v",)),
    "EasyCache": (_by_node("nodes_easycache", "EasyCacheNode", **ALWAYS), ("flux",)),
    "LazyCache": (_by_node("nodes_easycache", "LazyCacheNode", **ALWAYS), ("wan_t2v",)),
    "CFGZeroStar": (_by_node("nodes_cfg", "CFGZeroStar"), ("wan_t2v",)),
    "CFGNorm": (_by_node("nodes_cfg", "CFGNorm", strength=0.7), ("flux",)),
    "TCFG": (_by_node("nodes_tcfg", "TCFG"), ("wan_t2v",)),
    "RescaleCFG": (_by_node("nodes_model_advanced", "RescaleCFG", multiplier=0.7), ("wan_t2v",)),
    "NAG": (_by_node("nodes_nag", "NAGuidance", **NAG), ("flux",)),
}
"""Patches and the families to try them on."""
