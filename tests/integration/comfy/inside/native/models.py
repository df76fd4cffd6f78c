"""Runs in ComfyUI's Python: streamed native models against ComfyUI's own, bit by bit.

Both models come from one file by `families`, and run with the same input.
"""

from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import patch

import comfy.model_base
import folder_paths
import torch
from comfy_extras import nodes_custom_sampler

from wanstream.host.comfy.adapter import native_models
from wanstream.host.comfy.versions import LOCKSTEP_MODELS
from wanstream.nodes.native import models as native_nodes
from wanstream.offload.engine.run import EngineRun
from wanstream.plan import AutoOffload, OffloadPolicy

from .. import families
from ..checks import for_each, refused, require
from ..families import EVERY_FAMILY, FAMILIES, Family, sample
from ..further_families import EVERY_FURTHER, FURTHER
from ..patches import PATCHES, TinyControl, context_windows, node_results
from ..samplers import guided, ksamplers, simple_sigmas
from ..tiny_models import FLUX, SHARED, WAN, Files, figures, logged, one_by_one

setup = Files
STEPS = 3


@contextmanager
def traffic():
    """Count visits, fetches by block index, and bytes in all engines."""
    counted = SimpleNamespace(visits=0, fetched=[], nbytes=0)
    leave = EngineRun.__exit__

    def counting(run, *error):
        leave(run, *error)
        counted.visits += run._next
        counted.fetched += [fetch.block.block for fetch in run.fetched]
        counted.nbytes += sum(run._pool.route.sizes[fetch.block.stored] for fetch in run.fetched)

    with patch.object(EngineRun, "__exit__", counting):
        yield counted


def block_bytes(model):
    """Return the bytes per block in a streamed MODEL's file, by block index.

    Blocks are aligned to 256 bytes.
    """
    found = []
    for path in model.model.weights.blocks:
        views = model.model.stored.items()
        start = f"diffusion_model.{path}."
        nbytes = sum(each.nbytes for key, each in views if key.startswith(start))
        found.append(-nbytes // 256 * -256)
    return found


def compare(
    files, family, run, *, form="fp32", policy="layerwise", share="off", plain=None, runs=2,
    **limits,
):  # fmt: skip
    """Compare runs of a streamed model with one of ComfyUI's own, which is not `plain`.

    Return the counts. Where conditions may share visits, both models compute them one by one.
    """
    if share != "off":
        run = partial(with_little_room, run)
    expected = run(files.native(family, form))
    assert expected.isfinite().all()
    if plain is not None:
        assert plain.shape != expected.shape or not torch.equal(plain, expected), "has an effect"
    model = files.streamed(family, form, policy, share, **limits)
    sizes = block_bytes(model)
    recompiled = []
    for _ in range(runs):
        with traffic() as counted:
            assert torch.equal(run(model), expected)
        recompiled.append(figures(model).recompiled)
        # For blocks of the lists alone.
        assert limits or counted.nbytes == sum(sizes[block] for block in counted.fetched)
    model.detach()
    if runs > 1:
        assert recompiled[-1] == 0
        assert len(counted.fetched) <= counted.visits
    return SimpleNamespace(
        blocks=len(sizes), visits=counted.visits, fetches=len(counted.fetched),
        first_recompiled=recompiled[0], notes=model.model.runs.last.policy.notes,
    )  # fmt: skip


def with_little_room(run, model):
    """Sample on a device with room for one condition at a time."""
    with one_by_one():
        return run(model)


@contextmanager
def _zeroed(block):
    kept = [parameter.detach().clone() for parameter in block.parameters()]
    for parameter in block.parameters():
        parameter.zero_()
    yield
    for parameter, before in zip(block.parameters(), kept, strict=True):
        parameter.copy_(before)


UNUSED = ("unet missing", "unet unexpected", "left over", "NOT LOADED", "not loaded")
"""ComfyUI's words for missing, unexpected or leftover keys."""
OTHER_FORMS = ("fp16", "fp8", "fp8 kept")
NAMES = [family.name for family in (*EVERY_FAMILY, *EVERY_FURTHER)]


def _family(name):
    require(name in FAMILIES or name in FURTHER, name)
    return {**FAMILIES, **FURTHER}[name]


@for_each(*NAMES)
def check_each_block_of_a_family_matters(files, name):
    """ComfyUI finds all weights of the tiny model, and a wrong block would change the result.

    The first and the last block of each list stand for the others.
    """
    family = _family(name)
    with logged() as lines:
        model = families.native(files.path(family), family)
    assert [line for line in lines if any(words in line for words in UNUSED)] == []
    run = partial(sample, family=family, steps=1, cfg=1.0)
    before = run(model)
    network = model.model.diffusion_model
    for blocks in family.lists:
        for number in (0, -1):
            with _zeroed(network.get_submodule(blocks)[number]):
                assert not torch.equal(run(model), before), (blocks, number)


MOST_RECOMPILED = {"wan22_s2v": 5}
"""Limits for families other than 3. S2V's audio layers come behind blocks at uneven distances."""


@for_each(*NAMES)
def check_family(files, name):
    """Each family under two policies, in fp32 and bf16, with one condition and with two.

    All combinations are spread over the families. Under block swap, layers outside the block lists
    stream too where they are large enough.
    """
    family = _family(name)
    number = NAMES.index(name)
    forms = ["fp32", "bf16"]
    runs = [partial(sample, family=family, steps=2, cfg=cfg) for cfg in (1.0, 3.0)]
    if number % 2:
        forms.reverse()
    if number // 2 % 2:
        runs.reverse()
    layerwise = compare(files, family, runs[0], form=forms[0])
    # A run may start with the two blocks left over from the last one.
    assert layerwise.visits - 2 <= layerwise.fetches
    assert layerwise.first_recompiled <= MOST_RECOMPILED.get(name, 3)
    limits = {"smallest_layer": 10_000}
    swap = compare(files, family, runs[1], form=forms[1], policy="block swap", runs=1, **limits)
    assert swap.blocks > layerwise.blocks


BASES = {*LOCKSTEP_MODELS, "HiDream", "WAN21_SCAIL2"}
SHARING = [family.name for family in (*EVERY_FAMILY, *EVERY_FURTHER) if family.base in BASES]
"""Families that share visits by themselves, and two that do so on request."""


@for_each(*SHARING)
def check_shared_visits_of_a_family(files, name):
    """Conditions share visits for half the bytes, each family in one of the other formats."""
    family = _family(name)
    steps = 2
    # ComfyUI 0.33.0 computes H3 without fp8 norms.
    forms = OTHER_FORMS[: 2 if family.base == "MiniMaxH3" else None]
    form = forms[NAMES.index(name) % len(forms)]
    run = partial(with_little_room, partial(sample, family=family, steps=steps))
    expected = run(files.native(family, form))
    apart = files.streamed(family, form, share="off")
    mode = "auto" if family.base in LOCKSTEP_MODELS else "on"
    together = files.streamed(family, form, share=mode)
    for model in (apart, together, together):
        assert torch.equal(run(model), expected)
    apart = figures(apart)
    together = figures(together)
    assert together.notes == [SHARED]
    # The first call shows whether ComfyUI computes the conditions one after the other.
    assert together.visits * 2 * steps == apart.visits * (steps + 1)
    assert together.recompiled == 0
    # Blocks left in buffers by the step before are fetched once less.
    assert sum(together.bytes[1:]) <= 0.55 * sum(apart.bytes[1:])
    assert together.fetches <= together.visits


def check_classes_that_share_visits_by_themselves_are_tested(_):
    tested = {family.base for family in (*FAMILIES.values(), *FURTHER.values())}
    assert {name for name in LOCKSTEP_MODELS if hasattr(comfy.model_base, name)} <= tested


@for_each(*OTHER_FORMS)
def check_format(files, form):
    """`check_shared_visits_of_a_family` has them under a layerwise policy."""
    compare(files, WAN, partial(sample, family=WAN, steps=2), form=form, policy="block swap")


def check_resident_blocks_are_fetched_once(files):
    found = compare(files, FLUX, partial(sample, family=FLUX), form="fp16", policy="resident")
    assert found.fetches == 0


@for_each("dpm_adaptive", "heun", "uni_pc", "dpmpp_2m_sde", "dpm_fast", "lcm")
def check_sampler(files, sampler):
    compare(files, WAN, partial(sample, family=WAN, sampler=sampler, steps=4))


def halves(high, low, family, **changes):
    """Sample the first steps with one model and the rest with another, as Wan2.2 graphs do."""
    latent = {"samples": torch.zeros(family.sizes[0])}
    settings = {"steps": 6, "switch": 3, "cfg": (3.0, 3.0), "sampler": "dpmpp_2m", **changes}
    return ksamplers(high, low, family.conditioning(), latent, **settings)["samples"]


def check_two_models_by_turns_stay_loaded(files):
    expected = halves(files.native(WAN, "fp32"), files.native(WAN, "fp8"), WAN)
    high = files.streamed(WAN, "fp32", "block swap")
    low = files.streamed(WAN, "fp8")
    for _ in range(2):
        assert torch.equal(halves(high, low, WAN), expected)
        for model in (high, low):
            assert figures(model).recompiled == 0
            assert model.model.weights.loaded_bytes > 0


def custom(model, family, guider):
    """Return SamplerCustomAdvanced's result with a guider."""
    positive, negative = family.conditioning()
    middle = [[positive[0][0] * 0.5, positive[0][1]]]
    inputs = {
        "BasicGuider": {"conditioning": positive},
        "CFGGuider": {"positive": positive, "negative": negative, "cfg": 3.0},
        "DualCFGGuider": {"cond1": positive, "cond2": middle, "negative": negative,
            "cfg_conds": 3.0, "cfg_cond2_negative": 2.0},
    }  # fmt: skip
    node = getattr(nodes_custom_sampler, guider)
    (guide,) = node_results(node, model=model, style="regular", **inputs[guider])
    latent = {"samples": torch.zeros(family.sizes[0])}
    return guided(guide, latent, simple_sigmas(model, STEPS), "dpmpp_2m")


GUIDERS = ("BasicGuider", "CFGGuider", "DualCFGGuider")
RUNS = {
    "denoise 0.5": partial(sample, denoise=0.5, steps=STEPS),
    "heun": partial(sample, sampler="heun"),
    **{name: partial(custom, guider=name) for name in GUIDERS},
}


def _share_visits(apart, together, passes):
    """Compare the visits of runs with and without shared ones.

    ComfyUI computes the first call's `passes` one after the other.
    """
    assert together.notes == ([SHARED] if passes > 1 else [])
    assert together.visits == apart.visits + (passes - 1) * together.blocks


@for_each(
    ("denoise 0.5", "wan_t2v", "layerwise"),
    ("heun", "flux", "block swap"),
    ("BasicGuider", "wan_t2v", "block swap"),
    ("CFGGuider", "flux", "layerwise"),
    ("DualCFGGuider", "wan_t2v", "layerwise"),
    ("DualCFGGuider", "flux", "block swap"),
)
def check_run(files, name, on, policy):
    family = FAMILIES[on]
    passes = {"BasicGuider": 1, "DualCFGGuider": 3}.get(name, 2)
    run = partial(RUNS[name], family=family)
    apart = compare(files, family, run, policy=policy, runs=1)
    _share_visits(apart, compare(files, family, run, policy=policy, share="on"), passes)


class Regions(Family):
    """A family whose positive conditioning has an area, a mask and a part for the whole picture."""

    def conditioning(self):
        positive, negative = super().conditioning()
        _, _, height, width = self.sizes[0]
        ((text, values),) = positive
        mask = torch.zeros(1, height, width)
        mask[..., : width // 2] = 1
        bounds = {"set_area_to_bounds": False}
        area = {"area": (height // 2, width, height // 2, 0), "strength": 0.8, **bounds}
        return [
            [text, values],
            [text * 0.7, {**values, **area}],
            [text * 0.4, {**values, "mask": mask, "mask_strength": 0.6, **bounds}],
        ], negative


class Controlled(Family):
    """A family with a control net."""

    def conditioning(self):
        added = {"control": TinyControl(self.settings["hidden_size"])}
        added["control_apply_to_uncond"] = False
        sides = super().conditioning()
        return tuple([[text, {**values, **added}] for text, values in side] for side in sides)


def _as(kind, family):
    return kind(**{field.name: getattr(family, field.name) for field in fields(family)})


def _batch(family):
    return replace(family, sizes=((2, *family.sizes[0][1:]),))


def same(model):
    return model


OTHER_INPUTS = {
    "context windows": (context_windows, replace(WAN, sizes=((1, 16, 7, *WAN.sizes[0][3:]),))),
    "regions": (same, _as(Regions, FLUX)),
    "control net": (same, _as(Controlled, FLUX)),
    "batch of two": (same, _batch(WAN)),
    "batch of two pictures": (same, _batch(FLUX)),
    "batch of two controlled videos": (same, _batch(FAMILIES["wan_vace"])),
}  # fmt: skip
HINDERED = {
    "replaced blocks": "a replacement of dit blocks",
    "skipped layer": "a replacement of dit blocks",
    "repeated layer": "a replacement of dit blocks",
    "first-block cache": "a replacement of dit blocks",
    "TeaCache": "the diffusion_model wrapper test",
    "cache of apply_model": None,
    "cache in a function wrapper": None,
    "function wrapper": "the model function wrapper",
    "wrappers": "wrapper test",
    "EasyCache": "the calc_cond_batch wrapper easycache",
    "control net": "a ControlNet",
}
"""Patches that prevent shared visits, and the reason. None: they are no passes of their own anyway.
"""


@cache
def _plain(files, on):
    return sample(files.native(FAMILIES[on]), FAMILIES[on], steps=STEPS)


@for_each(
    *((name, on) for name, (_, families) in PATCHES.items() for on in families),
    *((name, given.name) for name, (_, given) in OTHER_INPUTS.items()),
)
def check_patch(files, name, on):
    """Patches from other packs and inputs from other graphs, without and with shared visits."""
    require(name != "NAG" or find_spec("comfy_extras.nodes_nag"), "NAG")
    require("attn" not in name or "ltx_2" in FAMILIES, "attention patches of Wan and Flux")
    family = FAMILIES[on]
    changed, given = OTHER_INPUTS.get(name) or (PATCHES[name][0], family)
    plain = _plain(files, on)

    def run(model):
        return sample(changed(model), given, steps=STEPS)

    apart = compare(files, family, run, plain=plain, runs=1)
    together = compare(files, family, run, policy="block swap", share="on")
    if name not in HINDERED:
        if on == "qwen_image":  # texts with different lengths, never in one pass of ComfyUI
            apart.visits //= 2
        if name == "regions":  # one pass per positive region, in place of two for all
            apart.visits = apart.visits * 3 // 2
        _share_visits(apart, together, passes=3 if name == "regions" else 2)
    elif HINDERED[name] is None:
        assert together.notes == []
    else:
        (note,) = together.notes
        assert note.startswith("no shared visits, because of ")
        assert HINDERED[name] in note


@for_each("WanStreamLoadDiffusionModel", "WanStreamStreamModel")
def check_nodes_give_the_results_of_comfyuis_loader(files, name):
    """They refuse a wrong policy at once."""
    path = files.folder / "flux1-dev.safetensors"
    FLUX.write(path, "fp16")
    own = families.native(path, FLUX)
    loading = {
        "WanStreamLoadDiffusionModel": {"unet_name": path.name, "weight_dtype": "default"},
        "WanStreamStreamModel": {"model": own},
    }

    def loaded(**policy):
        return getattr(native_nodes, name).execute(**loading[name], **policy).args[0]

    places = folder_paths.folder_names_and_paths
    own_places = {"diffusion_models": ([str(files.folder)], *places["diffusion_models"][1:])}
    limits = {"smallest_block": 0, "smallest_model": 0}
    with (
        families.given_configuration(FLUX),
        patch.dict(places, own_places),
        patch.object(native_models, "_native_limits", lambda: limits),
    ):
        swap = OffloadPolicy.block_swap(5, prefetch_blocks=2)
        models = [loaded(), loaded(policy=AutoOffload()), loaded(policy=swap)]
        # Bytes of the policies: none is loaded yet.
        default, auto, swapping = (model.model_size() for model in models)
        assert default == auto < swapping
        expected = sample(own, FLUX, steps=2)
        for model in models:
            assert torch.equal(sample(model, FLUX, steps=2), expected)
        blocks = models[0].weights.block_counts["model"]
        too_many = partial(loaded, policy=OffloadPolicy.block_swap(99))
        refused(too_many, "blocks_to_swap is 99", f"only {blocks} blocks")
    assert blocks > 5
