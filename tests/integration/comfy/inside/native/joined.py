"""Runs in ComfyUI's Python: two experts as one MODEL against ComfyUI's own models, bit by bit."""

import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from comfy import conds, model_base, model_management, samplers
from comfy.k_diffusion import sampling
from comfy_extras import nodes_custom_sampler

from wanstream.host import current_host
from wanstream.tests.support.polling import eventually
from wanstream.tests.support.rounding import ROUNDING

from ..checks import for_each, refused, require
from ..families import FAMILIES, load_lora, sample
from ..incidents import is_cut
from ..patches import (
    PATCHES,
    WrappersMP,
    _run,
    context_windows,
    node_results,
    on_clone,
)
from ..samplers import back_and_forth, guided, simple_sigmas, switching
from ..tiny_models import LAYERWISE, SHARED, Files, figures, has_ended, one_by_one
from ..tiny_models import WAN as HIGH
from .models import halves, traffic

LOW = replace(HIGH, name="wan_t2v_low", seed=2)
BOUNDARY = 0.875


run_advanced = partial(halves, family=HIGH, cfg=(1.0, 1.0), sampler="euler")
"""ComfyUI's graph with two KSamplerAdvanced."""


class Models(Files):
    """Both experts in files, as ComfyUI's MODELs and as streamed ones."""

    def __init__(self, folder, high=HIGH, low=LOW):
        super().__init__(folder)
        self.experts = high, low
        self.join = current_host().native.join_experts
        self.split = current_host().native.split_experts

    def plain(self, *dtypes):
        """Return ComfyUI's MODELs, new ones for each call."""
        self.forget()
        return list(map(self.native, self.experts, dtypes or ("fp32", "fp32")))

    def separate(self, *dtypes, **settings):
        pairs = zip(self.experts, dtypes or ("fp32", "fp32"), strict=True)
        return [self.streamed(*pair, **settings) for pair in pairs]

    def joined(self, *dtypes, boundary=BOUNDARY, **settings):
        return self.join(*self.separate(*dtypes, **settings), boundary)


setup = Models


def run_custom(model, sampler, *, steps=4, cfg=1.0, sigmas=None):
    """Return SamplerCustomAdvanced's latent with a SAMPLER, without `cfg` under BasicGuider."""
    positive, negative = HIGH.conditioning()
    if cfg is None:
        basic = nodes_custom_sampler.BasicGuider
        (guider,) = node_results(basic, model=model, conditioning=positive)
    else:
        guider = samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
    steps_of = simple_sigmas(model, steps) if sigmas is None else torch.tensor(sigmas)
    return guided(guider, {"samples": HIGH.latent()}, steps_of, sampler)


def switch_step(model, steps):
    sigmas = simple_sigmas(model, steps)[:-1].tolist()
    return sum(sigma * 1000 >= BOUNDARY * 1000 for sigma in sigmas)


def shifted(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Sampler function around Euler's: calls and steps have different noise levels."""

    def call(x, sigma, **more):
        return model(x, sigma * 0.97, **more)

    call.inner_model = model.inner_model
    return sampling.sample_euler(call, x, sigmas, extra_args, callback, disable)


class OwnLoop(samplers.Sampler):
    """SAMPLER that is no KSAMPLER."""

    def sample(self, *given, **more):
        return samplers.KSAMPLER(back_and_forth).sample(*given, **more)


FOREIGN = {
    "own loop": OwnLoop,
    "back and forth": partial(samplers.KSAMPLER, back_and_forth),
    "shifted": partial(samplers.KSAMPLER, shifted),
}


def compare(run, expected, model):
    """Compare two runs with ComfyUI's model bit by bit. Return the counts of each."""
    found = []
    for _ in range(2):
        assert torch.equal(run(model), expected)
        found.append(figures(model))
    return found


@for_each(
    ("euler", "simple", 4, "block swap"), ("euler", "beta", 20, "layerwise"),
    ("heun", "karras", 4, "layerwise"), ("dpm_2", "simple", 4, "block swap"),
    ("dpmpp_2m", "beta", 4, "RAM"), ("uni_pc", "simple", 4, "block swap"),
    ("res_multistep", "karras", 4, "RAM"),
)  # fmt: skip
def check_ksampler_drives_both_experts(models, sampler, scheduler, steps, policy):
    """The switch moves the bytes of other steps.

    ComfyUI's samplers are dry-run, so it is predicted in the first run too.
    """
    given = {"steps": steps, "sampler": sampler, "scheduler": scheduler}
    run = partial(sample, family=HIGH, cfg=1.0, **given)
    expected = run(switching(*models.plain()))
    joined = models.joined(policy=policy)
    first, second = compare(run, expected, joined)
    assert {*first.experts} == {"high", "low"}
    assert first.experts == second.experts
    assert first.recompiled == second.recompiled == 0
    if policy == "layerwise":
        assert len({*second.bytes}) == 1


OWN_SIGMAS = [1.0, 0.9, BOUNDARY, 0.8, 0.3, 0.0]


@for_each(
    ("own loop", {"steps": 20}), ("back and forth", {"cfg": None}),
    ("shifted", {}), ("shifted", {"sigmas": OWN_SIGMAS, "cfg": None}),
)  # fmt: skip
def check_foreign_samplers_drive_both_experts(models, sampler, given):
    """Samplers with loops of their own, 20 steps, other noise levels, and BasicGuider."""
    run = partial(run_custom, sampler=FOREIGN[sampler](), **given)
    first, second = compare(run, run(switching(*models.plain())), models.joined())
    assert {*first.experts} == {"high", "low"}
    assert first.experts == second.experts
    assert second.recompiled == 0
    assert len({*second.bytes}) == 1


def check_low_noise_blocks_are_read_early(models):
    """The last high-noise call waits for the reads of all low-noise blocks, from the first run."""
    joined = models.joined(policy="RAM")
    blocks = len(joined.weights.blocks)
    read = []

    def unread():
        reads = joined.model.runs.last.session._run.reads
        return blocks - len({fetch.block for fetch in reads if fetch.block.expert == "low"})

    def wait(executor, x, t, *args, **options):
        result = executor(x, t, *args, **options)
        if joined.model.expert(t) == "high":
            read.append(eventually(lambda: unread() == 0))
        return result

    waiting = joined.clone()
    waiting.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wait)
    sample(waiting, HIGH, steps=4, cfg=1.0)
    assert read == [True] * switch_step(joined, 4)


@for_each(4, 20)
def check_two_samplers_give_the_same_bits_and_one_the_same_video(models, steps):
    """The graph with two KSamplerAdvanced, by ComfyUI's models and by the joined one."""
    high, low = models.plain()
    switch = switch_step(high, steps)
    expected = run_advanced(high, low, steps=steps, switch=switch)
    joined = models.joined()
    separate = models.separate()
    assert torch.equal(run_advanced(joined, joined, steps=steps, switch=switch), expected)
    with traffic() as of_one:
        one = sample(joined, HIGH, steps=steps, cfg=1.0)
    # Between two samplers ComfyUI removes the noise from the latent and adds it again.
    assert (one - expected).abs().max() <= ROUNDING * expected.abs().max()
    with traffic() as of_two:
        run_advanced(*separate, steps=steps, switch=switch)
    assert of_one.nbytes <= of_two.nbytes
    buffers = sum(each.weights.loaded_engine.loaded_bytes for each in separate)
    assert joined.weights.loaded_engine.loaded_bytes <= 0.51 * buffers


AROUND_A_SAMPLER = {"context windows", "EasyCache", "LazyCache"}
IN_ONE = "LoRA", "replaced forward", "shift"
"""Patches kept apart by ComfyUI's two models: they are not in the call's options."""


# A pass-counting cache counts separately in two models.
@for_each(
    "attn1 patch", "replaced blocks", "repeated layer", "function wrapper", "wrappers",
    "replaced forward", "shift", "skip-layer guidance", "EasyCache", "LazyCache", "CFGZeroStar",
    "RescaleCFG", "LoRA", "context windows",
)  # fmt: skip
def check_patches_apply_to_both_experts_or_to_one(models, name):
    """Patches on one expert before the join, on both behind it, and on one behind a split."""
    require(name != "attn1 patch" or "ltx_2" in FAMILIES, "attention patches of Wan")
    run = partial(sample, family=HIGH, steps=4, cfg=3.0)
    others = {
        "LoRA": partial(load_lora, path=models.lora()),
        "context windows": context_windows,
    }
    change = others.get(name) or PATCHES[name][0]
    high, low = models.plain()
    plain = run(switching(high, low))
    both = run(switching(change(high), change(low)))
    assert not torch.equal(both, plain) or name in AROUND_A_SAMPLER
    joined = models.joined()
    assert torch.equal(run(change(joined)), both)
    assert torch.equal(run(joined), plain)
    if name in AROUND_A_SAMPLER:
        join = partial(models.join, *models.split(change(joined)), BOUNDARY)
        refused(join, "wrapper", "which only both experts can have")
        return
    again = models.join(*models.split(change(joined)), BOUNDARY)
    assert torch.equal(run(again), both)
    if name in IN_ONE:
        of_high = run(switching(change(high), low))
        # A sampler takes the sigmas from the high-noise expert.
        assert not torch.equal(of_high, both) or name == "shift"
        ours, low = models.split(joined)
        assert torch.equal(run(models.join(change(ours), low, BOUNDARY)), of_high)


@for_each(*itertools.product(("attn1 patch", "skip-layer guidance"), (0, 1)))
def check_options_of_one_expert(models, name, place):
    """ComfyUI has them in the sampler's options, hence two samplers."""
    change, _ = PATCHES[name]
    plain = models.plain()
    streamed = models.separate()
    for pair in (plain, streamed):
        pair[place] = change(pair[place])
    joined = models.join(*streamed, BOUNDARY)
    made = run_advanced(joined, joined, steps=4, switch=3)
    assert torch.equal(made, run_advanced(*plain, steps=4, switch=3))


@for_each(("fp32", "bf16"), ("fp8", "bf16"), ("fp16", "fp8"), ("bf16", "bf16"))
def check_experts_of_different_number_formats(models, high, low):
    run = partial(sample, family=HIGH, steps=4, cfg=3.0)
    compare(run, run(switching(*models.plain(high, low))), models.joined(high, low))


def check_conditions_share_the_visits_of_both_experts(models):
    run = partial(sample, family=HIGH, steps=6, cfg=3.0)
    found = {}
    with one_by_one():
        expected = run(switching(*models.plain()))
        for share in ("off", "on"):
            _, found[share] = compare(run, expected, models.joined(share=share))
            assert found[share].recompiled == 0
    assert sum(found["on"].bytes[1:]) * 2 <= sum(found["off"].bytes[1:])
    assert SHARED in found["on"].notes
    assert [name for name, _ in itertools.groupby(found["on"].experts)] == ["high", "low"]


def check_feed_forwards_of_both_experts_are_in_chunks(models):
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    joined = models.joined(policy=replace(LAYERWISE, chunk_tokens=8))
    first, _ = compare(run, run(switching(*models.plain())), joined)
    assert [note.partition("(")[2][:3] for note in first.notes] == ["hig", "low"]


def check_joined_experts_share_memory(models):
    """Joined twice, run next to their own MODELs, evicted, and dropped."""
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    high, low = models.plain()
    both = run(switching(high, low))
    streamed = models.separate()
    one, other = (models.join(*streamed, boundary) for boundary in (BOUNDARY, 0.5))
    assert torch.equal(run(one), both)
    assert torch.equal(run(streamed[0]), run(high))
    assert torch.equal(run(streamed[1]), run(low))
    assert torch.equal(run(other), run(switching(high, low, 0.5)))
    assert torch.equal(run(one), both)
    assert one.weights is other.weights
    assert one.weights.loaded_bytes > 0
    model_management.unload_all_models()
    assert one.weights.loaded_bytes == other.weights.loaded_bytes == 0
    assert torch.equal(run(one), both)
    dead = [weakref.ref(each) for each in (one.model, one.model.low, one.weights)]
    model_management.unload_all_models()
    del one, other
    gc.collect()
    assert [each() for each in dead] == [None] * 3
    assert torch.equal(run(streamed[0]), run(high))


def check_a_low_noise_file_that_is_cut_during_a_run(models):
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    expected = run(switching(*models.plain()))
    high, low = models.separate()
    joined = models.join(high, low, BOUNDARY)
    assert torch.equal(run(joined), expected)
    network = joined.model.low.diffusion_model
    twin = SimpleNamespace(weights=low.model.weights, diffusion_model=network)
    with is_cut(models.path(LOW), SimpleNamespace(model=twin), at=2):
        refused(lambda: run(joined), models.path(LOW).name, kind=OSError)
    has_ended(run, joined, expected)


@for_each("wan22_i2v", "wan_vace")
def check_experts_with_images(models, name):
    """Image experts, whose conditioning has latents and features of the picture."""
    family = FAMILIES[name]
    pair = Models(models.folder, family, replace(family, name=f"{name}_low", seed=2))
    run = partial(sample, family=family, steps=4, cfg=3.0)
    compare(run, run(switching(*pair.plain(), 0.9)), pair.joined(boundary=0.9))


def check_each_expert_has_its_own_conditioning(models):
    original = model_base.WAN21.extra_conds

    def scaled(self, **values):
        found = original(self, **values)
        bias = self.diffusion_model.head.head.bias.mean()
        text = found["c_crossattn"].cond
        return {**found, "c_crossattn": conds.CONDRegular(text * (1 + bias.to(text)))}

    joined = models.joined()
    with patch.object(model_base.WAN21, "extra_conds", scaled):
        made = run_advanced(joined, joined, steps=4, switch=3)
        assert torch.equal(made, run_advanced(*models.plain(), steps=4, switch=3))


def check_what_is_no_pair_is_refused(models):
    high, low = models.separate()
    joined = models.join(high, low, BOUNDARY)

    def of(base, **changes):
        return models.streamed(replace(FAMILIES[base], **changes))

    @on_clone
    def wrapped(clone):
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "cache", _run)

    @on_clone
    def bound(clone):
        block = clone.get_model_object("diffusion_model.blocks.0")
        clone.add_object_patch("diffusion_model.blocks.0", torch.nn.Sequential(block))

    images = {"name": "images", "settings": {**HIGH.settings, "in_dim": 36}}
    wider = {"name": "wider", "settings": {**HIGH.settings, "dim": 384}}
    swapping = models.streamed(LOW, policy="block swap")
    not_streamed = "the low-noise MODEL does not stream: connect Load Diffusion Model (streamed)"
    module = "has replaced diffusion_model.blocks.0 by a module that holds"
    refusals = [
        ((high, low, 1.5), "the boundary is 1.5: give 0 to 1"),
        ((high, low, float("nan")), "the boundary is nan"),
        ((high, of("flux"), 1), "the class is WAN21 and Flux, the latent format is Wan21 and Flux"),
        ((high, of("wan_t2v", **images), 1), "in_dim is 16 and 36"),
        ((high, of("wan_t2v", **wider), 1), "dim is 256 and 384"),
        ((high, models.plain()[1], 1), not_streamed),
        ((joined, low, 1), "the high-noise MODEL is joined already"),
        (("high", low, 1), "the high-noise MODEL does not stream"),
        ((high, swapping, 1), "connect the same policy to both loaders"),
        ((wrapped(high), low, 1), "the outer_sample wrapper cache, which only both experts can"),
        ((bound(high), low, 1), module),
    ]
    for given, words in refusals:
        refused(partial(models.join, *given), words)
    run = partial(sample, family=HIGH, steps=2, cfg=1.0)
    refused(lambda: run(bound(joined)), module)
    refused(lambda: models.split(high), "this MODEL has one expert")
    refused(joined.state_dict_for_saving, "two experts cannot be saved as one")
    merge = partial(joined.get_key_patches, "diffusion_model.")
    refused(merge, "two experts cannot be merged as one")
    joined.model.boundary = BOUNDARY
    words = "noise levels from 0.1000 to 0.9000, on both sides of the boundary 0.875"
    refused(lambda: joined.model.expert(torch.tensor([0.9, 0.1])), words)


def check_a_level_at_the_boundary_is_of_the_high_noise_expert(models):
    """Noise levels on the boundary are in fp32, which mostly rounds them."""
    model = models.joined().model
    for boundary in (0.7, 0.875, 0.9, 0.95):
        model.boundary = boundary
        assert model.expert(torch.tensor([boundary])) == "high"
