"""Runs in ComfyUI's own Python: patches on streamed native models, compared with ComfyUI's.

LoRAs, Stream Model, merging, saving, extracting, hooks and compiled blocks.
"""

import itertools
import os
from functools import partial
from types import MethodType
from unittest.mock import patch

import comfy.ldm.wan.model
import torch
import torch._dynamo
from comfy import hooks, model_management, model_patcher, patcher_extension, sd
from comfy.ldm.modules.attention import attention_pytorch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_lora_extract, nodes_model_merging, nodes_torch_compile
from safetensors.torch import load_file, save_file

from wanstream.host import WEIGHT_DTYPES, ModelStreaming, current_host
from wanstream.host.comfy import versions
from wanstream.host.comfy.native.stream_model import ModelStreamer
from wanstream.schema import OffloadPolicy

from .. import families
from ..checks import for_each, refused, require
from ..families import load_lora
from ..patches import _run, run_function
from ..tiny_models import FLUX, LIMITS, POLICIES, WAN, Files, counted_patches, load_native, logged
from ..tiny_models import LAYERWISE as POLICY

STREAMER = ModelStreamer(current_host())
SWAP = OffloadPolicy.block_swap(2, prefetch_blocks=1)
NUMBER_FORMATS = {"fp32": "default", "bf16": "bf16", "fp8": "fp8_e4m3fn"}
"""Loader weight type by the file's number format. "bf16" keeps bf16 weights, which the CPU casts to
compute."""
SAVES_LAZILY = hasattr(model_patcher.ModelPatcher, "state_dict_for_saving")
"""ComfyUI 0.3.64 cannot save or extract without all weights in memory."""
ALL_WEIGHTS = "a node needs all weights of the model in memory"


def stream_model(model, policy=POLICY, **limits):
    return STREAMER.stream(model, ModelStreaming(policy=policy), **limits)


class Side(Files):
    """A model's files in every number format, loaded by ComfyUI and by us, and LoRAs."""

    def __init__(self, folder, family=WAN):
        super().__init__(folder)
        self.family = family

    def file(self, dtype):
        return self.path(self.family, dtype)

    def native(self, dtype):
        weight_dtype = NUMBER_FORMATS[dtype]
        return families.native(self.file(dtype), self.family, weight_dtype=weight_dtype)

    def streamed(self, dtype, policy=POLICY, **limits):
        # LoRAs are on layers outside the lists too.
        limits = {**LIMITS, "smallest_layer": 20_000, **limits}
        with families.given_configuration(self.family):
            return load_native(self.file(dtype), NUMBER_FORMATS[dtype], policy, **limits)

    def lora(self, kind, *, streamed=False):
        """Return a LoRA for everything, or only for layers that stream."""
        path = self.folder / f"{self.family.name}_{kind}_{streamed}.safetensors"
        if not path.exists():
            weights = self.family.weights()
            layers = {key.rpartition(".")[0] for key, each in weights.items() if each.ndim == 2}
            if streamed:
                names = [key for key in weights if key.rpartition(".")[0] in layers]
                weights = {key: weights[key] for key in names if "blocks." in key}
            families.write_lora(kind, path, weights)
        return path

    def sample(self, model, **settings):
        return families.sample(model, self.family, **{"steps": 2, **settings})


def setup(folder):
    options = {**families.WEIGHT_DTYPES, "bf16": {"dtype": torch.bfloat16}}
    with (
        patch.dict(WEIGHT_DTYPES, {"bf16": torch.bfloat16}),
        patch.object(families, "WEIGHT_DTYPES", options),
    ):
        yield Side(folder)


@for_each(
    *(("wan_t2v", kind, "fp32") for kind in families.LORAS if kind not in ("offset", "rank 8")),
    *(("wan_t2v", kind, dtype) for kind in ("lora", "dora", "diff") for dtype in ("bf16", "fp8")),
    *(("flux", kind, "fp32") for kind in ("kohya", "lokr", "diff")),
    *(("flux", kind, dtype) for kind in ("lora", "offset") for dtype in NUMBER_FORMATS),
)
def check_lora(side, family, kind, dtype):
    """LoRAs of one kind in one number format, which ComfyUI adds while loading the weights."""
    side = Side(side.folder, families.FAMILIES[family])
    lora = side.lora(kind)
    streamed = side.streamed(dtype)
    ours = side.sample(load_lora(streamed, lora))
    assert torch.equal(ours, side.sample(load_lora(side.native(dtype), lora)))
    assert (ours - side.sample(streamed)).abs().max() > 0.1


def check_clones_share_the_weights_and_keep_their_own_patches(side):
    """One streamed model with a LoRA, without, with another strength, and again."""
    lora = side.lora("kohya")
    native = side.native("fp32")
    ours = side.streamed("fp32", SWAP)
    clones = []
    samples = []
    for strength in (1.0, None, 0.5, None, 1.0):
        with_lora = partial(load_lora, path=lora, strength=strength)
        theirs, clone = (native, ours) if strength is None else map(with_lora, (native, ours))
        samples.append(side.sample(theirs))
        assert torch.equal(side.sample(clone), samples[-1])
        clones.append(clone)
    assert len({float(each.sum()) for each in samples}) == 3
    (first, plain, *_) = clones
    again = load_lora(ours, lora)
    assert plain.is_clone(first)
    assert first.is_clone(again)
    assert not first.is_clone(native)
    assert plain.clone_has_same_weights(plain.clone())
    assert first.clone_has_same_weights(first.clone())
    assert not first.clone_has_same_weights(plain)
    assert not first.clone_has_same_weights(again)
    assert len({id(each.model.weights.loaded_engine) for each in clones}) == 1
    loaded = [entry.model.model for entry in model_management.current_loaded_models]
    assert [each is ours.model for each in loaded].count(True) == 1


@for_each(*((dtype, place) for dtype in NUMBER_FORMATS for place in ("RAM", "resident")))
def check_a_lora_is_added_once_to_a_block_that_stays(side, dtype, place):
    """LoRA additions to the blocks in RAM, without a function in a layer."""
    lora = side.lora("lora", streamed=True)
    ours = load_lora(side.streamed(dtype, POLICIES[place](0)), lora)
    with counted_patches() as counts:
        for _ in range(2):
            side.sample(ours)
            counts.append(0)
    assert counts == [len(ours.model.stored.keys() & ours.patches.keys()), 0, 0]
    assert not any(getattr(each, "weight_function", None) for each in ours.model.modules())


def check_a_clone_for_another_gpu_streams_from_the_file(side):
    """Clones for further GPUs, which ComfyUI makes with a MODEL's loader."""
    require(hasattr(model_patcher.ModelPatcher, "deepclone_multigpu"), "such clones")
    lora = side.lora("lora")
    native = load_lora(side.native("fp32"), lora)
    models = [load_lora(side.streamed("fp32"), lora), stream_model(native, **LIMITS)]
    cpu = torch.device("cpu")
    models += [model.deepclone_multigpu(new_load_device=cpu) for model in models]
    expected = side.sample(load_lora(side.native("fp32"), lora))
    for model in models:
        assert torch.equal(side.sample(model), expected)
    assert len({id(each.model.weights) for each in models}) == 4


def check_another_dtype_to_compute_with(side):
    """As nodes set it."""
    models = [side.native("bf16"), side.streamed("bf16")]
    changed = [model.clone() for model in models]
    for clone in changed:
        clone.set_model_compute_dtype(torch.bfloat16)
    # The clones run first: they leave the originals in their own dtype.
    changed_native, result, native, ours = map(side.sample, [*changed, *models])
    assert torch.equal(result, changed_native)
    assert torch.equal(ours, native)
    assert not torch.equal(result, ours)


def check_functions_of_other_nodes_on_weights(side):
    """Functions on streamed weights, and on one that does not stream."""
    results = []
    for model in (side.native("fp32"), side.streamed("fp32")):
        changed = model.clone()
        for key in ("blocks.1.ffn.0.weight", "blocks.1.ffn.0.bias", "text_embedding.0.weight"):
            changed.add_weight_wrapper(f"diffusion_model.{key}", lambda weight: weight * 1.5)
        results.append(side.sample(load_lora(changed, side.lora("lora"))))
    assert torch.equal(*results)


def check_a_lora_for_another_architecture_changes_nothing(side):
    lora = Side(side.folder, FLUX).lora("lora")
    native, ours = (load_lora(load("fp32"), lora) for load in (side.native, side.streamed))
    assert not native.patches
    assert not ours.patches
    assert torch.equal(side.sample(native), side.sample(ours))


def _decorated(model):
    """Return a clone with every kind of addition to a MODEL, and a list of calls."""
    changed = model.clone()
    calls = []

    def called(name, result=lambda *_: None):
        def call(*args, **settings):
            if name not in calls:
                calls.append(name)
            return result(*args, **settings)

        return call

    network = model.model.diffusion_model
    wrappers = patcher_extension.WrappersMP
    unpatchify = type(network).unpatchify
    halved = MethodType(lambda self, *args: unpatchify(self, *args) * 0.5, network)
    injected = patcher_extension.PatcherInjection(called("inject"), called("eject"))
    function = called("function", lambda *given: run_function(*given) * 0.9)
    changed.set_model_attn2_patch(called("attn2", lambda given: given["x"] * 1.1))
    changed.set_model_unet_function_wrapper(function)
    guided = called("post cfg", lambda given: given["denoised"] * 1.05)
    changed.set_model_sampler_post_cfg_function(guided)
    changed.add_object_patch("diffusion_model.unpatchify", halved)
    for kind in (wrappers.DIFFUSION_MODEL, wrappers.SAMPLER_SAMPLE):
        changed.add_wrapper_with_key(kind, "test", called(kind, _run))
    before = patcher_extension.CallbacksMP.ON_PRE_RUN
    changed.add_callback_with_key(before, "test", called("pre run"))
    changed.set_injections("test", [injected])
    changed.set_attachments("test", "attached")
    weight = called("weight", lambda weight: weight * 1.5)
    changed.add_weight_wrapper("diffusion_model.blocks.0.ffn.0.weight", weight)
    return changed, calls


def _of_unknown_file(model):
    model.cached_patcher_init = None
    return model


def _of_checkpoint(side):
    path = side.folder / "checkpoint.safetensors"
    stored = load_file(side.file("fp32"))
    save_file({f"model.diffusion_model.{key}": each for key, each in stored.items()}, path)
    given = {"output_vae": False, "output_clip": False}
    return sd.load_checkpoint_guess_config(str(path), **given)[0]


@for_each("file", "fp8 file", "checkpoint", "memory")
def check_stream_model_carries_everything_over(side, source):
    """Stream Model behind a loader and other nodes: from the file, a whole checkpoint, and RAM."""
    loaders = {
        "file": partial(side.native, "fp32"),
        "fp8 file": partial(side.native, "fp8"),
        "checkpoint": partial(_of_checkpoint, side),
        "memory": lambda: _of_unknown_file(side.native("fp32")),
    }
    given = loaders[source]()
    plain = side.sample(given)
    lora = side.lora("lora", streamed=source == "fp8 file")
    dressed, calls = _decorated(load_lora(given, lora))
    theirs = side.sample(dressed)
    their_calls = sorted(calls)
    calls.clear()
    with logged("wanstream.memory") as lines:
        ours = stream_model(dressed, **LIMITS)
    assert torch.equal(side.sample(ours), theirs)
    assert sorted(calls) == their_calls
    assert len(calls) - calls.count("attn2") == 8  # Wan lacks attn2 in ComfyUI 0.3.64
    assert ours.get_attachment("test") == "attached"
    # Object patches that are methods belong to the model that streams.
    method = ours.object_patches["diffusion_model.unpatchify"]
    assert method.__self__ is ours.model.diffusion_model
    again = stream_model(ours, SWAP, **LIMITS)  # another policy for what streams already
    assert torch.equal(side.sample(again), theirs)
    assert again.policy == SWAP
    assert again.model is ours.model
    other = stream_model(given, **LIMITS)  # a clone without patches shares the weights
    assert torch.equal(side.sample(other), plain)
    assert other.model is ours.model
    assert torch.equal(side.sample(given), plain), "the given MODEL is still usable"
    assert torch.equal(side.sample(dressed), side.sample(dressed))
    assert torch.equal(side.sample(ours), theirs)
    (line,) = lines
    if source == "memory":
        words = "its blocks stream from the 16.8 MB of RAM that they occupy, which saves VRAM only"
        assert f"is not known: {words}" in line
    elif hasattr(given, "cached_patcher_init"):  # not in ComfyUI 0.3.64
        assert versions.loaded_file(given).is_checkpoint == (source == "checkpoint")
        assert line.endswith("checkpoint.safetensors" if source == "checkpoint" else ".safetensors")


def _matrices(one, two):
    """Merge as the nodes do, but only streamed matrices.

    ComfyUI rounds other weights to fp8 only if they are loaded.
    """
    merged = one.clone()
    for key, weight in two.get_key_patches("diffusion_model.blocks.1.ffn").items():
        merged.add_patches({key: weight}, 0.7, 0.3)
    return (merged,)


MERGES = {
    "simple": lambda one, two: nodes_model_merging.ModelMergeSimple().merge(one, two, 0.3),
    "blocks": partial(nodes_model_merging.ModelMergeBlocks().merge, **{"": 0.7, "blocks.1": 0.2}),
    "subtract": lambda one, two: nodes_model_merging.ModelSubtract().merge(one, two, 0.5),
    "add": nodes_model_merging.ModelAdd().merge,
    "matrices": _matrices,
}


@for_each(
    ("simple", "fp32"), ("blocks", "fp32"), ("subtract", "fp32"), ("add", "fp32"),
    ("matrices", "fp8"),
)  # fmt: skip
def check_merged_models(side, name, dtype):
    """Merging nodes on pairs of native and streamed MODELs, the second with a LoRA."""
    lora = side.lora("lora", streamed=dtype == "fp8")
    models = [(load(dtype), load_lora(load(dtype), lora)) for load in (side.native, side.streamed)]

    def merged(one, two):
        return side.sample(MERGES[name](models[one][0], models[two][1])[0])

    expected = merged(0, 0)
    assert torch.equal(merged(1, 1), expected)
    if name in ("simple", "matrices"):
        assert torch.equal(merged(1, 0), expected)
        assert torch.equal(merged(0, 1), expected)


def check_merging_rounds_as_loading_does(side):
    """Weights that ComfyUI rounds while loading a file are rounded for merging as well."""
    path = side.file("fp32")
    native = families.native(path, side.family, weight_dtype="fp8_e4m3fn")
    ours = load_native(path, "fp8_e4m3fn", POLICY, **LIMITS)
    patches = ours.get_key_patches()
    theirs = native.get_key_patches()["diffusion_model.blocks.0.ffn.0.weight"][0][0]
    assert theirs.dtype == torch.float8_e4m3fn
    # Weights that stream are views of the file.
    assert all(patches[key][0][0] is view for key, view in ours.model.stored.items())
    assert patches["diffusion_model.blocks.0.ffn.0.weight"][0][0].dtype == torch.float32
    network = side.native("fp32")
    merge = nodes_model_merging.ModelAdd().merge
    assert torch.equal(*(side.sample(merge(network, each)[0]) for each in (native, ours)))


@for_each(("lora", "fp32"), ("diff", "fp32"), ("lora", "fp8"), (None, "bf16"))
def check_saved_files_are_those_of_comfyui(side, kind, dtype):
    """Save Model for models without and with a LoRA, byte by byte."""
    files = []
    for load in (side.native, side.streamed):
        model = load(dtype)
        path = side.folder / f"saved_{load.__name__}.safetensors"
        if kind is not None:
            model = load_lora(model, side.lora(kind, streamed=dtype != "fp32"))
        side.sample(model, steps=1)
        save_model = partial(sd.save_checkpoint, str(path), model, metadata={"of": "test"})
        if not SAVES_LAZILY and load == side.streamed:
            refused(save_model, ALL_WEIGHTS)
            return
        save_model()
        side.sample(model, steps=1)
        files.append(path.read_bytes())
    assert len(files[0]) > 1e6
    assert files[0] == files[1]


def _roads(side, dtype, folder):
    """Every reader of a streamed MODEL's weights in ComfyUI."""

    def merged(model):
        (both,) = nodes_model_merging.ModelMergeSimple().merge(side.native(dtype), model, 0.5)
        return side.sample(both, steps=1)

    def patched(model):
        changed = load_lora(model, side.lora("lora", streamed=True))
        patch_weight = partial(changed.patch_weight_to_device, return_weight=True)
        return [patch_weight(key) + 0 for key in changed.patches]

    # ComfyUI 0.3.64 patches weights only in place.
    in_weights = {"patch": patched} if SAVES_LAZILY else {}
    return {
        "sample": lambda model: side.sample(model, steps=1),
        "save": lambda model: sd.save_checkpoint(str(folder / "saved.safetensors"), model),
        "merge": merged,
        **in_weights,
        "extract": lambda model: _extracted(model, "", bias=False),
    }


def _cut(path):
    os.truncate(path, path.stat().st_size // 2)


def _replaced(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:1000] + bytes(len(content) - 1000))
    os.utime(path, ns=(1, 1))


@for_each(*itertools.product(("fp32", "fp8"), (_cut, _replaced)))
def check_a_changed_file_is_refused(side, dtype, change):
    """Whatever reads it. The process is alive: a cut mapped file would have ended it."""
    path = side.folder / "changed.safetensors"
    for road, read in _roads(side, dtype, side.folder).items():
        path.write_bytes(side.file(dtype).read_bytes())
        with families.given_configuration(side.family):
            model = load_native(path, NUMBER_FORMATS[dtype], POLICY, **LIMITS)
        change(path)
        try:
            read(model)
            outcome = "no error"
        except Exception as err:  # noqa: BLE001 - any exception is an outcome
            outcome = f"{type(err).__name__}: {err}"
        model.detach()
        in_words = path.name in outcome or (not SAVES_LAZILY and "needs all weights" in outcome)
        assert in_words, (road, outcome)
        assert road != "sample" or "SourceError" in outcome


def _extracted(model, prefix, *, bias):
    """Return the LoRA of Extract and Save Lora."""
    output = {}
    given = (model, 4, "diffusion_model.", prefix, output, nodes_lora_extract.LORAType.FULL_DIFF)
    nodes_lora_extract.calc_lora_model(*given, bias_diff=bias)
    return output


def check_an_extracted_lora_is_that_of_comfyui(side):
    """The difference between a model with a LoRA and without."""
    results = []
    if not SAVES_LAZILY:
        refused(lambda: _extracted(side.streamed("fp32"), "", bias=False), ALL_WEIGHTS)
        return
    for load in (side.native, side.streamed):
        model = load("fp32")
        with_lora = load_lora(model, side.lora("lora"))
        (difference,) = nodes_model_merging.ModelSubtract().merge(with_lora, model, 1.0)
        results.append(_extracted(difference, "diffusion_model.", bias=True))
    theirs, ours = results
    assert theirs.keys() == ours.keys()
    assert len(ours) > 100
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert max(each.abs().max() for each in ours.values()) > 0.01


def _with_hook(side, hook):
    """Let all conditions have a hook, whose strength changes during the run."""
    group = hooks.HookGroup()
    keyframes = hooks.HookKeyframeGroup()
    group.add(hook)
    keyframes.add(hooks.HookKeyframe(strength=0.5, start_percent=0.3))
    group.set_keyframes_on_hooks(keyframes)
    sides = side.family.conditioning()
    changed = [[(text, {**values, "hooks": group}) for text, values in each] for each in sides]
    return patch.object(families.Family, "conditioning", lambda *_: changed)


def check_hooks(side):
    """Hooks without weights work, and a LoRA as a hook is refused."""
    native = side.native("fp32")
    ours = side.streamed("fp32")
    lora = load_file(side.lora("lora"))
    plain = side.sample(native)
    options = {"patches": {"attn2_patch": [lambda given: given["x"] * 1.2]}}
    unknown = {"unknown": next(iter(lora.values()))}
    for hook in (
        hooks.TransformerOptionsHook(options),
        hooks.create_hook_lora(unknown, 1.0, 0.0).hooks[0],
    ):
        with _with_hook(side, hook):
            assert torch.equal(side.sample(ours), side.sample(native))
    with _with_hook(side, hooks.create_hook_lora(lora, 1.0, 0.0).hooks[0]):
        assert not torch.equal(side.sample(native), plain)
        words = "use Load LoRA for the whole run"
        message = refused(lambda: side.sample(ours), words)
    start = "a hook changes 41 weights that stream, diffusion_model.text_embedding.0.weight and"
    assert message.startswith(start)


GRAPHS = []


def _backend(graph, _):
    GRAPHS.append(len(graph.graph.nodes))
    return graph.forward


# ComfyUI 0.3.64 has no filter.
UNGUARDED = getattr(
    nodes_torch_compile, "skip_torch_compile_dict", lambda entries: [True] * len(entries)
)
OPTIONS = {"guard_filter_fn": UNGUARDED}


def _compiled(way, model, *keys):
    """Return a clone compiled by ComfyUI's wrapper or by object patches."""
    changed = model.clone()
    if way == "wrapper":
        set_torch_compile_wrapper(changed, backend=_backend, options=OPTIONS, keys=[*keys])
        return changed
    for key in keys:
        layer = torch.compile(changed.get_model_object(key), backend=_backend, options=OPTIONS)
        changed.add_object_patch(key, layer)
    return changed


@for_each("wrapper", "object patches")
# ComfyUI's attention for a CPU is many graphs, and their number depends on the free memory.
@patch.object(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
def check_compiled_blocks(side, way):
    """Compiled blocks, which share their graphs, and compiled whole models."""
    native = side.native("fp32")
    lora = side.lora("diff")
    streamed = side.streamed("fp32", smallest_layer=10**9)
    blocks = [f"diffusion_model.blocks.{i}" for i in (0, 2)]  # enough to share graphs
    plain = side.sample(native)
    changed = side.sample(load_lora(native, lora))
    with_lora = _compiled(way, load_lora(streamed, lora), *blocks)
    counts = []
    for model in (native, streamed):
        torch._dynamo.reset()
        GRAPHS.clear()
        ours = _compiled(way, model, *blocks)
        assert torch.equal(side.sample(ours), plain)
        counts.append(len(GRAPHS))
    assert counts[0] == counts[1] > 0
    assert torch.equal(side.sample(streamed), plain)
    assert torch.equal(side.sample(ours), plain)
    session = ours.model.runs.last.session
    assert (session.visits, session.fetches, session.recompiled) == (8, 8, 0)
    assert torch.equal(side.sample(with_lora), changed)
    whole = _compiled(way, streamed, "diffusion_model")
    remedy = "compile the blocks instead (diffusion_model.blocks.0 and so on)"
    refused(lambda: side.sample(whole), "diffusion_model is compiled as a whole", remedy)
    behind = _compiled(way, native, *blocks)
    refused(lambda: stream_model(behind, **LIMITS), "put that node behind Stream Model")


class _Quantised(torch.Tensor):
    """Another pack's tensor."""


def check_models_that_cannot_stream_are_refused(side):
    small, bare, quantised, dynamic = (_of_unknown_file(side.native("fp32")) for _ in range(4))
    bare.model.diffusion_model.blocks = torch.nn.Sequential(*bare.model.diffusion_model.blocks)
    layer = quantised.model.diffusion_model.blocks[0].ffn[0]
    layer.weight = torch.nn.Parameter(_Quantised(layer.weight.detach()), requires_grad=False)
    dynamic.is_dynamic = lambda: True
    is_small = "the model is too small to be worth streaming (0.02 GB in its blocks, from 2 GB on)"
    wrong = {
        "the model has no list of blocks to stream (WAN21)": bare,
        "diffusion_model.blocks.0.ffn.0.weight is a _Quantised, which only that loader's layers":
            quantised,
        "use Load Diffusion Model (streamed), or start ComfyUI with --disable-dynamic": dynamic,
    }  # fmt: skip
    refused(lambda: stream_model(small), f"{is_small}: use it as")
    refused(lambda: stream_model(side.native("fp32")), "GB in its blocks, from 2 GB on)")
    for words, model in wrong.items():
        refused(partial(stream_model, model, **LIMITS), words)
