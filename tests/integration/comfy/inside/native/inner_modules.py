"""Runs in ComfyUI's own Python: blocks that a model or a node enters from their inner modules."""

from contextlib import nullcontext, suppress
from functools import partial

import comfy.model_management
import torch

from ..checks import for_each, refused, require
from ..families import load_lora, sample, write_lora
from ..further_families import FURTHER
from ..incidents import Interrupt, failing, out_of_memory
from ..patches import _replaced, node_results
from ..tiny_models import WAN, Files, counted_patches, figures, has_ended, one_by_one, same
from .models import compare

setup = Files
STEPS = 3
CHUNKS = 12
run = partial(sample, family=WAN, steps=STEPS)


def in_parts(model, *, below=2.0):
    """Compute blocks from their modules in the steps `below` a sigma, the MLP in token chunks.

    Packs with other kinds of attention do so.
    """
    network = model.model.diffusion_model

    def change(args, original, index):
        if args["transformer_options"]["sigmas"][0] >= below:
            return dict(original(args))
        block = network.blocks[index]
        hidden = args["img"]
        hidden = hidden + block.self_attn(block.norm1(hidden), args["pe"])
        hidden = hidden + block.cross_attn(block.norm3(hidden), args["txt"])
        parts = block.norm2(hidden).chunk(CHUNKS, dim=1)
        assert len(parts) == CHUNKS
        return {"img": hidden + torch.cat([block.ffn(part) for part in parts], dim=1)}

    return _replaced(model, change)


def nested(model, *, whole):
    """Sample with an adapter in block 3, made from a module of block 1 or the `whole` block."""
    blocks = model.model.diffusion_model.blocks
    given = []

    def keep(_, *inputs):
        given[:] = inputs

    def add(_, __, output):
        inner = blocks[1](*given[0], **given[1]) if whole else blocks[1].ffn(output)
        return output + 0.1 * inner

    with (
        blocks[3].register_forward_pre_hook(keep, with_kwargs=True),
        blocks[3].cross_attn.register_forward_hook(add),
    ):
        return run(model)


@for_each("layerwise", "resident", "RAM")
def check_a_node_may_compute_blocks_from_their_modules(files, policy):
    """An MLP called for each piece of the tokens is fetched once per visit."""
    plain = run(files.native(WAN))
    found = compare(files, WAN, lambda model: run(in_parts(model)), policy=policy, plain=plain)
    assert found.visits == STEPS * found.blocks
    assert found.first_recompiled == 0


@for_each("layerwise", "RAM")
def check_such_calls_fetch_and_patch_a_block_once(files, policy):
    """An MLP called for each piece of the tokens costs no more than one that is called once."""
    found = []
    for change in (load_lora, lambda model, path: in_parts(load_lora(model, path))):
        model = change(files.streamed(WAN, policy=policy), files.lora())
        with counted_patches() as added:
            run(model)
        counts = figures(model)
        found.append((added, counts.visits, counts.fetches, counts.bytes))
    assert found[0] == found[1]
    assert found[0][0] > [0]


def _three_runs(files, run, policy, share="off"):
    """Run three times, after blocks were only called whole. Return all notes."""
    expected, model = files.pair(run, WAN, policy=policy, share=share)
    assert not torch.equal(sample(files.native(WAN), WAN, steps=STEPS), expected)
    notes = [note for _ in range(3) for note in same(run, model, expected)]
    assert figures(model).recompiled == 0
    return notes


@for_each("layerwise", "block swap")
def check_a_node_may_begin_to_do_so_in_a_later_step(files, policy):
    (note,) = _three_runs(files, lambda model: run(in_parts(model, below=0.95)), policy)
    assert note.startswith("call 1 was repeated: another node used modules of block ")


@for_each(
    (False, "layerwise", "off"), (False, "RAM", "off"), (False, "layerwise", "on"),
    (True, "block swap", "off"), (True, "resident", "off"), (True, "layerwise", "on"),
)  # fmt: skip
def check_a_block_may_be_used_inside_another_one(files, whole, policy, share):
    with one_by_one() if share == "on" else nullcontext():
        _three_runs(files, partial(nested, whole=whole), policy, share)


def check_modules_may_be_used_outside_a_run(files):
    """An interrupt there does not keep the engine, and detaching removes all hooks."""
    native = files.native(WAN)
    model = files.streamed(WAN)
    hidden = torch.ones(1, 4, WAN.settings["dim"])
    results = []
    for each in (native, model):
        comfy.model_management.load_models_gpu([each])
        block = each.model.diffusion_model.blocks[2]
        results.append(torch.cat([block.self_attn.q(hidden), block.ffn(hidden)]))
    assert torch.equal(*results)
    assert not model.weights.running
    with suppress(Interrupt), failing(model, Interrupt, at=1):
        block(hidden, torch.zeros(1, 6, hidden.shape[-1]), None, None)
    assert torch.equal(run(model), run(native))
    assert not model.weights.running
    model.detach()
    modules = model.model.diffusion_model.modules()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in modules)


def check_hooks_inside_blocks_go_with_the_node_that_needed_them(files):
    model = files.streamed(WAN)
    nested(model, whole=False)
    assert model.model.runs._hooks_inside
    run(model)
    assert not model.model.runs._hooks_inside


def check_a_weight_that_is_read_directly_is_refused(files):
    model = files.streamed(WAN).clone()
    network = model.model.diffusion_model

    def read(apply, call):
        weight = network.blocks[0].ffn[0].weight
        torch.nn.functional.linear(torch.ones(1, weight.shape[-1]), weight)
        return apply(call["input"], call["timestep"], **call["c"])

    model.set_model_unet_function_wrapper(read)
    words = "ffn.0.weight of block 0 of 'model' was used outside a visit of the block"
    refused(lambda: run(model), words, "as Load Diffusion Model does")


def _animate():
    """Return Wan Animate 2, which never calls a block itself."""
    require("wan_animate2" in FURTHER, "Wan Animate 2")
    return FURTHER["wan_animate2"]


@for_each((ValueError, 1), (Interrupt, 8), (out_of_memory, 1), (out_of_memory, 8))
def check_an_error_between_two_modules(files, error, at):
    run = partial(sample, family=_animate(), steps=STEPS)
    expected, model = files.pair(run, _animate(), policy="block swap")
    with failing(model, error, at):
        if error is out_of_memory:
            assert torch.equal(run(model), expected), "the call is repeated"
        else:
            refused(lambda: run(model), kind=error)
    has_ended(run, model, expected)


def _compare_animate(files, run, **options):
    plain = sample(files.native(_animate(), options.get("form", "fp32")), _animate(), steps=STEPS)
    compare(files, _animate(), run, plain=plain, **options)


@for_each(("bf16", "layerwise"), ("fp8 kept", "RAM"))
def check_animate_2_with_a_lora(files, form, policy):
    weights = _animate().weights()
    path = files.folder / "animate_lora.safetensors"
    write_lora("lora", path, {key: each for key, each in weights.items() if "blocks." in key[:7]})

    def with_lora(model):
        return sample(load_lora(model, path), _animate(), steps=STEPS)

    _compare_animate(files, with_lora, form=form, policy=policy)


def check_animate_2_with_its_cache(files):
    """With the node's cache, later steps compute only parts of each block."""
    family = _animate()
    from comfy_extras import nodes_wan

    def with_cache(model):
        given = {"model": model, "device": "cpu", "dtype": "default"}
        (model,) = node_results(nodes_wan.WanAnimate2Cache, **given)
        return sample(model, family, steps=STEPS)

    _compare_animate(files, with_cache)
