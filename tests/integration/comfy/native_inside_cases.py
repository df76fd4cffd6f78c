"""Runs in ComfyUI's own Python: blocks entered from their inner modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from further_families import FURTHER
from native_cases import Files, recompiled, with_little_room
from native_families import FAMILIES, Family, _normal, results_of, sample, write_lora
from native_patches import _replaced, context_windows, node_results
from native_run_cases import failing, out_of_memory, threads
from safetensors import safe_open
from safetensors.torch import load_file

from wanstream.host import ShareVisits

STEPS, CHUNKS = 3, 12
WAN = FAMILIES["wan_t2v"]

Run = Callable[[Any], torch.Tensor]


def in_parts(model: Any, *, below: float = 2.0) -> Any:
    """Compute blocks from their modules in the steps `below` a sigma, the MLP in token chunks.

    Packs with other kinds of attention do so.
    """
    network = model.model.diffusion_model

    def change(args: dict[str, Any], original: Any, index: int) -> dict[str, Any]:
        if args["transformer_options"]["sigmas"][0] >= below:
            return dict(original(args))
        block, hidden = network.blocks[index], args["img"]
        hidden = hidden + block.self_attn(block.norm1(hidden), args["pe"])
        hidden = hidden + block.cross_attn(block.norm3(hidden), args["txt"])
        parts = block.norm2(hidden).chunk(CHUNKS, dim=1)
        assert len(parts) == CHUNKS
        return {"img": hidden + torch.cat([block.ffn(part) for part in parts], dim=1)}

    return _replaced(model, change)


def changed(change: Callable[[Any], Any], family: Family = WAN, **settings: Any) -> Run:
    return lambda model: sample(change(model), family, steps=STEPS, **settings)


def nested(model: Any, *, whole: bool) -> torch.Tensor:
    """Sample with an adapter in block 3, made from a module of block 1 or the `whole` block."""
    blocks = model.model.diffusion_model.blocks
    given: list[Any] = []

    def keep(_: object, *inputs: Any) -> None:
        given[:] = inputs

    def add(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        if whole:
            return output + 0.1 * blocks[1](*given[0], **given[1])
        return output + 0.1 * blocks[1].ffn(output)

    hooks = [
        blocks[3].register_forward_pre_hook(keep, with_kwargs=True),
        blocks[3].cross_attn.register_forward_hook(add),
    ]
    try:
        return sample(model, WAN, steps=STEPS)
    finally:
        for hook in hooks:
            hook.remove()


def outside(files: Files) -> dict[str, Any]:
    """Modules used outside a run, and an interrupt in their block there."""
    native, model = files.native(WAN), files.streamed(WAN)
    hidden = torch.ones(1, 4, WAN.settings["dim"])
    found: dict[str, Any] = {}
    results = []
    for each in (native, model):
        comfy.model_management.load_models_gpu([each])
        block = each.model.diffusion_model.blocks[2]
        results.append(torch.cat([block.self_attn.q(hidden), block.ffn(hidden)]))
    found["equal"] = [torch.equal(*results)]
    found["running"] = [model.weights.running]
    interrupt = comfy.model_management.InterruptProcessingException
    with suppress(interrupt), failing(model, interrupt, at=1):
        block(hidden, torch.zeros(1, 6, hidden.shape[-1]), None, None)
    run = partial(sample, family=WAN, steps=STEPS)
    found["equal"].append(torch.equal(run(model), run(native)))
    found["running"].append(model.weights.running)
    model.detach()
    modules = model.model.diffusion_model.modules()
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules]
    return {**found, "hooks": sum(hooks)}


def hooks_inside(files: Files) -> list[int]:
    """Blocks with hooks inside after a run with an adapter, and after a run without it."""
    model = files.streamed(WAN)
    nested(model, whole=False)
    found = [len(model.model.runs._hooks_inside)]
    sample(model, WAN, steps=STEPS)
    return [*found, len(model.model.runs._hooks_inside)]


def refused(files: Files) -> str:
    """A node that directly reads a block's weight."""
    model = files.streamed(WAN).clone()
    network = model.model.diffusion_model

    def read(apply: Any, call: dict[str, Any]) -> Any:
        weight = network.blocks[0].ffn[0].weight
        torch.nn.functional.linear(torch.ones(1, weight.shape[-1]), weight)
        return apply(call["input"], call["timestep"], **call["c"])

    model.set_model_unet_function_wrapper(read)
    try:
        sample(model, WAN, steps=STEPS)
    except ValueError as err:
        return str(err)
    return "not refused"


def failed(files: Files, error: Callable[[], BaseException], at: int) -> dict[str, Any]:
    """An error in a module of a block entered from there, and the run after it."""
    family = FURTHER["wan_animate2"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(files.native(family)), files.streamed(family, policy="block swap")
    raised = ""
    equal: list[bool] = []
    try:
        with failing(model, error, at):
            equal.append(torch.equal(run(model), expected))
    except BaseException as err:  # noqa: BLE001 - compared by the test
        raised = type(err).__name__
    ended = {"running": model.weights.running, "threads": threads()}
    equal.append(torch.equal(run(model), expected))
    return {"raised": raised, "equal": equal, **ended}


def with_lora(files: Files, dtype: str, model: Any) -> torch.Tensor:
    """Sample Animate 2 with a LoRA on the blocks."""
    family = FURTHER["wan_animate2"]
    path = files.folder / "lora.safetensors"
    if not path.exists():
        with safe_open(files.path(family, dtype), "pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
        of_blocks = {key: shape for key, shape in shapes.items() if key.startswith("blocks.")}
        write_lora("lora", path, {key: tuple(shape) for key, shape in of_blocks.items()})
    patched, _ = comfy.sd.load_lora_for_models(model, None, load_file(path), 1.0, 0)
    return sample(patched, family, steps=STEPS)


def long(family: Family) -> Family:
    """Return Animate 2 with inputs for seven latent frames."""
    size = 1, 16, 7, *family.sizes[0][3:]
    mask = torch.ones(1, 1, *size[2:])

    def conditions(positive: bool) -> dict[str, Any]:
        image = {"concat_latent_image": _normal(*size, seed=31), "concat_mask": mask}
        pose = _normal(1, 16, 6, *size[3:], seed=37)
        return {**family.conditions(positive), **image, "pose_video_latent": pose}

    return replace(family, sizes=(size,), conditions=conditions)


def with_cache(model: Any, *, windows: bool) -> torch.Tensor:
    """Sample Animate 2 with the node's cache: later steps compute only parts of each block.

    With context `windows`, the first step passes through all blocks twice.
    """
    from comfy_extras import nodes_wan

    family = FURTHER["wan_animate2"]
    (model,) = node_results(nodes_wan.WanAnimate2Cache, model=model, device="cpu", dtype="default")
    if windows:
        return sample(context_windows(model), long(family), steps=STEPS)
    return sample(model, family, steps=STEPS)


def three(files: Files, run: Run, policy: str, *, share: ShareVisits) -> dict[str, Any]:
    """Three runs. Before the first, blocks were only called whole."""
    if share is ShareVisits.ON:
        run = partial(with_little_room, run)
    expected, model = run(files.native(WAN)), files.streamed(WAN, policy=policy)
    model.streaming = replace(model.streaming, share_visits=share)
    found: dict[str, Any] = {"equal": [], "recompiled": [], "notes": []}
    for _ in range(3):
        found["equal"].append(torch.equal(run(model), expected))
        found["recompiled"].append(recompiled(model))
        found["notes"].append(model.model.runs.last.policy.notes)
    plain = sample(files.native(WAN), WAN, steps=STEPS)
    return {**found, "effect": not torch.equal(plain, expected)}


def animate(files: Files) -> dict[str, Callable[[], Any]]:
    """Return cases for Wan Animate 2, which never calls a block itself."""
    family = FURTHER["wan_animate2"]
    interrupt = comfy.model_management.InterruptProcessingException
    errors = {"error": ValueError, "interrupt": interrupt, "shortage": out_of_memory}
    found: dict[str, Callable[[], Any]] = {
        f"{name} at {at}": partial(failed, files, error, at)
        for name, error in errors.items()
        for at in (1, 8)
    }

    def compared(run: Run, form: str = "fp32", policy: str = "layerwise") -> dict[str, Any]:
        plain = sample(files.native(family, form), family, steps=STEPS)
        return files.compare(family.name, run, form=form, policy=policy, plain=plain)

    for form in ("bf16", "fp8 kept"):
        for policy in ("layerwise", "RAM"):
            run = partial(with_lora, files, form.split()[0])
            found[f"lora {form}, {policy}"] = partial(compared, run, form, policy)
    for windows in (False, True):
        found[f"cache {windows}"] = partial(compared, partial(with_cache, windows=windows))
    return found


def cases(files: Files) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    adapters = {
        "nested": partial(nested, whole=False),
        "nested whole": partial(nested, whole=True),
    }
    runs = {"in parts later": changed(partial(in_parts, below=0.95)), **adapters}
    for policy in ("layerwise", "block swap", "resident", "RAM"):
        found[f"in parts, {policy}"] = lambda policy=policy: files.compare(
            WAN.name, changed(in_parts), policy=policy, plain=files.unpatched(WAN)
        )
        for name, run in runs.items():
            found[f"{name}, {policy}"] = partial(three, files, run, policy, share=ShareVisits.OFF)
    for name, run in adapters.items():
        found[f"{name}, shared"] = partial(three, files, run, "layerwise", share=ShareVisits.ON)
    found |= {"outside": partial(outside, files), "refused": partial(refused, files)}
    found["hooks inside"] = partial(hooks_inside, files)
    return {**found, **(animate(files) if "wan_animate2" in FURTHER else {})}


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case."""
    torch.set_num_threads(1)
    return results_of(cases(Files(Path(folder))))
