"""Runs in ComfyUI's own Python: the names in `host/comfy/versions.py`, used on ComfyUI's objects.

`OLD` cores are like 0.3.64, all others like 0.18.1 and 0.33.0.
"""

import ast
import inspect
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import execution
import folder_paths
import server
import torch
from comfy import (
    hooks,
    lora,
    model_base,
    model_management,
    model_patcher,
    ops,
    samplers,
    weight_adapter,
)
from safetensors.torch import load_file
from torch import nn

from wanstream.host.comfy import versions

from ..checks import for_each
from ..families import FAMILIES, native

OLD = versions.version().startswith("0.3.")
CPU = torch.device("cpu")
FAMILY = FAMILIES["wan_t2v"]
KEY = "diffusion_model.blocks.0.ffn.0.weight"
CARRIED = {
    "additional_models", "attachments", "callbacks", "force_cast_weights", "forced_hooks",
    "hook_mode", "hook_patches", "hook_patches_backup", "injections", "is_clip", "model_options",
    "object_patches", "patches", "patches_uuid", "skip_injection", "weight_wrapper_patches",
    "wrappers",
    "clone_base_uuid", "is_multigpu_base_clone",  # not in 0.18.1
}  # fmt: skip
"""ModelPatcher attributes copied by `carry_over`."""

IN_OTHER_CHECKS = """
add_patches_of_weights clip_kinds code_folder COMPILE_KEY compiled_modules conditions_call
CONDITIONS_FUNCTION config_without_network count_pinned_bytes dynamic_vram_bytes
encoder_linear_layers estimated_bytes FUNCTION_WRAPPER guidance_scale has_other_patches
has_patched_weights IN_LAYERS in_layers intended_dtype is_checkpoint is_compiled_by_wrapper
is_of_core is_quantised join_patch_identities linear_layers load_on_any_device loaded_clip
loaded_file LoadedClip LoadedFile loading_by loading_clip_by marks_layers model_config noise_of_run
OF_A_CLIP patched_shape PATCHES PATCHES_OF_WEIGHTS quantised_formats REPLACEMENTS sampler_function
set_layers set_loader set_weight_functions settings_file shows_progress_bars stored_names twin_memo
weight_before_patches weight_functions with_marked_layers WRAPPERS
"""
"""Names without a case. Other checks here, and tests of the server, fail where they are wrong."""
INFERENCE_MODE = False

CASES = {}


def case(names):
    """Mark a function as the case for names in `versions`."""
    return partial(CASES.__setitem__, names)


@cache
def checkpoint():
    folder = Path(folder_paths.get_temp_directory(), "version_cases")
    folder.mkdir(parents=True)
    FAMILY.write(folder / "model.safetensors", "fp16")
    return folder / "model.safetensors"


def configuration(**changes):
    config = versions.model_config(load_file(checkpoint()), {})
    config.set_inference_dtype(torch.float16, None)
    vars(config).update(changes)
    return config


def layer_of(model):
    return model.model.diffusion_model.blocks[0].ffn[0]


@case("version")
def _(_):
    assert f'version = "{versions.version()}"' in Path("pyproject.toml").read_text()


@case("server has_viewers running_item QueueItem")
def _(_):
    assert not hasattr(server.PromptServer, "instance")
    assert versions.server() is None
    assert not versions.has_viewers()
    nothing = versions.QueueItem({}, {})
    assert versions.running_item("id") == nothing
    source = inspect.getsource(server.PromptServer)
    assert "self.sockets = dict()" in source
    assert "prompt_queue.put((number, prompt_id, prompt, extra_data, outputs_to_execute" in source
    fake = SimpleNamespace(sockets={1: "socket"}, queue_updated=lambda: None)
    fake.prompt_queue = execution.PromptQueue(fake)
    with patch.object(server.PromptServer, "instance", fake, create=True):
        assert versions.server() is fake
        assert versions.has_viewers()
        fake.prompt_queue.put((0, "id", {"1": {}}, {"client_id": "a"}, ["1"], {}))
        assert versions.running_item("id") == nothing
        fake.prompt_queue.get()
        assert versions.running_item("id") == versions.QueueItem({"1": {}}, {"client_id": "a"})
        assert versions.running_item("another") == nothing


@case("loaded_models")
def _(model):
    model_management.load_models_gpu([model])
    (entry,) = [entry for entry in versions.loaded_models(CPU) if entry.model is model]
    assert entry in versions.loaded_models()
    assert entry.model_loaded_memory() > 0
    assert versions.loaded_models(torch.device("meta")) == []


@case("is_dynamic without_dynamic_vram")
def _(model):
    assert not versions.is_dynamic(model)
    assert hasattr(model_patcher.ModelPatcher, "is_dynamic") != OLD
    assert hasattr(model, "cached_patcher_init") != OLD
    if not OLD:
        assert versions.is_dynamic(SimpleNamespace(is_dynamic=lambda: True))
        assert inspect.signature(model.clone).bind(disable_dynamic=True)
        assert versions.without_dynamic_vram(model).is_clone(model)
        model.cached_patcher_init = None
        assert versions.without_dynamic_vram(model) is None


@case("layers_of")
def _(_):
    """Plain layers for a compute dtype as stored, else casting layers."""
    for cast, layers in ((None, ops.disable_weight_init), (torch.float32, ops.manual_cast)):
        assert versions.layers_of(configuration(), torch.float16, cast) is layers


@case("multiply_in_fp8")
def _(_):
    fast = native(checkpoint(), FAMILY, weight_dtype="fp8_e4m3fn_fast").model.model_config
    config = configuration(optimizations={})
    versions.multiply_in_fp8(config)
    assert config.optimizations == fast.optimizations


@case("compute_dtype")
def _(model):
    for cast, dtype in ((None, model.model.get_dtype()), (torch.bfloat16, torch.bfloat16)):
        with patch.object(model.model, "manual_cast_dtype", cast):
            assert versions.compute_dtype(model.model) == dtype
            assert OLD or dtype == model.model.get_dtype_inference()


@case("casts_weights")
def _(_):
    assert not versions.casts_weights(nn.Linear(2, 2))
    assert versions.casts_weights(ops.manual_cast.Linear(2, 2))


@case("force_casts")
def _(model):
    layer = ops.disable_weight_init.Linear(2, 2)
    for _ in range(2):
        versions.force_casts(layer, forced=True)
        assert layer.comfy_cast_weights
    model_patcher.wipe_lowvram_weight(layer)
    assert not layer.comfy_cast_weights
    assert not hasattr(layer, "prev_comfy_cast_weights")
    model.load(CPU)
    assert hasattr(layer_of(model), "comfy_force_cast_weights") != OLD


@case("marked_as_patched")
def _(model):
    layer = ops.manual_cast.Linear(2, 2)
    with versions.marked_as_patched([layer]):
        assert layer.comfy_patched_weights
    assert not hasattr(layer, "comfy_patched_weights")
    model.load(CPU, full_load=True)
    assert layer_of(model).comfy_patched_weights


def with_lora(model):
    """Return a MODEL clone with a rank-3 LoRA on the weight `KEY`."""
    rows, columns = layer_of(model).weight.shape
    factors = (torch.randn(rows, 3), torch.randn(3, columns), 6.0, None, None, None)
    model = model.clone()
    model.add_patches({KEY: weight_adapter.LoRAAdapter(set(), factors)}, 0.5)
    return model


@case("with_tensors _with_tensors patch_identity ByIdentity")
def _(model):
    (patch,) = with_lora(model).patches[KEY]
    found = []

    def doubled(tensor):
        found.append(tensor)
        return tensor * 2

    changed = versions.with_tensors(patch, doubled)
    assert [tuple(tensor.shape)[-1] for tensor in found] == [3, layer_of(model).weight.shape[1]]
    weight = torch.zeros(layer_of(model).weight.shape)
    once, twice = (lora.calculate_weight([each], weight.clone(), KEY) for each in (patch, changed))
    torch.testing.assert_close(twice, 4 * once)
    again = versions.with_tensors(patch, lambda tensor: tensor)
    assert versions.patch_identity(again) == versions.patch_identity(patch)
    assert versions.patch_identity(changed) != versions.patch_identity(patch)
    stronger = (2 * patch[0], *patch[1:])
    assert versions.patch_identity(stronger) != versions.patch_identity(patch)


@case("original_modules")
def _(model):
    block = model.model.diffusion_model.blocks[0]
    model.add_object_patch("diffusion_model.blocks.0", torch.nn.Identity())
    assert versions.original_modules(model) == {}
    model.patch_model(load_weights=False)
    assert versions.original_modules(model) == {"diffusion_model.blocks.0": block}
    model.unpatch_model(CPU)


@case("patched_weight in_dynamic_vram")
def _(model):
    model = with_lora(model)
    layer = layer_of(model)
    patches = model.patches[KEY]
    weight = layer.weight.detach().clone()
    if hasattr(ops, "resolve_cast_module_with_vbar"):  # absent in 0.18.1
        for stored in (weight, quantised(weight)):
            expected = in_dynamic_vram(layer, stored, patches)
            with patch("comfy.memory_management.aimdo_enabled", new=True):
                given = (layer_with(layer, stored), KEY, stored, patches)
                patched = versions.patched_weight(*given, dtype=torch.float16)
            assert type(patched) is type(expected)
            assert torch.equal(*(each.to(torch.float32) for each in (patched, expected)))


def quantised(weight):
    from comfy.quant_ops import QuantizedTensor  # absent in 0.3.64

    return QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", scale="recalculate")


def layer_with(layer, weight):
    """Return ComfyUI's mixed precision layer with a weight, or the layer itself."""
    if isinstance(weight, nn.Parameter) or type(weight) is torch.Tensor:
        return layer
    made = ops.mixed_precision_ops().Linear(2, 2, bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.layout_type = weight._layout_cls
    return made


def in_dynamic_vram(layer, weight, patches):
    """Return a layer's patched weight in dynamic VRAM, from ComfyUI's function for it."""
    from comfy import memory_management  # absent in 0.3.64

    both = [weight, None]
    nbytes = memory_management.vram_aligned_size(both)
    prefetch = {"resident": False, "signature": None, "needs_cast": False}
    prefetch["cast_geometry"] = memory_management.tensors_to_geometries(both)
    prefetch["xfer_dest"] = torch.empty(nbytes, dtype=torch.uint8)
    functions = {"weight_lowvram_function": model_patcher.LowVramPatch(KEY, {KEY: patches})}
    names = {"seed_key": KEY.removesuffix(".weight"), "_prefetch": prefetch}
    used = SimpleNamespace(weight=weight, bias=None, **functions, **names)
    model_management.cast_to_gathered(both, prefetch["xfer_dest"])
    half = torch.float16
    return ops.resolve_cast_module_with_vbar(used, half, CPU, half, half, want_requant=True)[0]


@case("StaticPatcher")
def _(model):
    methods = {"is_dynamic", "pinned_memory_size", "partially_unload_ram", "model_mmap_residency"}
    absent = {name for name in methods if not hasattr(model_patcher.ModelPatcher, name)}
    assert absent == (methods if OLD else absent & {"model_mmap_residency"})

    class Patcher(versions.StaticPatcher):
        released = False

        def not_loaded(self):
            return [layer_of(model)]

        def pinned_bytes(self):
            return 0

        def release_pinned(self):
            self.released = True

    patcher = Patcher(model.model, CPU, CPU)
    loaded = [entry[-2] for entry in patcher._load_list()]
    assert len(loaded) == len(model._load_list()) - 1
    assert layer_of(model) not in loaded
    assert patcher.model_mmap_residency() == (0, 0)
    patcher.partially_unload_ram(0)
    assert not patcher.released
    patcher.partially_unload_ram(1)
    assert patcher.released


@case("remove_functions_later")
def _(model):
    versions.set_weight_functions(layer_of(model), "weight", [abs])
    versions.remove_functions_later(model.model)
    model.unpatch_model(CPU)
    assert layer_of(model).weight_function == []


@case("OF_THE_WEIGHTS carry_over")
def _(model):
    """A new attribute in ComfyUI must be put into one of the two sets."""
    absent = {"pinned", "backup_buffers", "cached_patcher_init"} if OLD else set()
    assert versions.OF_THE_WEIGHTS - vars(model).keys() == absent
    assert vars(model).keys() - versions.OF_THE_WEIGHTS <= CARRIED
    changed = with_lora(model)
    target = model_patcher.ModelPatcher(nn.Linear(2, 2), CPU, CPU)
    own = target.model
    versions.carry_over(changed, target)
    assert target.patches is changed.patches
    assert target.model is own


@case("architecture")
def _(model):
    assert "dtype" in model.model.model_config.unet_config
    found = versions.architecture(model.model)
    assert found["dim"] == FAMILY.settings["dim"]
    assert "dtype" not in found


@case("copy_run_state")
def _(model):
    source = SimpleNamespace(latent_shapes=[(1, 2)])
    target = SimpleNamespace()
    versions.copy_run_state(model.model, target)
    versions.copy_run_state(source, target)
    assert target.latent_shapes == [(1, 2)]


@case("HOOKS CONTROL DEFAULT")
def _(_):
    condition = {versions.HOOKS: "hooks of it", versions.CONTROL: "control of it"}
    condition |= {"model_conds": {}, "uuid": None}
    found = samplers.get_area_and_mult(condition, torch.zeros(1, 4, 8, 8), torch.ones(1))
    assert (found.hooks, found.control) == ("hooks of it", "control of it")
    combined = hooks.set_default_conds_and_combine([[]], [[[None, {}]]])
    assert combined[0][0][1] == {versions.DEFAULT: True}


@case("LOCKSTEP_MODELS")
def _(_):
    absent = {name for name in versions.LOCKSTEP_MODELS if not hasattr(model_base, name)}
    newer = {"MiniMaxH3", "Krea2", "ErnieImage", "WAN_Animate2"}  # than 0.18.1
    assert absent in ({*newer, "WAN21_SCAIL", "HunyuanVideo15", "LTXAV"}, newer, set())


def check_all_names(_):
    """Each name that `versions.py` defines has a case."""
    defined = set()
    for node in ast.parse(inspect.getsource(versions)).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        defined |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    assert defined == {*" ".join(CASES).split(), *IN_OTHER_CHECKS.split()}


@for_each(*CASES)
def check_case(model, names):
    CASES[names](model.clone())


def setup(_):
    return native(checkpoint(), FAMILY)
