"""Runs in ComfyUI's Python: shared visits, errors, short memory, policies and events of runs."""

import gc
import itertools
import math
import re
import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import comfy.ldm.wan.model
import comfy.model_management as mm
import torch
from comfy import model_patcher, patcher_extension, samplers

from wanstream.host import ShareVisits, current_host
from wanstream.host.comfy import versions
from wanstream.host.comfy.native.runs import lanes
from wanstream.host.comfy.native.runs import policy as native_policy
from wanstream.host.comfy.native.streamed.weights import NativeWeights
from wanstream.host.events import Executing
from wanstream.offload import OffloadEngine
from wanstream.plan import AutoOffload, OffloadPolicy
from wanstream.plan.programs import step_visits
from wanstream.tests.support.checked_device import checked_machine
from wanstream.tests.support.offload.alive_tensors import Alive

from .. import tiny_models
from ..checks import for_each, refused
from ..families import FAMILIES, sample
from ..incidents import Incident, Interrupt, failing, in_blocks, out_of_memory
from ..patches import _run, on_clone, run_function
from ..tiny_models import (
    LAYERWISE,
    LIMITS,
    SHARED,
    WAN,
    Files,
    figures,
    load_native,
    one_by_one,
    with_free,
)
from .life import listed

STEPS = 3
WrappersMP = patcher_extension.WrappersMP
run = partial(sample, family=WAN, steps=STEPS)
same = partial(tiny_models.same, run)
has_ended = partial(tiny_models.has_ended, run)
APART_OR_NOT = "off", "on"


class Models(Files):
    """Models of Wan's family, as the changes to them stay."""

    def native(self, *given):
        self.forget()
        return super().native(*given)

    @cached_property
    def expected(self):
        return run(self.native(WAN))

    def pair(self, policy="layerwise", share="on"):
        return self.expected, self.streamed(WAN, policy=policy, share=share)


def setup(folder):
    """No two conditions fit into one pass."""
    with one_by_one():
        yield Models(folder)


def with_callback(clone):
    clone.add_callback(patcher_extension.CallbacksMP.ON_PREPARE_STATE, lambda *_: None)


def attention_patch(call):
    return call["x"] * 1.01


def _compiled(block):
    """Leave a block as `compile` does, whose first call takes ten seconds."""
    block._compiled_call_impl = block._call_impl


def set_option(clone, **option):
    clone.model_options["transformer_options"] |= option


def _counting(forward):
    """Return another pack's forward, whose result depends on its call count."""
    calls = itertools.count(1)
    return lambda *inputs, **more: forward(*inputs, **more) * (1 + 0.01 * (next(calls) % 3))


def network(model):
    return model.model.diffusion_model


def _layer(model):
    return network(model).blocks[1].ffn


def _counted(module, method="forward"):
    return _counting(partial(getattr(type(module), method), module))


def with_object_patch(clone):
    clone.add_object_patch("diffusion_model.blocks.1.ffn.forward", _counted(_layer(clone)))


def with_injection(clone):
    layer = _layer(clone)

    def inject(_):
        layer.forward = _counted(layer)

    def eject(_):
        del layer.forward

    clone.set_injections("test", [model_patcher.PatcherInjection(inject, eject)])


def with_method(clone):
    network(clone).forward_orig = _counted(network(clone), "forward_orig")


def with_hook(clone):
    counted = _counting(lambda hidden: hidden)
    _layer(clone).register_forward_hook(lambda _, inputs, output: counted(output))


def with_subclass(clone):
    layer = _layer(clone)
    counted = _counted(layer)
    forward = {"forward": lambda _, hidden: counted(hidden)}
    layer.__class__ = type("Replaced", (type(layer),), forward)


WHOLE_PASSES = {
    "the apply_model wrapper counting": lambda clone: clone.add_wrapper_with_key(
        WrappersMP.APPLY_MODEL, "counting", _run
    ),
    "the replaced apply_model": lambda clone: clone.add_object_patch(
        "apply_model", partial(_run, clone.model.apply_model)
    ),
    "the on_prepare_state callback with_callback": with_callback,
}
"""Changes that may count passes, by the reason against shared visits. `models.py` has more."""
IN_LAYERS = {
    "the attn2_patch attention_patch": (lambda clone: clone.set_model_attn2_patch(attention_patch),
        True),
    "the optimized_attention_override _run": (
        partial(set_option, optimized_attention_override=_run), True),
    "the cache SimpleNamespace": (partial(set_option, cache=SimpleNamespace()), True),
    "the compiled blocks.1": (lambda clone: _compiled(network(clone).blocks[1]), True),
    "the replaced blocks.1.ffn.forward": (with_object_patch, False),
    "the replaced blocks.1.ffn.forward ": (with_injection, False),
    "the replaced forward_orig": (with_method, False),
    "the hook with_hook": (with_hook, False),
    "the replaced blocks.1.ffn.forward  ": (with_subclass, False),
}  # fmt: skip
"""Changes inside the layers, and whether the result does not depend on the order of passes."""


def _changed(models, change, share, runs=1):
    """Run with another node's change. Return what equals ComfyUI's result, and the counts."""
    expected = run(on_clone(change)(models.native(WAN)))
    model = on_clone(change)(models.streamed(WAN, share=share))
    return [torch.equal(run(model), expected) for _ in range(runs)], figures(model)


def _apart(models, reason, change=lambda clone: None, share="auto"):
    """Check that conditions do not share visits, for a reason. Return the note."""
    equal, found = _changed(models, change, share, runs=2)
    assert equal == [True, True]
    assert found.recompiled == 0
    assert found.visits == 2 * STEPS * WAN.settings["num_layers"]
    (note,) = found.notes
    assert note.startswith(f"no shared visits, because of {reason.strip()}")
    return note


@for_each(*((reason, share) for reason in WHOLE_PASSES for share in ("on", "auto")))
def check_passes_that_a_node_may_count_stay_apart(models, reason, share):
    _apart(models, reason, WHOLE_PASSES[reason], share)


@for_each(*IN_LAYERS)
def check_code_in_layers_shares_visits_only_if_required(models, reason):
    change, stateless = IN_LAYERS[reason]
    equal, apart = _changed(models, change, "auto")
    assert equal == [True]
    (note,) = apart.notes
    assert note.startswith(f"no shared visits, because of {reason.strip()}")
    assert note.endswith('("on" in share_visits shares them all the same)')
    equal, together = _changed(models, change, "on")
    assert equal == [stateless]
    assert together.notes == [SHARED]
    assert apart.visits > together.visits


def check_replaced_functions_of_a_class_or_a_module_are_seen(models):
    module = comfy.ldm.wan.model
    attention = module.optimized_attention
    forward = module.WanAttentionBlock.forward

    class Callable:
        def __call__(self, *given, **more):
            return attention(*given, **more)

    for place, name, function in (
        (module, "optimized_attention", lambda *given, **more: attention(*given, **more)),
        (module, "optimized_attention", partial(lambda *given, **more: attention(*given, **more))),
        (module, "optimized_attention", Callable()),
        (module.WanAttentionBlock, "forward", lambda *given, **more: forward(*given, **more)),
    ):
        in_block = "" if place is module else "blocks.0."
        with patch.object(place, name, function):
            _apart(models, f"the replaced {in_block}{name}")


def check_untested_models_share_no_visits_by_themselves(models):
    with patch.object(versions, "LOCKSTEP_MODELS", frozenset()):
        _apart(models, "the untested model WAN21")


def _free(nbytes):
    return patch.object(type(current_host().memory), "free_vram", lambda _: nbytes)


def check_no_visits_are_shared_without_memory_for_activations(models):
    with _free(1_000_000):
        note = _apart(models, "the memory")
    assert note.endswith(": 2 conditions at once may need 2.00 MB, 1.00 MB are free")


@contextmanager
def planned(policy=None, apart_s=0.0, shared_s=0.0):
    """Replace the planner by the policy, or the present one, and by seconds per call.

    Yield what the planner is asked.
    """
    asked = list[SimpleNamespace]()

    def choose(*_, **given):
        asked.append(SimpleNamespace(**given))
        call_s = apart_s if given["keep_present"] else shared_s
        return SimpleNamespace(policy=policy or given["present"], call_s=call_s)

    with patch.object(native_policy, "plan_passes", choose):
        yield asked


TOO_LONG = (
    "no shared visits, because of the time: more blocks in the memory that the conditions need"
)


@for_each((0.5, True), (0.97, False))
def check_automatic_policies_may_share_visits(models, faster, shares):
    expected, model = models.pair(AutoOffload(), "auto")
    blocks = len(model.model.weights.blocks)
    with planned(apart_s=1.0, shared_s=faster) as asked:
        for _ in range(2):
            (note,) = same(model, expected)
            assert note.startswith(SHARED if shares else TOO_LONG)
            assert figures(model).visits == (STEPS + 1 if shares else 2 * STEPS) * blocks
        # Passes with and without shared visits, after the first call of the first run.
        assert [each.passes for each in asked] == [1, 2]
        with _free(1000):
            (note,) = same(model, expected)
    reason = "memory" if shares else "time"
    assert note.startswith(f"no shared visits, because of the {reason}: ")


def check_settings_of_earlier_runs_do_not_decide(models):
    expected, model = models.pair(AutoOffload(), "auto")
    with planned(apart_s=1.0, shared_s=0.5):
        run(model, cfg=1.0)
        assert figures(model).notes == []
        assert same(model, expected) == [SHARED]
        for mode, found in (("off", []), ("on", [SHARED])):
            model = models.streamed(WAN, policy=AutoOffload(), share=mode)
            assert same(model, expected) == found
            model = model.clone()
            model.streaming = replace(model.streaming, share_visits=ShareVisits.AUTO)
            assert same(model, expected) == [SHARED]
        model = models.streamed(WAN, share="auto")
        assert same(model, expected) == [SHARED]
        model = model.clone()
        model.with_settings(replace(model.streaming, policy=AutoOffload()))
        assert same(model, expected) == [SHARED]


def check_conditions_with_room_for_one_pass_later(models):
    expected, model = models.pair(share="auto")
    assert same(model, expected) == [SHARED]
    with patch.object(comfy.model_base.BaseModel, "memory_required", lambda *_, **__: 0):
        assert same(model, run(models.native(WAN))) == []


LOST = "out of memory in call 1: the conditions no longer share visits"
STOPPED = "no shared visits, because of a call that was out of memory with them"


@for_each((ValueError, 1), (Interrupt, 5), (ValueError, 9), (Interrupt, 9))
def check_an_error_of_one_condition_ends_the_run(models, error, at):
    expected, model = models.pair()
    run(model)
    with failing(model, error, at):
        refused(lambda: run(model), kind=error)
    has_ended(model, expected)


@contextmanager
def short_of_memory(model, times):
    """Let a run's second model call run out of memory `times` times."""
    run(model)
    at = 3 * len(model.model.weights.blocks)
    hooks_allowed = patch.object(lanes, "foreign_layers", lambda _: iter(()))
    with hooks_allowed, failing(model, out_of_memory, at=at, times=times):
        yield


@for_each("off", "on", "auto")
def check_calls_without_memory_take_a_smaller_policy(models, share):
    expected, model = models.pair(OffloadPolicy.block_swap(1), share)
    with short_of_memory(model, times=2):
        notes = same(model, expected)
    assert len([note for note in notes if note.startswith("out of memory in call ")]) == 2
    has_ended(model, expected)
    if share == "auto":
        smaller = "out of memory in call 1: block_swap 3, 1 ahead instead of block_swap 1, 1 ahead"
        assert notes == [SHARED, LOST, STOPPED, smaller]
        assert same(model, expected) == [STOPPED]


@for_each(*APART_OR_NOT)
def check_runs_end_in_words_where_no_policy_is_smaller(models, share):
    expected, model = models.pair(OffloadPolicy.layerwise(2), share)
    with short_of_memory(model, times=9):
        message = refused(partial(run, model), "make the video or image smaller")
    assert message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    has_ended(model, expected)


@for_each(
    ("wan_t2v", "blocks.*.ffn"),
    ("flux", "double_blocks.*.img_mlp"),
    ("qwen_image", "transformer_blocks.*.img_mlp"),
)
def check_feed_forwards_in_chunks(models, name, kind):
    """Feed-forwards in chunks by the policy, then in larger ones after an error."""
    batch, channels, *frames, _, _ = FAMILIES[name].sizes[0]
    family = replace(FAMILIES[name], sizes=((batch, channels, *[1] * len(frames), 14, 14),))
    run = partial(sample, family=family, steps=2, cfg=1.0)
    expected = run(models.native(family))
    model = models.streamed(family, policy=replace(LAYERWISE, chunk_tokens=16))
    notes = tiny_models.same(run, model, expected)
    pattern = re.compile(r"feed-forwards \((.*)\) are computed in chunks of 16")
    assert {found[1] for found in map(pattern.search, notes) if found} == {kind}
    model.policy = LAYERWISE
    at = len(model.model.weights.blocks) + 1
    with patch.object(native_policy, "LAST_CHUNKS", (32,)):
        with failing(model, out_of_memory, at=at):
            notes = tiny_models.same(run, model, expected)
        assert notes[0] == "out of memory in call 1: feed-forwards of 32 tokens at once"
        notes = tiny_models.same(run, model, expected)
        assert not [note for note in notes if note.startswith("out of memory")]
        assert [note for note in notes if "in chunks of 32 tokens" in note]
    modules = model.model.diffusion_model.modules()
    assert not [module for module in modules if "forward" in vars(module)]


def check_chunks_halve_the_peak_of_a_block(models):
    """ComfyUI's block of Wan with 32k tokens. Feed-forwards are four times as wide.

    Attention over so many tokens takes long. A copy in its place has the memory of a kernel
    that keeps no scores.
    """
    narrow = {"dim": 128, "num_heads": 1, "ffn_dim": 512, "num_layers": 2}
    sizes = ((1, 16, 1, 256, 512),)
    family = replace(WAN, name="wan_long", settings={**WAN.settings, **narrow}, sizes=sizes)
    peaks = []
    results = []

    def measured(forward, *inputs, **more):
        with Alive() as alive:
            result = forward(*inputs, **more)
        peaks.append(alive.peak)
        return result

    def copied(query, *_, **__):
        return query.clone()

    for chunk_tokens in (None, 2048):
        model = models.streamed(family, policy=replace(LAYERWISE, chunk_tokens=chunk_tokens))
        block = network(model).blocks[1]
        with (
            patch.object(block, "forward", partial(measured, block.forward)),
            patch.object(comfy.ldm.wan.model, "optimized_attention", copied),
        ):
            results.append(sample(model, family, steps=2, cfg=1.0))
    assert torch.equal(*results)
    # The first call in chunks compares.
    whole, _, *chunked = peaks
    # 7 / 12 activations in 0.3.64, and in 0.18.1 5 / 10, with 20 KB more.
    shares = {"0.3.": 0.584, "0.18.": 0.501}
    of_old = [share for start, share in shares.items() if versions.version().startswith(start)]
    (most,) = of_old or [0.5]
    assert max(chunked) <= most * whole


def check_an_automatic_policy_is_chosen_once_and_kept(models):
    chosen = OffloadPolicy.block_swap(3)
    expected, model = models.pair(AutoOffload(), "off")
    with planned(chosen, apart_s=0.5, shared_s=0.5) as asked:
        (note,) = same(model, expected)
        for _ in range(2):
            assert same(model, expected) == []
    # After the first call of the first run, which is layerwise.
    assert [each.present for each in asked] == [LAYERWISE]
    assert note.startswith("after the first call: 3 of 4 stream")
    assert note.endswith(" 0.500 s per call predicted")
    assert model.memory.requested == model.memory.policy == chosen


def check_other_patches_during_a_run_are_refused(models):
    expected, model = models.pair()
    other = model.clone()
    other.patches_uuid = uuid4()
    load = Incident(lambda: mm.load_models_gpu([other]), at=6)
    with in_blocks(model, load):
        words = "loads the model with other LoRAs or patches while it runs"
        refused(partial(run, model), words)
    has_ended(model, expected)


def check_a_refused_load_leaves_no_memory_unknown_to_comfyui(models):
    """A request for all weights at once, on a loaded model."""
    model = models.streamed(WAN)
    run(model)
    assert model.weights.loaded_bytes > 0
    load = partial(mm.load_models_gpu, [model], force_patch_weights=True)
    refused(load, "a node needs all weights of the model in memory")
    assert listed(model) == model.weights.loaded_bytes == 0


@for_each(("set_policy", OSError), ("restore_buffers", out_of_memory))
def check_runs_go_on_without_memory_for_better_policies(models, name, error):
    expected, model = models.pair(AutoOffload())
    method = getattr(OffloadEngine, name)
    failed = []

    def fails(engine, *inputs):
        if len(engine.buffers) > 2 - (name == "set_policy") and not failed:
            failed.append(name)
            raise error()
        return method(engine, *inputs)

    with planned(OffloadPolicy.layerwise(2)), patch.object(OffloadEngine, name, fails):
        notes = same(model, expected)
    assert failed
    assert len(model.weights.loaded_engine.buffers) == 2
    assert any(note.startswith("layerwise, 1 ahead is kept: ") for note in notes)
    assert model.memory.requested == LAYERWISE
    same(model, expected)


@for_each(
    (1, "off", 1_000_000),
    (1, "on", 2_000_000),
    # 1.5 times the estimate for both: with less, ComfyUI computes them apart.
    (2, "on", 3_000_000),
)
def check_room_for_activations(models, most, share, room):
    """An automatic policy leaves room for all conditions in a pass, if `most` fit in."""
    free = 10**9
    model = models.streamed(WAN, policy=AutoOffload(), share=share)

    def required(input_shape, **_):
        return 1e6 * input_shape[0] if input_shape[0] <= most else 1e30

    model.model.memory_required = required
    runtime = patch.object(native_policy, "runtime_for", lambda _: object())
    with planned(LAYERWISE) as asked, runtime, _free(free):
        sample(model, WAN, steps=1)
        assert model.weights.loaded_bytes + free - asked[0].budgets.vram_bytes == room


@contextmanager
def loading_again(clone):
    """A patch uses a VAE and reloads all models in a pass, as ControlNets do."""
    load = Incident(lambda: mm.load_models_gpu(mm.loaded_models(only_currently_used=True)), at=6)
    with in_blocks(clone, load):
        yield
    assert not load.left


@contextmanager
def call_inside_a_call(clone):
    inside = []

    def twice(executor, *inputs):
        if not inside:
            inside.append(True)
            samplers.calc_cond_batch(*inputs)
            inside.clear()
        return executor(*inputs)

    clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "twice", twice)
    yield


@contextmanager
def block_outside_of_a_pass(clone):
    shapes = list[torch.Size]()
    block = network(clone).blocks[2]

    def compute(apply, call):
        with patch.object(block, "forward", lambda: shapes.append(block.ffn[0].weight.shape)):
            block()
        return run_function(apply, call)

    clone.set_model_unet_function_wrapper(compute)
    yield
    assert shapes
    assert all(map(math.prod, shapes)), "the block has its weights"


@contextmanager
def call_repeated_after_an_error(clone):
    def again(call):
        options = dict(call["model_options"])
        del options["sampler_calc_cond_batch_function"]
        given = (call[name] for name in ("model", "conds", "input", "sigma"))
        compute = partial(samplers.calc_cond_batch, *given, options)
        try:
            return compute()
        except RuntimeError:
            return compute()

    clone.set_model_sampler_calc_cond_batch_function(again)
    with failing(clone, lambda: RuntimeError("made up"), at=6):
        yield


IN_BOTH = (loading_again, call_inside_a_call, call_repeated_after_an_error)


@for_each(
    *((does, share) for does in IN_BOTH for share in APART_OR_NOT), (block_outside_of_a_pass, "on")
)
def check_what_other_nodes_may_do_in_a_run(models, does, share):
    expected, model = models.pair(share=share)
    run(model)
    clone = model.clone()
    with does(clone):
        same(clone, expected, runs=2)
    assert (figures(clone).recompiled, figures(clone).steps) == (0, STEPS)


@for_each(*APART_OR_NOT)
def check_an_error_keeps_no_activations(models, share):
    """Activations are gone after an error, without garbage collection."""
    activations = list[weakref.ref[torch.Tensor]]()
    model = models.streamed(WAN, share=share)
    run(model)

    def fail(hidden):
        activation = hidden + 1
        activations.append(weakref.ref(activation))
        if len(activations) == 9:
            raise ValueError("made up")

    gc.disable()
    try:
        with suppress(ValueError), in_blocks(model, fail):
            run(model)
        assert [each() for each in activations] == [None] * 9
    finally:
        gc.enable()


@contextmanager
def on_a_checked_device(opened, source):
    """Yield the weights on a device with streams, and a function that runs passes."""
    with checked_machine() as machine:
        machine.set_device(0)
        device = torch.device("checked", 0)
        weights = NativeWeights(opened.stacks, source, quantised={}, outside_bytes=0, device=device)

        def passes(policy, count):
            _visit_blocks(weights, weights.engine(policy, device), count)

        yield weights, passes
        weights.close()


def _visit_blocks(weights, engine, passes):
    visits = step_visits([*weights.block_counts] * passes, weights.block_counts)
    with engine.run(visits) as running:
        for visit in visits:
            with running.visit(*visit):
                pass


def check_device_bytes_are_known_before_blocks_are_decoded(models):
    opened = load_native(models.path(WAN, "fp8"), "default", LAYERWISE, **LIMITS).weights
    with on_a_checked_device(opened, opened._source) as (weights, passes):
        passes(LAYERWISE, 2)
        assert weights.loaded_bytes == weights.device_bytes(LAYERWISE)


def check_a_first_call_keeps_in_ram_what_it_reads(models):
    """Room for three and a half blocks: some stay, next to staging slots for the others."""
    opened = load_native(models.path(WAN), "default", LAYERWISE, **LIMITS).weights
    sources = []

    def source():
        sources.append(opened._source())
        return sources[-1]

    with on_a_checked_device(opened, source) as (weights, passes):
        stored = weights.costs.stored_bytes
        blocks = len(weights.blocks)
        policy = weights.first_policy(int(3.5 * stored))
        passes(policy, 3)
        assert 0 < policy.ram_blocks < blocks
        reads = sources[-1].reader.bytes_read / stored
        assert reads == 3 * blocks - 2 * policy.ram_blocks
        assert weights.first_policy(0) == OffloadPolicy.layerwise()
        assert weights.first_policy(10**12).ram_blocks == blocks


@for_each((False, ["pinned"]), (True, ["pinned", "file"]))
def check_a_first_load_needs_no_ram(models, lacks_ram, sources):
    model = models.streamed(WAN, policy=AutoOffload())
    weights = model.weights
    tried = []
    weights.has_bus = True
    engine = weights.engine

    def opened(policy, device):
        tried.append(policy.source)
        if lacks_ram and policy.source == "pinned":
            raise OSError("RAM is short")
        return engine(policy, device)

    with patch.object(weights, "engine", opened):
        mm.load_models_gpu([model])
    assert tried == sources
    assert model.memory.policy.source == sources[-1]
    model.detach()


def check_models_whose_runs_take_turns_need_the_buffers_of_one(models):
    """Bytes of two models on a device with streams, after each one's runs."""
    with (
        checked_machine() as machine,
        patch.object(mm, "get_torch_device", lambda: torch.device("checked", 0)),
        with_free(2**33),
    ):
        machine.set_device(0)
        pair = [models.streamed(WAN, share="off") for _ in range(2)]
        outside = pair[0].model.weights.outside_bytes

        def held(*pair):
            return [each.model.weights.loaded_bytes - outside for each in pair]

        found = []
        for model in (*pair, *pair):
            mm.load_models_gpu([model])
            _visit_blocks(model.model.weights, model.model.weights.loaded_engine, 2)
            found.append(held(*pair))
        mm.load_models_gpu(pair)
        buffers = found[0][0]
        assert buffers > 0
        assert found == [[buffers, -outside], [0, buffers], [buffers, 0], [0, buffers]]
        assert held(*pair) == [buffers, buffers]
        mm.unload_all_models()
        del pair, model


def check_a_run_is_announced_at_the_node_that_executes(models):
    events = list[tuple[str, dict[str, Any]]]()
    model = models.streamed(WAN, share="off")
    host = current_host().events
    node = {"inputs": {"model": ["1", 0], "cfg": 3.0}}
    files = [f"{name}.safetensors" for name in ("wan_lightx2v", "wan", "wan")]
    graphs = [{"12:3": node, "1": {"inputs": {"unet_name": file}}} for file in files]
    with (
        patch.object(host, "running_graph", iter(graphs).__next__),
        patch.object(host, "announce", lambda event, given: events.append((event, dict(given)))),
        patch.object(host, "executing", lambda: Executing("item", "12:3")),
    ):
        for _ in range(2):
            run(model, sampler="heun")
        with suppress(ValueError), failing(model, lambda: ValueError("broken"), at=2):
            run(model)
        phases = [phase.name for phase in host.ledger().phases()]
    assert phases == ["first block", "model"] * 2, "the failed run ends in its first step"

    def values(kind, key):
        return [payload[key] for name, payload in events if name == f"wanstream.{kind}"]

    (distilled,), *others = values("notices", "notices")
    words = "wan_lightx2v.safetensors needs no CFG, and cfg is 3: set it to 1"
    assert distilled["text"].startswith(words)
    assert others == [[], []], "another model"
    # Visits are reported by time.
    shown = [event for event in events if event[0] not in ("wanstream.notices", "wanstream.visits")]
    calls = 2 * STEPS - 1  # heun's last step calls the model once
    heun = ["begin", *["step"] * calls, "end"]
    names = [name.removeprefix("wanstream.") for name, _ in shown]
    assert names == [*heun, *heun, "begin", "end"]
    assert {payload["shown_at"] for _, payload in shown} == {"12:3"}
    assert values("begin", "steps") == [STEPS, calls, STEPS], "a run like the last one is known"
    assert values("begin", "settings")[0]["size"].startswith("latent 1x16x")
    assert values("end", "error") == [None, None, "broken"]
    for record in values("step", "record"):
        assert record["bytes_moved"] > 0
        assert 0 < record["compute_s"] <= record["wall_s"]
