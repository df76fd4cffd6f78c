"""Runs in ComfyUI's own Python: our guider against one over the same experts loaded by ComfyUI.

Both get the same sampler object, sigmas, noise and random state.
"""

import copy
import random
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import FunctionType
from types import SimpleNamespace as Namespace

import comfy.k_diffusion.sampling
import latent_preview
import numpy
import torch
from comfy import cli_args, model_management, sample, samplers, utils
from comfy_extras import nodes_advanced_samplers, nodes_custom_sampler

from wanstream.host import current_host
from wanstream.host.auto_policy import AutoPlanner
from wanstream.host.comfy.experts.guider import ExpertsGuider
from wanstream.host.comfy.samplers import predicted_sigmas, preserve_random_state
from wanstream.nodes.guider import WanStreamGuider, WanStreamSigmas
from wanstream.plan import AutoOffload, Machine, OffloadPolicy
from wanstream.sampling import DenoiseRequest, FirstBlockCache, denoise
from wanstream.sampling.steps import NonFiniteLatentError, RequestError
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.tests.support.rounding import ROUNDING

from ..checks import for_each, refused
from ..families import _difference, _normal
from ..incidents import Interrupt
from ..patches import node_results
from ..samplers import NEAR, SEED, back_and_forth, guided, shifted, switching, texts
from ..tiny_models import logged

SHIFT = 5.0
BOUNDARY = 0.875
STEPS = 6
SHAPE = (1, 16, 2, 8, 6)
GUIDANCE = (4.0, 3.0)
SEEDLESS = {"euler_ancestral", "dpmpp_sde", "heunpp2", "lcm", "sa_solver", "seeds_2"}
"""Samplers that draw from the global random state if they get no seed."""
ADAPTIVE = "dpm_adaptive"
"""A sampler whose calls depend on the latents, and so cannot be predicted."""
UNPREDICTED = {*SEEDLESS, ADAPTIVE, "euler", "uni_pc"}
"""Samplers that also run without a dry run."""


class NativePair(samplers.CFGGuider):
    """Both experts as ComfyUI loads them, each with its guidance."""

    def __init__(self, high, low, guidance):
        super().__init__(switching(high, low, BOUNDARY))
        self.guidance = guidance
        self.calls = []

    def predict_noise(self, x, timestep, *args, **more):
        is_low = float(timestep[0]) * 1000 < BOUNDARY * 1000
        self.calls.append("low" if is_low else "high")
        self.set_cfg(self.guidance[is_low])
        return super().predict_noise(x, timestep, *args, **more)


class Unpredicted(ExpertsGuider):
    """Our guider without a dry run."""

    def _predict_sigmas(self, *_):
        return []


class Side:
    """Both guiders for one kind of expert, and runs with no other difference."""

    def __init__(self, folder, kind):
        self.folder = folder
        high, low = (folder / f"{kind}_{name}.safetensors" for name in ("high", "low"))
        self.ref = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
        self.natives = [shifted(high, SHIFT), shifted(low, SHIFT)]
        self.sides = texts(12, 9)

    def with_values(self, **values):
        """Return the same experts, with more values next to both texts."""
        changed = copy.copy(self)
        changed.sides = [[[text, {**given, **values}]] for ((text, given),) in self.sides]
        return changed

    def ours(self, scales=GUIDANCE, **changes):
        sides = dict(zip(("positive", "negative"), self.sides, strict=True))
        given = {**sides, "boundary_ratio": BOUNDARY, "flow_shift": SHIFT, **changes}
        high, low = scales
        node = WanStreamGuider.execute(self.ref, **given, guidance_high=high, guidance_low=low)
        return node.args[0]

    def unpredicted(self, guider):
        plain = Unpredicted(guider.host, guider.model_patcher, guider.settings, guider.requested)
        plain.set_conds(*self.sides)
        return plain

    def theirs(self, guidance=GUIDANCE):
        guider = NativePair(*self.natives, guidance)
        guider.set_conds(*self.sides)
        return guider

    def request(self, noise, **more):
        """Return the same run for our own sampler."""
        positive, negative = (text for ((text, _),) in self.sides)
        experts = {"guidance": GUIDANCE, "boundary_ratio": BOUNDARY}
        given = {"sigmas": simple_sigmas(), "solver": "euler", **experts, **more}
        return DenoiseRequest(noise, positive, negative=negative, **given)

    def by_our_sampler(self, noise, **more):
        """Return our own sampler's raw latent and timeline."""
        pair = current_host().models.experts(self.ref)
        policy = OffloadPolicy.layerwise()
        run = denoise(pair, self.request(noise, **more), policy=policy, device="cpu")
        raw = self.ours().model_patcher.model.process_latent_out(run.latents)
        return raw, run.timeline

    def check(self, sampler="euler", sigmas=None, guidance=GUIDANCE, **run):
        """Run both guiders, compare the results, and return ours."""
        guiders = (self.ours(guidance), self.theirs(guidance))
        ours, theirs = (sampled(guider, sampler, sigmas, **run) for guider in guiders)
        assert _difference(ours, theirs) <= NEAR
        return ours


def sampled(guider, sampler="euler", sigmas=None, *, seed=SEED, latent=None, noise=None, **more):
    """A run as SamplerCustomAdvanced makes it, the random state set to the same start."""
    if isinstance(sampler, str):
        sampler = samplers.sampler_object(sampler)
    elif isinstance(sampler, FunctionType):
        sampler = samplers.KSAMPLER(sampler)
    sigmas = simple_sigmas() if sigmas is None else sigmas
    latent = torch.zeros(SHAPE) if latent is None else latent
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    noise = sample.prepare_noise(latent, SEED) if noise is None else noise
    # A copy: some samplers write into their sigmas.
    given = (noise, latent, sampler, sigmas.clone())
    return guider.sample(*given, seed=seed, disable_pbar=True, **more)


def simple_sigmas(name="euler"):
    """Sigmas as KSampler makes them for a sampler."""
    discard = name in samplers.KSampler.DISCARD_PENULTIMATE_SIGMA_SAMPLERS
    sigmas = current_host().models.sigmas("simple", STEPS + discard, 1.0, SHIFT)
    return torch.cat([sigmas[:-2], sigmas[-1:]]) if discard else sigmas


def _state():
    kind, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), kind, keys.tolist(), rest, random.getstate()]


# With "_gpu" in the name they draw their noise on a GPU.
@for_each(*(name for name in samplers.SAMPLER_NAMES if not name.endswith("_gpu")))
def check_sampler(side, name):
    sampler = name
    sigmas = simple_sigmas(name)
    if name == ADAPTIVE:  # coarse, and so with few calls
        sampler = samplers.ksampler(name, {"rtol": 0.5, "atol": 0.5})
    ours = side.ours()
    theirs = side.theirs()
    result = sampled(ours, sampler, sigmas)
    after = _state()
    native = sampled(theirs, sampler, sigmas)
    assert native.isfinite().all()
    assert _difference(result, native) <= NEAR
    assert [step.expert for step in ours.timeline.steps] == theirs.calls
    assert {*theirs.calls} == {"high", "low"}
    if name in UNPREDICTED:
        plain = side.unpredicted(ours)
        # Tried beforehand or not: the same bits, and the random state is left as it was.
        assert torch.equal(sampled(plain, sampler, sigmas), result)
        assert _state() == after
        assert plain.recompiled > 0
    if name != ADAPTIVE:
        assert ours.recompiled == 0
        # Every call moves each block once, for all lanes. A run before may have left blocks for the
        # first one.
        first, *others = [step.bytes_moved for step in ours.timeline.steps]
        assert first <= max(others)
        assert len({*others}) == 1
    if name in SEEDLESS:
        seedless = [sampled(guider, sampler, sigmas, seed=None) for guider in (ours, plain)]
        assert torch.equal(*seedless)


def check_schedules(side):
    assert len(samplers.SAMPLER_NAMES) >= 42
    names = current_host().models.schedule_names()
    assert names == [*samplers.SCHEDULER_NAMES, "wan"]
    for name in names:
        whole = {"steps": STEPS, "denoise": 1.0}
        part = {"steps": 3, "denoise": 0.5}
        given = partial(WanStreamSigmas.execute, name, flow_shift=SHIFT)
        sigmas = [given(**length).args[0] for length in (whole, part)]
        if name == "wan":
            side.check("dpmpp_2m", sigmas[0])
        else:
            basic = nodes_custom_sampler.BasicScheduler
            for ours, length in zip(sigmas, (whole, part), strict=True):
                native = node_results(basic, model=side.natives[0], scheduler=name, **length)
                assert torch.equal(ours, native[0]), name


@for_each((1.0, 1.0, 6), (1.0, 3.0, 9), (4.0, 1.0, 9))
def check_guidance_of_one(side, high, low, fewest):
    """Guidance 1 computes no negative unless the sampler reads it."""
    guidance = (high, low)
    for name, count in (("euler", fewest), ("euler_cfg_pp", 12)):
        guider = side.ours(guidance)
        lanes = []
        pair = guider.model_patcher.model.pair
        models = pair.engine(guider.model_patcher.policy, "cpu").models
        for expert in ("high", "low"):
            models[expert].blocks[0].register_forward_hook(lambda *_, lanes=lanes: lanes.append(1))
        result = sampled(guider, name)
        pair.close()
        assert len(lanes) == count
        assert _difference(result, sampled(side.theirs(guidance), name)) <= NEAR


GUIDANCE_OPTIONS = {
    "sampler_cfg_function": lambda call: call["uncond"] + call["cond"] * call["cond_scale"] * 0.5,
    "sampler_pre_cfg_function": [lambda call: call["conds_out"][::-1]],
    "sampler_post_cfg_function": [lambda call: call["denoised"] - 0.1 * call["uncond_denoised"]],
}


@for_each(*GUIDANCE_OPTIONS)
def check_guidance_of_other_packs(side, name):
    """The real function uses guidance options from other packs, with an effect."""
    guiders = side.ours(), side.theirs()
    plain = sampled(guiders[0])
    for guider in guiders:
        guider.model_options = {**guider.model_options, name: GUIDANCE_OPTIONS[name]}
    ours, theirs = map(sampled, guiders)
    assert _difference(ours, theirs) <= NEAR
    assert _difference(ours, plain) > 0.01


@for_each("euler", "dpmpp_2m", "ddim")
def check_mask(side, name):
    latent = _normal(*SHAPE, seed=3)
    mask = torch.zeros(1, 1, *SHAPE[2:])
    mask[..., :4] = 1
    mask[:, :, 1:, :, 2:5] = 0.5
    for start in (0, 2):
        result = side.check(name, simple_sigmas()[start:], latent=latent, denoise_mask=mask)
        assert (result - latent)[:, :, :1, :, 5:].abs().max() <= 1e-5, "kept"


@for_each((2, 9, 8), (2, 8, 5), (1, 7, 9))
def check_odd_sizes(side, *size):
    """Latents whose sides do not divide into patches: ComfyUI pads them."""
    zeros = torch.zeros(1, 16, *size)
    native = side.check(latent=zeros)
    mask = _normal(1, 1, *size, seed=5).sigmoid()
    side.check(latent=_normal(2, 16, *size, seed=3), denoise_mask=mask)
    ours, _ = side.by_our_sampler(sample.prepare_noise(zeros, SEED))
    assert _difference(ours, native) <= NEAR


def check_batch(side):
    """A batch equals single samples, and moves the bytes of one, as in our sampler."""
    zeros = torch.zeros(2, *SHAPE[1:])
    together = side.ours()
    alone = side.ours()
    noise = sample.prepare_noise(zeros, SEED)
    both = sampled(together, "dpmpp_2m", latent=zeros)
    assert torch.equal(both[1:], sampled(alone, "dpmpp_2m", noise=noise[1:].clone()))
    _, of_sampler = side.by_our_sampler(noise)
    # A run before may have left blocks for the first call.
    timelines = (together.timeline, alone.timeline, of_sampler)
    moved = [[step.bytes_moved for step in each.steps[1:]] for each in timelines]
    assert moved[0] == moved[1] == moved[2]
    side.check("dpmpp_2m", latent=zeros)


def slow_machine(*_):
    """One whose disk is slow."""
    names = ("flops", "decode_bytes", "copy_bytes", "quantise_bytes")
    rates = {f"{name}_per_s": 1e9 for name in names}
    memory = {"vram_bytes": 0, "ram_bytes": 10**12, "bus": None, "disk_bytes_per_s": 1e3}
    return Machine(name="made up", origin="made up", **memory, **rates)


@contextmanager
def planned_by(planner):
    """Replace the planner, and collect the predictions that runs announce."""
    host = current_host()
    announced = []
    before = host.memory.planner
    host.open_experts.free()
    host.memory.planner = planner
    host.events.announce = lambda event, payload: (
        announced.append(payload["predicted"]) if event == "wanstream.begin" else None
    )
    try:
        yield announced
    finally:
        host.memory.planner = before
        del host.events.announce
        host.open_experts.free()


def check_predicted_calls(side):
    """Heun calls the model twice in every step but the last one."""
    with planned_by(AutoPlanner(stored=lambda *_: None)) as unknown:
        sampled(side.ours(), "heun")
    assert unknown == [None]
    with planned_by(AutoPlanner(stored=slow_machine)) as known:
        guider = side.ours()
        sampled(guider, "heun")
    (predicted,) = known
    facts = itemgetter("index", "expert", "sigma", "bytes_moved", "read_bytes")
    steps = [step.to_dict() for step in guider.timeline.steps]
    assert predicted["kind"] == "simulated"
    assert len(steps) == 11
    assert [*map(facts, predicted["steps"])] == [*map(facts, steps)]


@for_each({}, {"cache": FirstBlockCache(threshold=0.55)})
def check_planned_policy(side, chosen):
    """Policies left to the planner, twice. The first step shows a fast disk.

    A first-block cache keeps the first block.
    """
    whole = sampled(side.ours(**chosen), "heun")
    with planned_by(AutoPlanner(slow_machine)):
        guider = side.ours(**chosen, policy=AutoOffload())
        assert torch.equal(sampled(guider, "heun"), whole)
        assert torch.equal(sampled(guider, "heun"), whole)
    assert guider.timeline.changes[0].startswith("chosen: ")
    moved = sum(step.bytes_moved for step in guider.timeline.steps)
    assert moved == 0, "with so slow a disk both experts stay"
    assert guider.model_patcher.policy.pin_first_block == bool(chosen)


def check_split_sigmas(side):
    """The second half continues without added noise, as with DisableNoise."""
    sigmas = simple_sigmas()
    half = side.check(sigmas=sigmas[:4])
    rest = side.check(sigmas=sigmas[3:], latent=half, noise=torch.zeros(SHAPE))
    assert _difference(rest, side.check()) <= ROUNDING


def check_endless_sampler(side):
    """A sampler that never accepts a step is tried for a while."""
    sampler = samplers.ksampler(ADAPTIVE, {"accept_safety": 1e9})
    patcher = side.ours().model_patcher
    guider = Namespace(inner_model=patcher.model, model_patcher=patcher)
    assert len(predicted_sigmas(guider, sampler, simple_sigmas(), SEED)) == 2000


def check_interrupt(side):
    """Cancel while a block computes: the run ends before the next block."""
    guider = side.ours()
    whole = sampled(guider, "heun")
    visited = []

    def cancel(*_):
        visited.append(1)
        if len(visited) == 3:
            model_management.interrupt_current_processing(True)

    patcher = guider.model_patcher
    models = patcher.model.pair.engine(patcher.policy, torch.device("cpu")).models
    hooks = [block.register_forward_hook(cancel) for block in models["high"].blocks]
    refused(lambda: sampled(guider, "heun"), kind=Interrupt)
    for hook in hooks:
        hook.remove()
    # The third lane cancels the run: the other lane finishes the block.
    assert len(visited) == 4
    assert not model_management.processing_interrupted()
    assert torch.equal(sampled(guider, "heun"), whole)


def check_failing_sampler(side):
    """A failure in the middle of sampling leaves everything usable.

    ComfyUI unloads all models after its own error of a lack of memory.
    """
    guider = side.ours()
    whole = sampled(guider)

    def fail(step, *_):
        if step == 2:
            raise model_management.OOM_EXCEPTION("made up")

    refused(lambda: sampled(guider, callback=fail), kind=model_management.OOM_EXCEPTION)
    model_management.unload_all_models()
    assert guider.model_patcher.loaded_size() == 0
    assert torch.equal(sampled(guider), whole)


def check_eviction(side):
    """A preview loads a VAE in the middle of a run, with too little free memory."""
    guider = side.ours()
    whole = sampled(guider)
    patcher = guider.model_patcher
    cpu = torch.device("cpu")
    during = []

    def evict(step, *_):
        if step == 1:
            freed = patcher.partially_unload(cpu, 10)
            loaded = [each.model for each in model_management.current_loaded_models]
            during.append((freed, patcher in loaded))
        if step == 3:
            model_management.unload_all_models()
            during.append(patcher.loaded_size() > 0)

    assert torch.equal(sampled(guider, callback=evict), whole)
    assert during == [(10, True), True]
    model_management.load_models_gpu([patcher])
    patcher.detach()
    assert patcher.loaded_size() == 0


def check_random_state(_):
    """It is restored after a trial in which a sampler draws and seeds, or fails."""
    before = _state()

    @preserve_random_state()
    def trial():
        torch.manual_seed(9)
        torch.rand(3), numpy.random.rand(3), random.random()
        assert _state() != before
        raise ZeroDivisionError

    refused(trial, kind=ZeroDivisionError)
    assert _state() == before


def check_sampler_of_another_pack(side):
    """It is never dry-run, and right all the same."""
    runs = []

    def foreign(*given, **more):
        runs.append(1)
        return back_and_forth(*given, **more)

    guider = side.ours()
    theirs = side.theirs()
    with logged("wanstream.host") as reported:
        result = sampled(guider, foreign)
    assert len(runs) == 1
    assert reported == ["the sampler foreign was not dry-run: expecting one model call per step"]
    assert _difference(result, sampled(theirs, foreign)) <= NEAR
    assert [step.expert for step in guider.timeline.steps] == theirs.calls
    assert 0 < guider.recompiled < len(theirs.calls) / 2


def check_samplers_of_nodes(side):
    """Samplers from ComfyUI's own nodes, with functions as options or from other modules."""
    noise = {"eta": 1.0, "s_noise": 1.0}
    orders = {"predictor_order": 3, "corrector_order": 4, "simple_order_2": False}
    part = {"sde_start_percent": 0.2, "sde_end_percent": 0.8, "use_pece": False}
    model = side.natives[0]
    basic = nodes_custom_sampler
    advanced = nodes_advanced_samplers
    for (sampler,) in (
        node_results(basic.SamplerER_SDE, solver_type="ER-SDE", max_stage=3, **noise),
        node_results(basic.SamplerSASolver, model=model, **noise, **orders, **part),
        node_results(advanced.SamplerEulerCFGpp, version="alternative"),
    ):
        guider = side.ours()
        result = sampled(guider, sampler)
        assert _difference(result, sampled(side.theirs(), sampler)) <= NEAR
        assert guider.recompiled == 0


def check_previews(side):
    """Previews sent to the browser by ComfyUI's sampling node and our progress bar, by method."""
    methods = latent_preview.LatentPreviewMethod
    pictures = {methods.Latent2RGB: ["JPEG", 6, 8], methods.NoPreviews: None}
    shown = []

    def look(done, total, preview, *_, **__):
        shown.append([done, total, preview and [preview[0], *preview[1].size]])

    utils.set_progress_bar_global_hook(look)
    for method, picture in pictures.items():
        cli_args.args.preview_method = method
        shown.clear()
        latent = guided(side.ours(), {"samples": torch.zeros(SHAPE)}, simple_sigmas()[:4])
        assert latent.shape == SHAPE
        assert latent.isfinite().all()
        bar = current_host().events.progress(4, None)
        bar.update(1, _normal(*SHAPE, seed=6))
        bar.update(4)
        sampling = [[done, 3, picture] for done in (1, 2, 3)]
        if picture is None:  # events without a picture may be left out
            assert {preview for *_, preview in shown} == {None}
        else:
            assert shown == [*sampling, [1, 4, picture], [4, 4, None]]
    cli_args.args.preview_method = methods.Latent2RGB
    current_host().events.progress(4, None).update(1, _normal(1, 48, 2, 4, 3, seed=6))
    assert shown[-1] == [1, 4, ["JPEG", 3, 4]]
    utils.set_progress_bar_global_hook(None)


def check_refusals(side):
    upscale = {"scale_ratio": 2.0, "scale_steps": -1, "upscale_method": "bilinear"}
    (resizing,) = node_results(nodes_advanced_samplers.SamplerLCMUpscale, **upscale)
    karras = comfy.k_diffusion.sampling.get_sigmas_karras(STEPS, 0.03, 14.6)
    control = side.with_values(control=object()).sides[0]
    parts = torch.nested.nested_tensor([torch.zeros(SHAPE[1:]), torch.zeros(8, 10, 1, 1)])
    two = torch.zeros(2, *SHAPE[1:])

    def per_sample(model, x, sigmas, extra_args, **_):
        return model(x, torch.linspace(0.9, 0.8, len(x)), **extra_args)

    def broken(model, x, sigmas, extra_args, **_):
        return model(x * float("nan"), sigmas[:1], **extra_args)

    def curious(model, x, sigmas, extra_args, **_):
        return model.inner_model.inner_model.diffusion_model(x)

    replaced = side.ours()
    options = {"sampler_calc_cond_batch_function": print}
    replaced.model_options = {**replaced.model_options, **options}
    run = partial(partial, sampled)
    ours = partial(partial, side.ours)
    reads = "the sampler curious reads the attribute diffusion_model of the model"
    calls = {
        "the sampler lcm_upscale changes the size of the latent from": run(side.ours(), resizing),
        "a sigma is 14.6, but flow models have none above 1": run(side.ours(), sigmas=karras),
        "uses 2 noise levels in one model call": run(side.ours(), per_sample, latent=two),
        reads: run(side.ours(), curious),
        "sampler_calc_cond_batch_function": run(replaced),
        "positive carries a ControlNet (control)": ours(positive=control),
        "the latent has several parts": run(side.ours(), latent=parts, noise=parts),
    }
    for words, call in calls.items():
        refused(call, words, kind=RequestError)
    words = "the latent from the sampler broken is NaN or infinite at sigma 1.0"
    refused(run(side.ours(), broken), words, kind=NonFiniteLatentError)


def check_images(text):
    """Conditioning from WanImageToVideo (one mask channel) and WanFirstLastFrameToVideo (four)."""
    side = Side(text.folder, "i2v")
    words = "these are image-to-video experts, and no start image is connected"
    refused(lambda: sampled(side.ours()), words, kind=RequestError)
    for size, channels, kept in ((SHAPE[2:], 1, 1), (SHAPE[2:], 4, 1), ((2, 9, 7), 4, 1)):
        mask = torch.ones(1, channels, *size)
        mask[:, :, :kept] = 0
        image = _normal(1, 16, *size, seed=4)
        given = side.with_values(concat_latent_image=image, concat_mask=mask)
        given.check("dpmpp_2m", latent=torch.zeros(1, 16, *size))

    # Without an image mask, the noise mask marks the given latent frames for the expert.
    image = _normal(*SHAPE, seed=4)
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :1] = 0
    side.with_values(concat_latent_image=image).check(latent=image, denoise_mask=mask)


def setup(folder):
    return Side(folder, "t2v")
