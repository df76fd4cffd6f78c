"""Runs with shared visits on streamed native models, in ComfyUI's own Python.

Other cases check events, memory and policies. `answers(folder)` returns one JSON value per case.
`test_native_run.py` checks the values.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import comfy.hooks
import comfy.ldm.wan.model
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sample
import comfy.samplers
import native_families
import torch
from comfy_extras import nodes_custom_sampler
from installed_pack import load_pack
from native_families import FAMILIES, Family, results_of, sample

load_pack()
from native_loading import load_native  # noqa: E402

from wanstream.host import ShareVisits, current_host  # noqa: E402
from wanstream.host.comfy import versions  # noqa: E402
from wanstream.host.comfy.native.runs import lanes  # noqa: E402
from wanstream.host.comfy.native.runs import policy as native_policy  # noqa: E402
from wanstream.host.comfy.native.streamed.weights import NativeWeights  # noqa: E402
from wanstream.host.events import Executing  # noqa: E402
from wanstream.offload import OffloadEngine  # noqa: E402
from wanstream.plan import AutoOffload, Budgets  # noqa: E402
from wanstream.plan.programs import step_visits  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402
from wanstream.tests.support.checked_device import checked_machine  # noqa: E402

LIMITS = {"smallest_block": 30_000, "smallest_model": 1_000}
STEPS = 3
CHUNKED = ("wan_t2v", "flux", "qwen_image")
WrappersMP = comfy.patcher_extension.WrappersMP
Run = Callable[[Any], torch.Tensor]


def room_for_one(input_shape: list[int], **_: Any) -> float:
    """Activation bytes, so many for a batch that ComfyUI computes conditions one by one."""
    return 1e30 if input_shape[0] > 1 else 1e6


class Models:
    """Native and streamed models from the same files: no two conditions fit into one pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, family: Family) -> Path:
        path = self.folder / f"{family.name}.safetensors"
        if not path.exists():
            family.write(path, "fp32")
        return path

    def native(self, family: Family) -> Any:
        model = native_families.native(self.path(family), family)
        model.model.memory_required = room_for_one
        return model

    def streamed(self, family: Family, policy: Any = None, *, share: bool | str = True) -> Any:
        """Return a MODEL.

        `share` is the share_visits value, or True for "on" and False for "off".
        """
        mode = ShareVisits(share if isinstance(share, str) else ("off", "on")[share])
        with native_families.given_configuration(family):
            chosen = policy or OffloadPolicy.layerwise(1)
            model = load_native(self.path(family), "default", chosen, share_visits=mode, **LIMITS)
        model.model.memory_required = room_for_one
        return model


def figures(model: Any) -> dict[str, Any]:
    """Return the counts from a streamed model's last run."""
    run = model.model.runs.last
    steps = run.shown.timeline.steps
    return {
        "bytes": [step.bytes_moved for step in steps],
        "visits": run.session.visits,
        "fetches": run.session.fetches,
        "recompiled": run.session.recompiled,
        "notes": run.policy.notes,
        "steps": len(steps),
    }


def threads() -> list[str]:
    """Return the run threads.

    File readers belong to the source, which lives longer.
    """
    names = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("wanstream-")
    ]
    return sorted(name for name in names if not name.startswith("wanstream-read_"))


def shared(models: Models, family: Family) -> dict[str, Any]:
    """Three runs with shared visits next to two without."""
    run = partial(sample, family=family, steps=STEPS)
    expected = run(models.native(family))
    apart, together = models.streamed(family, share=False), models.streamed(family, share="auto")
    equal = [torch.equal(run(apart), expected) for _ in range(2)]
    equal += [torch.equal(run(together), expected) for _ in range(3)]
    found = {"equal": equal, "apart": figures(apart), "together": figures(together)}
    found["class"] = type(together.model).__name__
    return {**found, "blocks": len(together.model.weights.blocks), "threads": threads()}


def three_conditions(models: Models) -> dict[str, Any]:
    """Guidance with two positive conditions and a negative one."""
    family = FAMILIES["wan_t2v"]

    @torch.inference_mode()
    def run(model: Any) -> torch.Tensor:
        positive, negative = family.conditioning()
        middle = [[text * 0.5, values] for text, values in positive]
        guider = nodes_custom_sampler.Guider_DualCFG(model)
        guider.set_conds(positive, middle, negative)
        guider.set_cfg(3.0, 1.5, nested=False)
        latent = family.latent()
        sampler = comfy.samplers.sampler_object("euler")
        sigmas = comfy.samplers.calculate_sigmas(
            model.get_model_object("model_sampling"), "simple", STEPS
        )
        samples: torch.Tensor = guider.sample(
            comfy.sample.prepare_noise(latent, 7),
            latent,
            sampler,
            sigmas,
            disable_pbar=True,
            seed=7,
        )
        return samples

    expected, model = run(models.native(family)), models.streamed(family)
    return {"equal": [torch.equal(run(model), expected) for _ in range(3)], **figures(model)}


def prevented(models: Models, change: Callable[[Any], Any], share: str) -> dict[str, Any]:
    """Two runs with another node's change, which may count passes or blocks."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = (
        run(change(models.native(family))),
        change(models.streamed(family, share=share)),
    )
    return {"equal": [torch.equal(run(model), expected) for _ in range(2)], **figures(model)}


class Counting:
    """A wrapper that expects passes one after the other, as step caches do."""

    def __init__(self) -> None:
        self.inside = 0

    def __call__(self, executor: Any, *inputs: Any, **settings: Any) -> Any:
        assert not self.inside, "a pass begins before the last one has ended"
        self.inside += 1
        try:
            return executor(*inputs, **settings)
        finally:
            self.inside -= 1


def with_wrapper(model: Any, *, kind: str) -> Any:
    model = model.clone()
    model.add_wrapper_with_key(kind, "counting", Counting())
    return model


def with_function(model: Any) -> Any:
    model = model.clone()
    model.set_model_unet_function_wrapper(
        lambda apply, call: apply(call["input"], call["timestep"], **call["c"])
    )
    return model


def with_replacement(model: Any) -> Any:
    model = model.clone()
    model.set_model_patch_replace(
        lambda call, extra: extra["original_block"](call), "dit", "double_block", 1
    )
    return model


def with_attention_patch(model: Any) -> Any:
    model = model.clone()
    model.set_model_attn2_patch(lambda call: call["x"] * 1.01)
    return model


def with_attention_override(model: Any) -> Any:
    model = model.clone()
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda attention, *inputs, **given: attention(
        *inputs, **given
    )
    return model


class BlockCounter:
    """Another pack's forward, whose result depends on its call count."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.forward, self.calls = forward, 0

    def __call__(self, *inputs: Any, **settings: Any) -> torch.Tensor:
        self.calls += 1
        return self.forward(*inputs, **settings) * (1 + 0.01 * (self.calls % 3))


def _layer(model: Any) -> torch.nn.Module:
    layer: torch.nn.Module = model.model.diffusion_model.blocks[1].ffn
    return layer


def with_object_patch(model: Any) -> Any:
    model, layer = model.clone(), _layer(model)
    model.add_object_patch(
        "diffusion_model.blocks.1.ffn.forward", BlockCounter(partial(type(layer).forward, layer))
    )
    return model


def with_injection(model: Any) -> Any:
    model, layer = model.clone(), _layer(model)

    def inject(_: Any) -> None:
        layer.forward = BlockCounter(partial(type(layer).forward, layer))

    def eject(_: Any) -> None:
        del layer.forward

    model.set_injections("test", [comfy.model_patcher.PatcherInjection(inject, eject)])
    return model


def with_method(model: Any) -> Any:
    """Return the model with a method assigned to the instance.

    Each test opens a new model.
    """
    network = model.model.diffusion_model
    network.forward_orig = BlockCounter(partial(type(network).forward_orig, network))
    return model


def with_hook(model: Any) -> Any:
    counter = BlockCounter(lambda hidden: hidden)
    _layer(model).register_forward_hook(lambda _, inputs, output: counter(output))
    return model


def with_subclass(model: Any) -> Any:
    layer = _layer(model)
    counter = BlockCounter(partial(type(layer).forward, layer))
    kind = type("Replaced", (type(layer),), {"forward": lambda _, hidden: counter(hidden)})
    layer.__class__ = kind
    return model


def with_compiled_block(model: Any) -> Any:
    model.model.diffusion_model.blocks[1].compile(backend="eager")
    return model


def with_apply_model(model: Any) -> Any:
    model, apply, lock = model.clone(), model.model.apply_model, threading.Lock()

    def locked(*inputs: Any, **settings: Any) -> Any:
        with lock:
            return apply(*inputs, **settings)

    model.add_object_patch("apply_model", locked)
    return model


def with_state(model: Any) -> Any:
    model = model.clone()
    model.model_options["transformer_options"]["cache"] = SimpleNamespace()
    return model


def with_callback(model: Any) -> Any:
    model = model.clone()
    model.add_callback(comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE, lambda *_: None)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "DIFFUSION_MODEL": partial(with_wrapper, kind=WrappersMP.DIFFUSION_MODEL),
    "APPLY_MODEL": partial(with_wrapper, kind=WrappersMP.APPLY_MODEL),
    "function": with_function,
    "replacement": with_replacement,
    "attention": with_attention_patch,
    "override": with_attention_override,
    "state": with_state,
    "object": with_object_patch,
    "injection": with_injection,
    "method": with_method,
    "hook": with_hook,
    "subclass": with_subclass,
    "compiled block": with_compiled_block,
    "apply_model": with_apply_model,
    "callback": with_callback,
}


def replaced_function(models: Models) -> dict[str, Any]:
    """Runs with another pack's attention in the model's module, and with a method replaced."""
    attention, block = (
        comfy.ldm.wan.model.optimized_attention,
        comfy.ldm.wan.model.WanAttentionBlock,
    )
    forward, found = block.forward, {}

    def wrapped(*inputs: Any, **settings: Any) -> Any:
        return attention(*inputs, **settings)

    def counted(self: torch.nn.Module, *inputs: Any, **settings: Any) -> Any:
        return forward(self, *inputs, **settings)

    for name, owner, replaced in (
        ("optimized_attention", comfy.ldm.wan.model, wrapped),
        ("forward", block, counted),
    ):
        with patch.object(owner, name, replaced):
            found[name] = prevented(models, lambda model: model, "auto")
    return found


def tested_models(_: Models) -> list[str]:
    """Classes in this ComfyUI that share visits by themselves."""
    return sorted(name for name in versions.LOCKSTEP_MODELS if hasattr(comfy.model_base, name))


def untested_class(models: Models) -> dict[str, Any]:
    """Runs of a model whose class is not a tested one."""
    with patch.object(versions, "LOCKSTEP_MODELS", frozenset()):
        return prevented(models, lambda model: model, "auto")


def short_of_room(models: Models) -> dict[str, Any]:
    """Runs on a device with free memory for one pass."""
    with patch.object(type(current_host().memory), "free_vram", lambda _: int(room_for_one([1]))):
        return prevented(models, lambda model: model, "auto")


@contextmanager
def predicted(faster: float) -> Iterator[list[int]]:
    """Predict a time share of `faster` for calls with shared visits.

    Yield the predicted passes.
    """
    asked = list[int]()

    def choose(*_: Any, passes: int, present: OffloadPolicy, keep_present: bool, **__: Any) -> Any:
        asked.append(passes)
        return SimpleNamespace(policy=present, call_s=1.0 if keep_present else faster)

    with patch.object(native_policy, "plan_passes", choose):
        yield asked


def chosen_lanes(models: Models, faster: float) -> dict[str, Any]:
    """Two runs under an automatic policy.

    Shared visits reduce a call's time to the share `faster`.
    """
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = (
        run(models.native(family)),
        models.streamed(family, AutoOffload(), share="auto"),
    )
    with predicted(faster) as asked:
        equal, visits, notes = [], [], []
        for _ in range(2):
            equal.append(torch.equal(run(model), expected))
            visits.append(figures(model)["visits"])
            notes += figures(model)["notes"]
        with patch.object(type(current_host().memory), "free_vram", lambda _: 1000):
            equal.append(torch.equal(run(model), expected))
    short = figures(model)["notes"]
    blocks = len(model.model.weights.blocks)
    return {
        "equal": equal,
        "asked": asked,
        "visits": visits,
        "notes": notes,
        "short": short,
        "blocks": blocks,
    }


def changed_settings(models: Models) -> dict[str, Any]:
    """Runs with other settings on clones, after runs that could not share visits."""
    family, found = FAMILIES["wan_t2v"], {}
    expected = sample(models.native(family), family, steps=STEPS)

    def run(name: str, model: Any, **settings: Any) -> None:
        equal = torch.equal(sample(model, family, steps=STEPS, **settings), expected)
        found[name] = {"equal": equal, **figures(model)}

    with predicted(0.5):
        model = models.streamed(family, AutoOffload(), share="auto")
        run("cfg 1", model, cfg=1.0)
        run("cfg after cfg 1", model)
        for mode in ("off", "on"):
            model = models.streamed(family, AutoOffload(), share=mode)
            run(mode, model)
            model = model.clone()
            model.streaming = replace(model.streaming, share_visits=ShareVisits.AUTO)
            run(f"auto after {mode}", model)
        model = models.streamed(family, share="auto")
        run("fixed", model)
        model = model.clone()
        model.with_settings(replace(model.streaming, policy=AutoOffload()))
        run("automatic after fixed", model)
    return found


def room_later(models: Models) -> dict[str, Any]:
    """Two equal runs: in the second, one pass has room for all conditions."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    native, model = models.native(family), models.streamed(family, share="auto")
    equal = [torch.equal(run(model), run(native))]
    notes = [figures(model)["notes"]]
    for each in (native, model):
        each.model.memory_required = lambda *_, **__: 0
    equal.append(torch.equal(run(model), run(native)))
    notes.append(figures(model)["notes"])
    return {"equal": equal, "notes": notes}


def out_of_memory_once(models: Models) -> dict[str, Any]:
    """Two runs. The first is out of memory in a call with shared visits."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, share="auto")
    with hooks_allowed(), failing(model, out_of_memory, at=2 * len(model.model.weights.blocks) + 1):
        equal = [torch.equal(run(model), expected)]
    notes = [figures(model)["notes"]]
    equal.append(torch.equal(run(model), expected))
    return {"equal": equal, "notes": [*notes, figures(model)["notes"]]}


@contextmanager
def in_blocks(model: Any, does: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Call `does` with a layer's input in each block, for each condition or pass through it."""
    network = model.model.diffusion_model
    blocks = [network.get_submodule(path) for path in model.model.weights.blocks]
    layers = [
        next(each for each in block.modules() if isinstance(each, torch.nn.Linear))
        for block in blocks
    ]

    def look(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        does(inputs[0])

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Doing:
    """Action done `times` times, from call number `at` on."""

    def __init__(self, does: Callable[[], object], at: int, times: int = 1) -> None:
        self.does, self.wait, self.left = does, at, times

    def __call__(self, _: torch.Tensor) -> None:
        self.wait -= 1
        if self.wait <= 0 and self.left:
            self.left -= 1
            self.does()


def hooks_allowed() -> AbstractContextManager[object]:
    """Let hooks from `in_blocks` count as tested code."""
    return patch.object(lanes, "foreign_layers", lambda _: iter(()))


def failing(
    model: Any, error: Callable[[], BaseException], at: int, times: int = 1
) -> AbstractContextManager[None]:
    """Raise `error` in a block `times` times, from one condition's pass through block `at` on."""
    return in_blocks(model, Doing(lambda: _raise(error()), at, times))


def _raise(error: BaseException) -> None:
    raise error


def failed(models: Models, error: Callable[[], BaseException], at: int) -> dict[str, Any]:
    """An error in one condition while two share visits, and the run after it."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family)
    run(model)
    raised = ""
    try:
        with failing(model, error, at):
            run(model)
    except BaseException as err:  # noqa: BLE001 - compared by the test
        raised = type(err).__name__
    ended = {"running": model.weights.running, "threads": threads()}
    return {"raised": raised, **ended, "equal": torch.equal(run(model), expected)}


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def short_memory(
    models: Models, policy: OffloadPolicy, *, times: int, share: bool | str
) -> dict[str, Any]:
    """A run whose second model call runs out of memory `times` times."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, policy, share=share)
    run(model)
    blocks = len(model.model.weights.blocks)
    found: dict[str, Any] = {"raised": ""}
    try:
        with hooks_allowed(), failing(model, out_of_memory, at=3 * blocks, times=times):
            found["equal"] = torch.equal(run(model), expected)
    except ValueError as err:
        found["raised"] = f"{type(err).__name__}: {err}"
    found |= {"running": model.weights.running, "notes": model.model.runs.last.policy.notes}
    return {**found, "after": torch.equal(run(model), expected), "threads": threads()}


def in_chunks(models: Models, name: str) -> dict[str, Any]:
    """Runs of a family with feed-forwards in chunks: by the policy, then after an error.

    Latents have enough tokens for the chunks. Attention over the tokens for an error takes seconds,
    so one family has them.
    """
    family = FAMILIES[name]
    fails = name == "qwen_image"
    batch, channels, *frames, _, _ = family.sizes[0]
    side = 130 if fails else 66
    family = replace(family, sizes=((batch, channels, *[1] * len(frames), side, side),))
    run = partial(sample, family=family, steps=2, cfg=1.0)
    expected = run(models.native(family))
    model = models.streamed(family, replace(OffloadPolicy.layerwise(1), chunk_tokens=1024))
    equal = [torch.equal(run(model), expected)]
    notes = [model.model.runs.last.policy.notes]
    if fails:
        model.policy = OffloadPolicy.layerwise(1)
        with failing(model, out_of_memory, at=len(model.model.weights.blocks) + 1):
            equal.append(torch.equal(run(model), expected))
        notes.append(model.model.runs.last.policy.notes)
        equal.append(torch.equal(run(model), expected))
        notes.append(model.model.runs.last.policy.notes)
    replaced = [
        path
        for path, module in model.model.diffusion_model.named_modules()
        if "forward" in vars(module)
    ]
    return {"equal": equal, "notes": notes, "replaced": replaced}


def automatic(models: Models) -> dict[str, Any]:
    """Three runs with an automatic policy that chooses one resident block."""
    family, chosen = FAMILIES["wan_t2v"], OffloadPolicy.block_swap(3)
    run = partial(sample, family=family, steps=STEPS)
    expected, model = (
        run(models.native(family)),
        models.streamed(family, AutoOffload(), share=False),
    )
    equal, notes, presents = [], [], []

    def choose(*_: Any, present: OffloadPolicy, **__: Any) -> Any:
        presents.append(present == OffloadPolicy.layerwise(1))
        return SimpleNamespace(policy=chosen, call_s=0.5)

    with patch.object(native_policy, "plan_passes", choose):
        for _ in range(3):
            equal.append(torch.equal(run(model), expected))
            notes.append(model.model.runs.last.policy.notes)
    policies = {
        "requested": model.memory.requested == chosen,
        "loaded": model.memory.policy == chosen,
    }
    return {"equal": equal, "notes": notes, "presents": presents, **policies}


def loaded_again(models: Models, *, share: bool) -> dict[str, Any]:
    """A run with a patch that uses a VAE and reloads all models in a pass, as ControlNets do."""
    family, management = FAMILIES["wan_t2v"], comfy.model_management
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, share=share)
    run(model)
    load = Doing(
        lambda: management.load_models_gpu(management.loaded_models(only_currently_used=True)), at=6
    )
    with in_blocks(model, load):
        equal = [torch.equal(run(model), expected) for _ in range(2)]
    return {"equal": equal, "done": not load.left, **figures(model)}


def loaded_with_other_patches(models: Models) -> dict[str, Any]:
    """A run in which a node loads the same model with another LoRA."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family)
    other, raised = model.clone(), ""
    other.patches_uuid = uuid4()
    try:
        with in_blocks(model, Doing(lambda: comfy.model_management.load_models_gpu([other]), at=6)):
            run(model)
    except ValueError as err:
        raised = str(err)
    return {"raised": raised, "equal": torch.equal(run(model), expected), "threads": threads()}


def refused_load(models: Models) -> dict[str, Any]:
    """A request for all weights at once, on a loaded model."""
    family = FAMILIES["wan_t2v"]
    model = models.streamed(family)
    sample(model, family, steps=STEPS)
    before = model.weights.loaded_bytes
    with suppress(ValueError):
        comfy.model_management.load_models_gpu([model], force_patch_weights=True)
    listed = [
        entry.model.model is model.model for entry in comfy.model_management.current_loaded_models
    ]
    return {"before": before, "listed": any(listed), "loaded": model.weights.loaded_bytes}


@contextmanager
def better_policy(policy: OffloadPolicy) -> Iterator[list[float]]:
    """Let every measurement find a better policy, and yield the device bytes for it."""
    limits: list[float] = []

    def choose(*_: Any, budgets: Budgets, **__: Any) -> Any:
        limits.append(math.inf if budgets.vram_bytes is None else budgets.vram_bytes)
        return SimpleNamespace(policy=policy, call_s=0.0)

    with patch.object(native_policy, "plan_passes", choose):
        yield limits


def refused_policy(models: Models, error: Callable[[], BaseException], name: str) -> dict[str, Any]:
    """A better policy whose memory is missing at the time of use."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, AutoOffload())
    method, left = getattr(OffloadEngine, name), [1]

    def fails(engine: OffloadEngine, *inputs: Any) -> Any:
        if len(engine.buffers) > 2 - (name == "set_policy") and left[0]:
            left[0] -= 1
            raise error()
        return method(engine, *inputs)

    with better_policy(OffloadPolicy.layerwise(2)), patch.object(OffloadEngine, name, fails):
        equal = torch.equal(run(model), expected)
    buffers = len(model.weights.loaded_engine.buffers)
    found = {
        "equal": equal,
        "failed": not left[0],
        "notes": model.model.runs.last.policy.notes,
        "buffers": buffers,
    }
    return {
        **found,
        "requested": str(model.memory.requested),
        "after": torch.equal(run(model), expected),
    }


def room_for_a_batch(models: Models) -> dict[str, Any]:
    """Memory for an automatic policy on a device with room for two conditions in one pass."""
    family, free = FAMILIES["wan_t2v"], 10**9
    limits = {}

    def required(input_shape: list[int], *, most: int, **_: Any) -> float:
        return 1e6 * input_shape[0] if input_shape[0] <= most else 1e30

    for name, most, share in (("apart", 1, False), ("lanes", 1, True), ("together", 2, True)):
        model = models.streamed(family, AutoOffload(), share=share)
        model.model.memory_required = partial(required, most=most)
        with (
            better_policy(OffloadPolicy.layerwise(1)) as found,
            patch.object(native_policy, "runtime_for", lambda _: object()),
            patch.object(type(current_host().memory), "free_vram", lambda _: free),
        ):
            loaded = sample(model, family, steps=1) is not None and model.weights.loaded_bytes
        limits[name] = loaded + free - found[0]
    return limits


def called_inside_a_call(models: Models, *, share: bool) -> dict[str, Any]:
    """A wrapper that computes each model call a second time, inside it."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, share=share)
    model, inside = model.clone(), [False]

    def twice(executor: Any, *inputs: Any) -> Any:
        if not inside[0]:
            inside[0] = True
            comfy.samplers.calc_cond_batch(*inputs)
            inside[0] = False
        return executor(*inputs)

    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "twice", twice)
    return {"equal": [torch.equal(run(model), expected) for _ in range(2)], **figures(model)}


def block_alone(models: Models) -> dict[str, Any]:
    """A function wrapper that computes one block before each pass."""
    family, shapes = FAMILIES["wan_t2v"], set[tuple[int, ...]]()
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family).clone()
    block = model.model.diffusion_model.blocks[2]

    def compute(apply: Any, call: dict[str, Any]) -> Any:
        forward = patch.object(
            block, "forward", lambda: shapes.add(tuple(block.ffn[0].weight.shape))
        )
        with forward:
            block()
        return apply(call["input"], call["timestep"], **call["c"])

    model.set_model_unet_function_wrapper(compute)
    return {
        "equal": [torch.equal(run(model), expected) for _ in range(2)],
        "shapes": sorted(shapes),
    }


def repeated_call(models: Models, *, share: bool) -> dict[str, Any]:
    """A node that computes a model call again after an error in it."""
    family = FAMILIES["wan_t2v"]
    run = partial(sample, family=family, steps=STEPS)
    expected, model = run(models.native(family)), models.streamed(family, share=share)
    run(model)
    model = model.clone()

    def again(call: dict[str, Any]) -> Any:
        options = {
            key: value
            for key, value in call["model_options"].items()
            if key != "sampler_calc_cond_batch_function"
        }
        compute = partial(
            comfy.samplers.calc_cond_batch,
            call["model"],
            call["conds"],
            call["input"],
            call["sigma"],
            options,
        )
        try:
            return compute()
        except RuntimeError:
            return compute()

    model.set_model_sampler_calc_cond_batch_function(again)
    with failing(model, lambda: RuntimeError("made up"), at=6):
        equal = torch.equal(run(model), expected)
    return {"equal": equal, "steps": figures(model)["steps"]}


def kept_by_an_error(models: Models, *, share: bool) -> list[bool]:
    """Activations that still exist after an error, without garbage collection."""
    family, activations = FAMILIES["wan_t2v"], list[weakref.ref[torch.Tensor]]()
    model = models.streamed(family, share=share)
    sample(model, family, steps=STEPS)

    def fail(hidden: torch.Tensor) -> None:
        activation = hidden + 1
        activations.append(weakref.ref(activation))
        if len(activations) == 9:
            raise ValueError("made up")

    gc.disable()
    try:
        with suppress(ValueError), in_blocks(model, fail):
            sample(model, family, steps=STEPS)
        return [each() is not None for each in activations]
    finally:
        gc.enable()


def decoded_on_a_device(models: Models) -> dict[str, int]:
    """Predicted and used bytes on a device with streams, where blocks are decoded."""
    family, policy = FAMILIES["wan_t2v"], OffloadPolicy.layerwise(1)
    path = models.folder / "decoded.safetensors"
    family.write(path, "fp8")
    opened = load_native(path, "default", policy, **LIMITS).weights
    with checked_machine() as machine:
        machine.set_device(0)
        device = torch.device("checked", 0)
        weights = NativeWeights(
            opened.stacks, opened._source, quantised={}, outside_bytes=0, device=device
        )
        engine = weights.engine(policy, device)
        visits = step_visits([*weights.block_counts] * 2, weights.block_counts)
        with engine.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    pass
        found = {"predicted": weights.device_bytes(policy), "used": weights.loaded_bytes}
        weights.close()
        del weights, engine, run
    return found


def first_policy(models: Models) -> dict[str, Any]:
    """Policy for a first call on a device with streams, and the blocks read in three passes."""
    family = FAMILIES["wan_t2v"]
    opened = load_native(models.path(family), "default", OffloadPolicy.layerwise(1), **LIMITS)
    sources = []

    def source() -> Any:
        sources.append(opened.weights._source())
        return sources[-1]

    with checked_machine() as machine:
        machine.set_device(0)
        weights = NativeWeights(
            opened.weights.stacks,
            source,
            quantised={},
            outside_bytes=0,
            device=torch.device("checked", 0),
        )
        ram_bytes = int(3.5 * weights.costs.stored_bytes)
        policy = weights.first_policy(ram_bytes)
        engine = weights.engine(policy, torch.device("checked", 0))
        visits = step_visits([*weights.block_counts] * 3, weights.block_counts)
        with engine.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    pass
        reads = sources[-1].reader.bytes_read / weights.costs.stored_bytes
        found = {
            "reads": reads,
            "kept": policy.ram_blocks,
            "none fits": weights.first_policy(0) == OffloadPolicy.layerwise(),
            "all fit": weights.first_policy(10**12).ram_blocks,
            "blocks": len(weights.blocks),
        }
        weights.close()
    return found


def first_load(models: Models, *, lacks_ram: bool) -> dict[str, Any]:
    """Policy for a first load on a machine with a bus, with and without enough RAM."""
    family = FAMILIES["wan_t2v"]
    model = models.streamed(family, AutoOffload())
    weights = model.weights
    weights.has_bus = True
    engine = weights.engine
    tried: list[str] = []

    def opened(policy: OffloadPolicy, device: torch.device) -> Any:
        tried.append(policy.source)
        if lacks_ram and policy.source == "pinned":
            raise OSError("RAM is short")
        return engine(policy, device)

    with patch.object(weights, "engine", opened):
        comfy.model_management.load_models_gpu([model])
    found = {"tried": tried, "loaded": model.memory.policy.source}
    model.detach()
    return found


def in_turns(models: Models) -> dict[str, Any]:
    """Bytes of two models on a device with streams, after each one's runs.

    The last bytes are with both models loaded for one run.
    """

    def free(_: Any = None, torch_free_too: bool = False) -> Any:
        return (2**33, 0) if torch_free_too else 2**33

    management = comfy.model_management
    with (
        checked_machine() as machine,
        patch.object(management, "get_torch_device", lambda: torch.device("checked", 0)),
        patch.object(management, "get_free_memory", free),
    ):
        machine.set_device(0)
        pair = [models.streamed(FAMILIES["wan_t2v"], share=False) for _ in range(2)]
        outside = pair[0].model.weights.outside_bytes
        held = []
        for model in (*pair, *pair):
            management.load_models_gpu([model])
            weights = model.model.weights
            visits = step_visits([*weights.block_counts] * 2, weights.block_counts)
            with weights.loaded_engine.run(visits) as run:
                for visit in visits:
                    with run.visit(*visit):
                        pass
            held.append([each.model.weights.loaded_bytes - outside for each in pair])
        management.load_models_gpu(pair)
        held.append([each.model.weights.loaded_bytes - outside for each in pair])
        management.unload_all_models()
        del pair, model, weights, run
    return {"outside": outside, "held": held}


def announced(models: Models) -> dict[str, Any]:
    """A run's events."""
    family, events = FAMILIES["wan_t2v"], list[tuple[str, dict[str, Any]]]()
    model = models.streamed(family, share=False)
    events_of_host = current_host().events
    graphs = [
        {
            "12:3": {"inputs": {"model": ["1", 0], "cfg": 3.0}},
            "1": {"inputs": {"unet_name": f"{name}.safetensors"}},
        }
        for name in ("wan_lightx2v", "wan", "wan")
    ]
    with (
        patch.object(events_of_host, "running_graph", iter(graphs).__next__),
        patch.object(
            events_of_host, "announce", lambda event, payload: events.append((event, dict(payload)))
        ),
        patch.object(events_of_host, "executing", lambda: Executing("item", "12:3")),
    ):
        for _ in range(2):
            sample(model, family, steps=STEPS, sampler="heun")
        with suppress(ValueError), failing(model, lambda: ValueError("broken"), at=2):
            sample(model, family, steps=STEPS)
    notices = [payload["notices"] for name, payload in events if name == "wanstream.notices"]
    events = [event for event in events if event[0] != "wanstream.notices"]
    return {
        "notices": [[notice["text"] for notice in each] for each in notices],
        # Visits are reported by time.
        "names": [name for name, _ in events if name != "wanstream.visits"],
        "nodes": sorted({payload["shown_at"] for _, payload in events}),
        "predicted": [payload["steps"] for name, payload in events if name == "wanstream.begin"],
        "settings": events[0][1]["settings"],
        "errors": [payload["error"] for name, payload in events if name == "wanstream.end"],
        "records": [payload["record"] for name, payload in events if name == "wanstream.step"],
    }


def cases(folder: Path) -> dict[str, Callable[[], Any]]:
    models = Models(folder)
    layerwise, swap = OffloadPolicy.layerwise(2), OffloadPolicy.block_swap(1)
    found: dict[str, Callable[[], Any]] = {
        f"shared {name}": partial(shared, models, FAMILIES[name]) for name in FAMILIES
    }
    found["three conditions"] = partial(three_conditions, models)
    found |= {
        f"prevented {name}, {mode}": partial(prevented, models, change, mode)
        for name, change in CHANGES.items()
        for mode in ("on", "auto")
    }
    found["replaced function"] = partial(replaced_function, models)
    found["changed settings"] = partial(changed_settings, models)
    found["room later"] = partial(room_later, models)
    found["out of memory once"] = partial(out_of_memory_once, models)
    found["tested models"] = partial(tested_models, models)
    found |= {
        "untested class": partial(untested_class, models),
        "short of room": partial(short_of_room, models),
    }
    found |= {f"lanes {faster}": partial(chosen_lanes, models, faster) for faster in (0.5, 0.97)}
    found["short of memory, swap, auto"] = partial(
        short_memory, models, swap, times=2, share="auto"
    )
    errors = {"error": ValueError, "interrupt": comfy.model_management.InterruptProcessingException}
    found |= {
        f"{name} at {at}": partial(failed, models, error, at)
        for name, error in errors.items()
        for at in (1, 5, 9)
    }
    for share in (False, True):
        found[f"short of memory, swap, {share}"] = partial(
            short_memory, models, swap, times=2, share=share
        )
        found[f"short of memory, layerwise, {share}"] = partial(
            short_memory, models, layerwise, times=9, share=share
        )
        found[f"loaded again, {share}"] = partial(loaded_again, models, share=share)
        found[f"called inside a call, {share}"] = partial(called_inside_a_call, models, share=share)
        found[f"repeated call, {share}"] = partial(repeated_call, models, share=share)
        found[f"kept by an error, {share}"] = partial(kept_by_an_error, models, share=share)
    found["loaded with other patches"] = partial(loaded_with_other_patches, models)
    found["refused load"] = partial(refused_load, models)
    found["refused policy, RAM"] = partial(
        refused_policy, models, partial(OSError, "no RAM"), "set_policy"
    )
    found["refused policy, device"] = partial(
        refused_policy, models, out_of_memory, "restore_buffers"
    )
    found["room for a batch"] = partial(room_for_a_batch, models)
    found["block alone"] = partial(block_alone, models)
    found["first policy"] = partial(first_policy, models)
    for lacks_ram in (False, True):
        found[f"first load, {lacks_ram}"] = partial(first_load, models, lacks_ram=lacks_ram)
    found["in turns"] = partial(in_turns, models)
    found["decoded on a device"] = partial(decoded_on_a_device, models)
    found["automatic"] = partial(automatic, models)
    found |= {f"in chunks, {name}": partial(in_chunks, models, name) for name in CHUNKED}
    found["announced"] = partial(announced, models)
    return found


def answers(folder: str) -> dict[str, object]:
    """Return one value per case."""
    torch.set_num_threads(1)
    return results_of(cases(Path(folder)), unload=True)
