"""Runs in ComfyUI's own Python: changes by other packs to a MODEL, for `native_cases.py`.

`PATCHES` has functions that return a patched MODEL clone. Each call gives the patch its own state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import comfy.controlnet
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch
from comfy_extras import (
    nodes_cfg,
    nodes_context_windows,
    nodes_easycache,
    nodes_model_advanced,
    nodes_slg,
    nodes_tcfg,
)

WrappersMP = comfy.patcher_extension.WrappersMP
Patch = Callable[[Any], Any]


def node_results(node: Any, **inputs: Any) -> tuple[Any, ...]:
    """Return a ComfyUI node's results, called only with inputs in this version.

    The set of V3 nodes depends on the ComfyUI version.
    """
    function = node.execute if hasattr(node, "execute") else getattr(node(), node.FUNCTION)
    taken = inspect.signature(function).parameters
    result = function(**{name: value for name, value in inputs.items() if name in taken})
    return tuple(result.args) if hasattr(result, "args") else tuple(result)


def attention_1(model: Any) -> Any:
    clone = model.clone()

    def change(*args: Any, **_: Any) -> Any:
        if isinstance(args[0], dict):  # Wan's patches change the result, Flux's change the query
            return args[0]["x"] * 0.9
        return {"q": args[0] * 0.9}

    clone.set_model_attn1_patch(change)
    return clone


def attention_2(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_attn2_patch(lambda args: args["x"] * 0.9)
    return clone


def attention_output(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_attn1_output_patch(lambda result, _: result * 0.9)
    return clone


def double_block(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_double_block_patch(lambda args: {"img": args["img"] * 1.01, "txt": args["txt"]})
    return clone


Values = dict[str, Any]
"""A block's arguments or results."""


def _replaced(
    model: Any, change: Callable[[Values, Callable[[Values], Values], int], Values]
) -> Any:
    """Return a clone with blocks replaced by `change(arguments, original, index)`, in order."""
    clone, network, index = model.clone(), model.model.diffusion_model, 0
    for kind, names in (
        ("double_block", ("blocks", "double_blocks", "transformer_blocks")),
        ("single_block", None),
    ):
        lists = [
            getattr(network, name) for name in names or ("single_blocks",) if hasattr(network, name)
        ]
        for number in range(sum(map(len, lists))):

            def block(args: Values, extra: Values, index: int = index) -> Values:
                return change(args, extra["original_block"], index)

            clone.set_model_patch_replace(block, "dit", kind, number)
            index += 1
    return clone


def replaced(model: Any) -> Any:
    def change(args: Values, original: Any, _: int) -> Values:
        return {name: value * 0.99 for name, value in original(args).items()}

    return _replaced(model, change)


def skipped_layer(model: Any) -> Any:
    return _replaced(model, lambda args, original, index: args if index == 2 else original(args))


def first_block_cache(model: Any) -> Any:
    """Compute all blocks but the first in every second pass only."""
    passes = 0

    def change(args: Values, original: Any, index: int) -> Values:
        nonlocal passes
        passes += index == 0
        return args if index and passes % 2 == 0 else original(args)

    return _replaced(model, change)


def repeated_layer(model: Any) -> Any:
    """Compute a block twice in each pass."""

    def change(args: Values, original: Any, index: int) -> Values:
        return original({**args, **original(args)} if index == 1 else args)

    return _replaced(model, change)


def _cached(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, repeating its last result every second time."""
    calls, last = 0, None

    def caching(*args: Any, **options: Any) -> Any:
        nonlocal calls, last
        calls += 1
        if calls % 2:
            last = call(*args, **options)
        return last.clone()

    return caching


def tea_cache(model: Any) -> Any:
    """Skip every second pass in a wrapper around the diffusion model."""
    clone = model.clone()
    cached = _cached(lambda executor, *args, **options: executor(*args, **options))
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", cached)
    return clone


def apply_cache(model: Any) -> Any:
    """Skip every second pass outside the diffusion model."""
    clone = model.clone()
    cached = _cached(lambda executor, *args, **options: executor(*args, **options))
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", cached)
    return clone


def function_cache(model: Any) -> Any:
    clone = model.clone()
    cached = _cached(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))
    clone.set_model_unet_function_wrapper(cached)
    return clone


def function_wrapper(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_unet_function_wrapper(
        lambda apply, args: apply(args["input"], args["timestep"] * 0.99, **args["c"]) * 0.98
    )
    return clone


def wrappers(model: Any) -> Any:
    clone = model.clone()
    for number, kind in enumerate((WrappersMP.DIFFUSION_MODEL, WrappersMP.APPLY_MODEL), start=1):
        clone.add_wrapper_with_key(
            kind,
            "test",
            lambda executor, *args, n=number, **options: (
                executor(*args, **options) * (1 - 0.01 * n)
            ),
        )
    return clone


def replaced_forward(model: Any) -> Any:
    """Replace a layer's method inside a block, as packs do for other attention kernels."""
    clone = model.clone()
    layer = (
        "blocks.1.self_attn"
        if hasattr(model.model.diffusion_model, "blocks")
        else "double_blocks.1.img_attn.proj"
    )
    path = f"diffusion_model.{layer}.forward"
    forward = clone.get_model_object(path)

    def changed(*args: Any, **options: Any) -> Any:
        return forward(*args, **options) * 0.9

    clone.add_object_patch(path, changed)
    return clone


def shift(model: Any) -> Any:
    if hasattr(model.model.diffusion_model, "single_blocks"):
        inputs = {"max_shift": 1.3, "base_shift": 0.5, "width": 512, "height": 512}
        return node_results(nodes_model_advanced.ModelSamplingFlux, model=model, **inputs)[0]
    return node_results(nodes_model_advanced.ModelSamplingSD3, model=model, shift=3.0)[0]


def layer_guidance(model: Any) -> Any:
    """Make a third pass per step without two blocks (Skip Layer Guidance)."""
    inputs = {
        "double_layers": "1, 2",
        "single_layers": "1",
        "scale": 2.0,
        "start_percent": 0.0,
        "end_percent": 1.0,
    }
    return node_results(nodes_slg.SkipLayerGuidanceDiT, model=model, rescaling_scale=0.0, **inputs)[
        0
    ]


def context_windows(model: Any) -> Any:
    """Sample in windows with four latent frames."""
    inputs = {
        "context_length": 13, "context_overlap": 5, "context_schedule": "standard_static",
        "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False,
    }  # fmt: skip
    return node_results(nodes_context_windows.WanContextWindowsManualNode, model=model, **inputs)[0]


def _by_node(module: Any, name: str, **inputs: Any) -> Patch:
    """Return a patch by a ComfyUI node."""
    return lambda model: node_results(getattr(module, name), model=model, **inputs)[0]


ALWAYS = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
"""Step cache settings that skip steps even with random weights."""


class TinyControl(comfy.controlnet.ControlBase):  # type: ignore[misc]
    """A one-layer control net, whose weights ComfyUI loads next to the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = torch.nn.Linear(16, width)
        for parameter in layer.parameters():
            generator = torch.Generator().manual_seed(3)
            parameter.requires_grad_(False).normal_(generator=generator)
        device = comfy.model_management.get_torch_device()
        self.model = comfy.model_patcher.ModelPatcher(layer, device, device)

    def get_models(self) -> list[Any]:
        return [self.model]

    def copy(self) -> TinyControl:
        return self

    def get_control(
        self, noisy: torch.Tensor, *_: Any, **__: Any
    ) -> Mapping[str, list[torch.Tensor]]:
        added = self.model.model(noisy.float().mean(dim=(2, 3)))[:, None].to(noisy.dtype)
        return {"input": [added, added * 0.5], "output": [added]}


def _attention_guidance() -> dict[str, tuple[Patch, tuple[str, ...]]]:
    try:
        from comfy_extras import nodes_nag
    except ImportError:  # in 0.3.64
        return {}
    nag = _by_node(nodes_nag, "NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)
    return {"NAG": (nag, ("flux",))}


PATCHES: dict[str, tuple[Patch, tuple[str, ...]]] = {
    "attn1 patch": (attention_1, ("wan_t2v", "flux")),
    "attn2 patch": (attention_2, ("wan_t2v",)),
    "attn1 output patch": (attention_output, ("flux",)),
    "double-block patch": (double_block, ("qwen_image",)),
    "replaced blocks": (replaced, ("wan_t2v", "flux", "wan_vace")),
    "skipped layer": (skipped_layer, ("wan_t2v", "flux", "wan_vace")),
    "repeated layer": (repeated_layer, ("wan_t2v",)),
    "first-block cache": (first_block_cache, ("wan_t2v", "flux")),
    "TeaCache": (tea_cache, ("wan_t2v", "flux")),
    "cache of apply_model": (apply_cache, ("flux",)),
    "cache in a function wrapper": (function_cache, ("wan_t2v",)),
    "function wrapper": (function_wrapper, ("wan_t2v", "flux")),
    "wrappers": (wrappers, ("wan_t2v", "flux")),
    "replaced forward": (replaced_forward, ("wan_t2v", "flux")),
    "shift": (shift, ("wan_t2v", "flux")),
    "skip-layer guidance": (layer_guidance, ("wan_t2v", "flux")),
    "EasyCache": (_by_node(nodes_easycache, "EasyCacheNode", **ALWAYS), ("wan_t2v", "flux")),
    "LazyCache": (_by_node(nodes_easycache, "LazyCacheNode", **ALWAYS), ("wan_t2v",)),
    "CFGZeroStar": (_by_node(nodes_cfg, "CFGZeroStar"), ("wan_t2v",)),
    "CFGNorm": (_by_node(nodes_cfg, "CFGNorm", strength=0.7), ("flux",)),
    "TCFG": (_by_node(nodes_tcfg, "TCFG"), ("wan_t2v",)),
    "RescaleCFG": (_by_node(nodes_model_advanced, "RescaleCFG", multiplier=0.7), ("wan_t2v",)),
    **_attention_guidance(),
}
"""Patches and the families to try them on."""
