"""Runs in ComfyUI's Python: native files in every number format, streamed with little RAM.

The results are bit-equal to ComfyUI's own runs.
"""

import ctypes
import json
import math
import struct
from contextlib import contextmanager
from functools import partial, reduce
from types import SimpleNamespace
from unittest import SkipTest
from unittest.mock import patch

import numpy as np
import torch
from comfy import model_patcher, sd, utils
from safetensors.torch import load_file, save_file

from wanstream.host.comfy.native.network.build import check_native
from wanstream.offload.formats import CheckpointFileError, decode_tensor, read_gguf_header
from wanstream.offload.sources import read_tensors
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.number_formats import json_tensor
from wanstream.tests.support.wan.process_counters import memory_bytes
from wanstream.tests.support.wan.quantised_files import Form, Fp8Layout

from ..checks import for_each, refused, require
from ..families import (
    FAMILIES,
    given_configuration,
    load_lora,
    native,
    sample,
    write_lora,
)
from ..tiny_models import (
    FLUX,
    LAYERWISE,
    LIMITS,
    WAN,
    Files,
    counted_patches,
    empty_network,
    load_native,
    write_header,
)

try:
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor, ck
except ImportError:  # ComfyUI 0.3.64
    QUANT_ALGOS = {}

MARKS = "layers that are marked one by one"
BLOCK_VALUES = {"wan_t2v": 1048576, "flux": 589824}
"""Values in the largest block's matrices."""
MEGABYTE = 1_000_000
ROTATED = "int8 ConvRot 64"
RESIDENT = OffloadPolicy.resident()
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
INT8 = torch.int8
BF16 = torch.bfloat16
FP16 = torch.float16
FP64 = torch.float64
FORMATS = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", INT8: "int8_tensorwise"}
OTHERS = (
    "vae.decoder.up_blocks.0.conv.weight",
    "text_encoders.umt5xxl.layers.0.ffn.weight",
    "first_stage_model.a",
)
Q = "blocks.0.self_attn.q"
SCALED = {
    "one": Form(shape="[]"),
    "one e5m2 fp64": Form(dtype=E5M2, scale=FP64, shape="[]", key="scale_weight"),
    "rows": Form(),
    "rows vector fp16": Form(scale=FP16, shape="[out]", key="scale_weight"),
    "int8 rows bf16": Form(dtype=INT8, scale=BF16),
    "int8 one": Form(dtype=INT8, shape="[1]"),
    "blocks": Form(scale=BF16, shape="[out, n, 1]", key="scale_weight"),
    "int8 blocks": Form(dtype=INT8, shape="[out, n, 1]"),
}
"""Scales without a marker."""


setup = Files


def streamed(path, family, weight_dtype="default", policy=LAYERWISE, **limits):
    with given_configuration(family):
        return load_native(path, weight_dtype, policy, **{**LIMITS, **limits})


def buffer_bytes(model):
    no_buffers = model.weights.device_bytes(OffloadPolicy.layerwise(0))
    return model.weights.device_bytes(LAYERWISE) - no_buffers


def compare(path, family, reference=None, **limits):
    """Compare streamed runs of a file with a native run of it or `reference`. Return a MODEL."""
    expected = sample(native(reference or path, family), family)
    assert expected.isfinite().all()
    for policy, runs in ((OffloadPolicy.block_swap(2), 1), (LAYERWISE, 2)):
        model = streamed(path, family, policy=policy, **limits)
        for _ in range(runs):
            assert torch.equal(sample(model, family), expected)
    return model


@contextmanager
def cpu_kernels():
    """Skip a check of a format that this ComfyUI cannot compute on the CPU."""
    try:
        yield
    except NotImplementedError as err:
        raise SkipTest(str(err)) from err


def write_scaled_fp8(family, path, kind):
    """Write a checkpoint with scaled fp8 matrices, marked in the file's "metadata" or by a tensor.

    The tensor "scaled_fp8" is the oldest way, for which all matrices are scaled, and its values ask
    for products in full precision. By the metadata, only matrices in blocks are scaled.
    """
    stored = {}
    layers = {}
    for name, tensor in family.weights().items():
        key = family.key(name)
        is_matrix = name.endswith(".weight") and tensor.ndim == 2
        if is_matrix and (kind == "scaled_fp8" or family.is_in_block(name)):
            layers[key.removesuffix(".weight")] = SimpleNamespace(weight=tensor)
        else:
            stored[key] = tensor.to(torch.bfloat16)
    scaled = Fp8Layout(kind=kind, full_precision=kind == "scaled_fp8")(layers)
    save_file(stored | scaled.tensors, path, metadata=family.metadata | scaled.metadata)


@for_each(("wan_t2v", "scaled_fp8"), ("flux", "metadata"), ("flux", "scaled_fp8"))
def check_scaled_fp8_stays_fp8_in_the_buffers(files, name, layout):
    require(QUANT_ALGOS or layout == "scaled_fp8", MARKS)
    path = files.folder / "scaled.safetensors"
    write_scaled_fp8(FAMILIES[name], path, layout)
    assert buffer_bytes(compare(path, FAMILIES[name])) == BLOCK_VALUES[name]


def quantised(layer, tensor, kind):
    """Return a layer's tensors in a file, in a format from `QUANT_ALGOS` or `ROTATED`."""
    options = {} if kind == "mxfp8" else {"scale": "recalculate"}
    marks = {}
    if kind == ROTATED:
        kind = "int8_tensorwise"
        marks = {"convrot": True, "convrot_groupsize": 64}
        options = {"per_channel": True, **marks}
    weight = QuantizedTensor.from_float(tensor, QUANT_ALGOS[kind]["comfy_tensor_layout"], **options)
    stored = {f"{layer}.comfy_quant": json_tensor({"format": kind, **marks})}
    for ending, inner in weight.state_dict("weight").items():
        plain = inner.element_size() > 1 or inner.is_floating_point() or inner.dtype == torch.int8
        stored[f"{layer}.{ending}"] = inner if plain else inner.view(torch.uint8)
    return stored


def write_mixed(family, path, format_of):
    """Write a file with block matrix number n quantised as `format_of(n)`."""
    stored = {}
    number = 0
    for name, tensor in family.weights().items():
        key = family.key(name)
        chosen = None
        if family.is_in_block(name) and name.endswith(".weight") and tensor.ndim == 2:
            chosen = format_of(number)
            number += 1
        if chosen is None:
            stored[key] = tensor.to(torch.bfloat16)
        else:
            stored |= quantised(key.removesuffix(".weight"), tensor, chosen)
    save_file(stored, path, metadata=family.metadata)


def mixed(files, name, *formats):
    require(QUANT_ALGOS, MARKS)
    path = files.folder / "mixed.safetensors"
    with cpu_kernels():
        write_mixed(FAMILIES[name], path, lambda number: formats[number % len(formats)])
    return compare(path, FAMILIES[name])


@for_each(
    ("wan_t2v", "float8_e4m3fn", 1.0), ("flux", "float8_e5m2", 1.0), ("wan_t2v", "nvfp4", 0.5625),
    ("flux", "nvfp4", 0.5625), ("flux", "mxfp8", 1.03125),
)  # fmt: skip
def check_quantised_layers_stream_with_their_scales(files, name, quantised, bytes_per_value):
    model = mixed(files, name, quantised)
    assert buffer_bytes(model) == bytes_per_value * BLOCK_VALUES[name]


def check_all_formats_and_plain_layers_in_one_file(files):
    mixed(files, "wan_t2v", *QUANT_ALGOS, None, "float8_e4m3fn")
    # Newer versions have int8 and int4 as well.
    assert {*QUANT_ALGOS} >= {"float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"}


def check_quantised_layers_are_saved_as_they_are_in_the_file(files):
    """Streamed quantised layers, saved, and loaded again by ComfyUI."""
    require(QUANT_ALGOS, MARKS)
    path, again = (files.folder / f"{each}.safetensors" for each in ("quantised", "again"))
    write_mixed(WAN, path, lambda number: ("nvfp4", "float8_e4m3fn", None)[number % 3])
    expected = sample(native(path, WAN), WAN)
    model = streamed(path, WAN)
    sd.save_checkpoint(str(again), model)
    stored, written = map(load_file, (path, again))
    layers = [key.removesuffix("comfy_quant") for key in stored if key.endswith(".comfy_quant")]
    assert len(layers) > 20
    for key in (f"{layer}{part}" for layer in layers for part in ("weight", "weight_scale")):
        assert torch.equal(written[f"model.diffusion_model.{key}"], stored[key])
    assert torch.equal(sample(native(again, WAN), WAN), expected)
    save = partial(sd.save_checkpoint, str(again), load_lora(model, files.lora()))
    refused(save, "Load Diffusion Model")


def write_quantised(family, path, quantised):
    """Write a file with all matrices in blocks quantised, "by row" in fp8 with a scale per row."""
    stored = {"by row": "float8_e4m3fn", ROTATED: "int8_tensorwise"}.get(quantised, quantised)
    require(stored in QUANT_ALGOS, quantised)
    with cpu_kernels():
        write_mixed(family, path, lambda _: ROTATED if quantised == ROTATED else stored)
    if quantised == "by row":
        scale_rows(path)


@for_each(
    ("wan_t2v", "by row", "dora"), ("wan_t2v", "nvfp4", "lokr"),
    ("wan_t2v", "int8_tensorwise", "lora", "rank 8"), ("flux", "float8_e4m3fn", "rank 8"),
    ("flux", "mxfp8", "lora"), ("flux", ROTATED, "dora"),
)  # fmt: skip
def check_a_lora_on_quantised_layers(files, name, quantised, *kinds):
    """LoRAs on quantised layers at two strengths, streamed and loaded by ComfyUI.

    A product of 8 bits stays one. A block that stays in RAM or in a buffer keeps the sum.
    """
    family = FAMILIES[name]
    path = files.folder / "patched.safetensors"
    write_quantised(family, path, quantised)
    loras = [files.lora(family, kind) for kind in kinds]

    def at_strengths(model):
        return [reduce(partial(load_lora, strength=by), loras, model) for by in (1.0, 0.5)]

    run = partial(sample, family=family, steps=2)
    with products() as counts, counted_patches() as added:
        full, half = map(run, at_strengths(native(path, family)))
        assert not torch.equal(full, half)
        for policy in (LAYERWISE, OffloadPolicy.layerwise(1, source="pinned"), RESIDENT):
            streams = streamed(path, family, policy=policy)
            ours, weaker = at_strengths(streams)
            added.clear()
            for model, expected in ((ours, full), (ours, full), (weaker, half)):
                counts.append(0)
                added.append(0)
                assert torch.equal(run(model), expected)
            if policy != LAYERWISE:
                assert added == [len(streams.model.stored), 0, len(streams.model.stored)]
    assert counts[0] == 2 * counts[1]
    assert len({*counts[1:]}) == 1
    assert counts[1] > 0


@for_each("fp32", "float8_e4m3fn", "int8_tensorwise")
def check_a_lora_behind_an_activation(files, form):
    """Load LoRA and ComfyUI's bypass node, for a layer whose int8 product has the activation."""
    require(hasattr(sd, "load_bypass_lora_for_models"), "bypass node")
    path = files.path(WAN)
    if form != "fp32":
        path = files.folder / "patched.safetensors"
        write_quantised(WAN, path, form)
    weights = {key: each for key, each in WAN.weights().items() if key.endswith(".ffn.2.weight")}
    lora = files.folder / "behind.safetensors"
    write_lora("lora", lora, weights)
    run = partial(sample, family=WAN, steps=2)
    streams = streamed(path, WAN)
    results = [run(native(path, WAN))]
    for load in (sd.load_lora_for_models, sd.load_bypass_lora_for_models):
        models = (native(path, WAN), streams)
        theirs, ours = (run(load(model, None, load_file(lora), 1.0, 0)[0]) for model in models)
        results.append(theirs)
        assert torch.equal(ours, theirs)
    assert not torch.equal(*results[:2])
    assert torch.equal(run(streams), results[0])


def scale_rows(path):
    """Give each matrix row a separate scale."""
    stored = load_file(path)
    for key in [key for key in stored if key.endswith(".weight_scale")]:
        rows = stored[key.removesuffix("_scale")].shape[0]
        stored[key] = stored[key].float().view(1, 1).repeat(rows, 1)
    save_file(stored, path)


@contextmanager
def products():
    """Count products with quantised weights in the last value of the list.

    ComfyUI calls the int8 product itself where it folds an activation into it.
    """
    counts = [0]
    linear = torch.nn.functional.linear
    folded = getattr(ck, "int8_linear", None)

    def counting(x, weight, *bias):
        counts[-1] += isinstance(weight, QuantizedTensor)
        return linear(x, weight, *bias)

    def counting_folded(*given, **settings):
        counts[-1] += 1
        return folded(*given, **settings)

    with (
        patch.object(torch.nn.functional, "linear", counting),
        patch.object(ck, "int8_linear", counting_folded, create=True),
    ):
        yield counts


GGUF_TYPES = {"F32": 0, "Q8_0": 8, "Q4_K": 12, "IQ1_S": 19}


GROUPS = {"Q8_0": (32, 34, [6e-4]), "Q4_K": (256, 144, [2e-4, 1.5e-3])}
"""Values and bytes of a packed group, and the scales that it begins with."""


def _packed(tensor, values, nbytes, scales):
    """Return random groups with usefully sized values."""
    random = np.random.default_rng(tensor.numel())
    groups = random.integers(0, 256, (tensor.numel() // values, nbytes), dtype=np.uint8)
    groups[:, : 2 * len(scales)] = np.array(scales, dtype=np.float16).view(np.uint8)
    return groups.tobytes()


def write_gguf(path, tensors, type_of, architecture):
    """Write a GGUF version 3 file."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    field = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    entries = b""
    data = b""
    for name, tensor in tensors.items():
        kind = type_of(name, tensor)
        shape = list(reversed(tensor.shape))
        place = (len(shape), *shape, GGUF_TYPES[kind], len(data))
        entries += text(name) + struct.pack(f"<I{len(shape)}QIQ", *place)
        encoded = _packed(tensor, *GROUPS[kind]) if kind in GROUPS else tensor.numpy().tobytes()
        data += encoded + bytes(-len(encoded) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + field + entries
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def packed_type(name, tensor):
    if tensor.ndim != 2 or not name.endswith(".weight") or tensor.shape[1] % 32:
        return "F32"
    return "Q4_K" if tensor.shape[1] % 256 == 0 else "Q8_0"


def decode(path, to, shapes=None):
    """Write a GGUF file's values, in other `shapes` if given."""
    plain = {}
    for key, place in read_gguf_header(path).tensors.items():
        plain[key] = torch.empty(place.shape, dtype=torch.float32)
        decode_tensor(read_tensors({key: place})[key], plain[key], packing=place.packing)
        if shapes is not None:
            plain[key] = plain[key].view(shapes[key].shape)
    save_file(plain, to)


def gguf_and_decoded(folder, family, prefix=""):
    path = folder / "model.gguf"
    decoded = folder / "decoded.safetensors"
    tensors = {prefix + family.key(key): tensor for key, tensor in family.weights().items()}
    write_gguf(path, tensors, packed_type, "wan")
    decode(path, decoded)
    return path, decoded


@for_each(("wan_t2v", ""), ("flux", ""), ("wan_vace", "model.diffusion_model."))
def check_gguf_is_the_decoded_file_loaded_by_comfyui(files, name, prefix):
    path, decoded = gguf_and_decoded(files.folder, FAMILIES[name], prefix)
    compare(path, FAMILIES[name], decoded)


def check_packed_weights_take_a_lora_and_are_not_saved_or_merged(files):
    path, decoded = gguf_and_decoded(files.folder, WAN)
    expected = sample(load_lora(native(decoded, WAN), files.lora()), WAN)
    model = streamed(path, WAN)
    patched = sample(load_lora(model, files.lora()), WAN)
    assert torch.equal(patched, expected)
    assert not torch.equal(patched, sample(model, WAN))
    refusals = {"merged": model.get_key_patches}
    # 0.3.64 saves no streamed model.
    if hasattr(model_patcher.ModelPatcher, "state_dict_for_saving"):
        refusals["saved"] = model.state_dict_for_saving
    for done, call in refusals.items():
        first = "packed (GGUF), diffusion_model.blocks.0.self_attn.q.weight and others"
        refused(call, f"{first}, and cannot be {done}")


def refusal(path, *words, weight_dtype="default"):
    """Check the message, before the graph runs, for a file that cannot stream."""
    with given_configuration(WAN):
        call = partial(check_native, path, weight_dtype)
        refused(call, path.name, *words, kind=CheckpointFileError)


def refuse_to_load(path, *words, **limits):
    refused(partial(streamed, path, WAN, **limits), *words, kind=CheckpointFileError)


def check_gguf_files_that_cannot_stream_are_refused(files):
    path = files.folder / "other.gguf"
    weights = WAN.weights()
    write_gguf(path, {"enc.blk.0.attn_q.weight": torch.ones(32, 64)}, packed_type, "t5encoder")
    refusal(path, "GGUF of 't5encoder'", "not a diffusion model")
    write_gguf(path, weights, lambda *_: "IQ1_S", "wan")
    refusal(path, "stored as IQ1_S", "Q4_K")
    write_gguf(path, weights, packed_type, "wan")
    remedy = "choose the weight type default instead of fp8_e4m3fn"
    refusal(path, "such as GGUF", remedy, weight_dtype="fp8_e4m3fn")


def check_an_unknown_quantisation_is_refused_by_name(files):
    path = files.folder / "unknown.safetensors"
    marker = {"blocks.1.self_attn.q.comfy_quant": json_tensor({"format": "int2_mystery"})}
    save_file(WAN.weights() | marker, path)
    refusal(path, "blocks.1.self_attn.q", "update ComfyUI")


def check_large_parameters_stream_with_their_block(files):
    """Bare [1, 6, dim] modulation parameters in Wan's blocks, as large ones."""
    path = files.path(WAN, "bf16")
    model = compare(path, WAN, large_parameter=1000)
    assert buffer_bytes(model) > buffer_bytes(streamed(path, WAN))


WIDE = {"dim": 1536, "num_heads": 12, "ffn_dim": 8960, "num_layers": 4}


def write_sparse(path, kind):
    """Write a file for a wide Wan model without taking space. Return the bytes in blocks."""
    tensors = {}
    layers = {}
    shapes = empty_network(WAN.network, **{**WAN.settings, **WIDE})
    for key, shape in shapes.items():
        layer = key.removesuffix(".weight")
        is_matrix = WAN.is_in_block(key) and key.endswith(".weight") and len(shape) == 2
        if kind == "fp16" or not is_matrix:
            tensors[key] = "F16", shape, 2
            continue
        rows, columns = shape
        layers[layer] = {"format": "nvfp4"}
        tensors[key] = "U8", [rows, columns // 2], 1
        tensors[f"{layer}.weight_scale"] = "F8_E4M3", [rows, columns // 16], 1
        tensors[f"{layer}.weight_scale_2"] = "F32", [], 4
    quantised = json.dumps({"format_version": "1.0", "layers": layers})
    write_header(path, tensors, {"_quantization_metadata": quantised} if layers else {})
    in_blocks = [each for key, each in tensors.items() if WAN.is_in_block(key)]
    return sum(math.prod(shape) * itemsize for _, shape, itemsize in in_blocks)


@for_each("fp16", "nvfp4")
def check_opening_takes_no_memory_for_blocks(files, kind):
    require(kind == "fp16" or QUANT_ALGOS, MARKS)
    path = files.folder / "wide.safetensors"
    # The limit means something only if blocks in memory would exceed it.
    assert write_sparse(path, kind) > 100 * MEGABYTE
    # Memory freed by earlier checks would hide new allocations.
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_bytes("RssAnon")
    model = streamed(path, WAN).model
    grown = memory_bytes("RssAnon") - before
    assert len(model.weights.blocks) == 4
    tensors = (*model.parameters(), *model.buffers())
    outside = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
    assert grown < outside + 64 * MEGABYTE


def check_files_that_cannot_stream_are_refused(files):
    path = files.path(WAN, "fp16")
    too_small = "too small to be worth streaming"
    sizes = ("0.01 GB", "from 2 GB on", "Load Diffusion Model")
    refuse_to_load(path, too_small, *sizes, smallest_model=2_000_000_000)
    refuse_to_load(path, too_small, "WAN21", smallest_block=8_000_000)
    path = files.folder / "refused.safetensors"
    weights = {key: tensor.half() for key, tensor in WAN.weights().items()}
    for key in ("blocks.1.ffn.0.weight", "blocks.1.norm3.weight"):
        weights[key] = weights[key][:-1].contiguous()
    save_file(weights, path)
    found = ("norm3.weight", "255", "256", "2 such findings")
    refuse_to_load(path, "does not fit WAN21", *found)
    save_file({"something.weight": torch.ones(4, 4)}, path)
    refusal(path, "not a diffusion model that this ComfyUI detects")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refusal(path, "PyTorch pickle")


def check_keys_of_diffusers_are_converted_by_comfyui(files):
    """Flux with diffusers keys: ComfyUI joins the query, key and value matrices."""
    path = files.folder / "diffusers.safetensors"
    settings = FLUX.settings
    weights = FLUX.weights()
    stored = {}
    written = set()
    sizes = {name: settings[name] for name in ("depth", "depth_single_blocks", "hidden_size")}
    for key, target in utils.flux_to_diffusers(sizes).items():
        parts = (target,) if isinstance(target, str) else target
        name, part, change = (*parts, None, None)[:3]
        name = name if name in weights else name.replace("_norm.weight", "_norm.scale")
        is_new = name in weights and (name, part) not in written
        if is_new and not key.endswith("to_qkv_mlp_proj.weight"):
            written.add((name, part))
            tensor = weights[name] if part is None else weights[name].narrow(*part)
            stored[key] = (tensor if change is None else change(tensor)).clone()
    save_file(stored, path)
    model = compare(path, FLUX)
    assert len(model.weights.blocks) == 8
    # They are not in the file as a whole, and stay in memory.
    assert not [key for key in model.model.stored if key.endswith(("qkv.weight", "linear1.weight"))]


def check_a_unet_with_unequal_blocks_is_refused(files):
    """A UNet with SDXL's topology, whose blocks have very different sizes."""
    settings = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
        "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "num_head_channels": 64,
        "use_spatial_transformer": True, "context_dim": 2048,
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10, "use_linear_in_transformer": True, "adm_in_channels": 2816,
        "num_classes": "sequential", "legacy": False,
    }  # fmt: skip
    shapes = empty_network("comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel", **settings)
    path = files.folder / "unet.safetensors"
    write_header(path, {key: ("F16", shape, 2) for key, shape in shapes.items()}, {})
    size = "too small to be worth streaming (0.69 GB in its blocks, from 2 GB on)"
    load = partial(load_native, path, "default", LAYERWISE)
    refused(load, size, "(SDXL)", "Load Diffusion Model", kind=CheckpointFileError)


def same_as(path, reference, family=WAN):
    """Return True if the streamed file has the result of ComfyUI's own run of the other one."""
    run = partial(sample, family=family, steps=1, cfg=1.0)
    return torch.equal(run(streamed(path, family)), run(native(reference, family)))


PREFIXES = ("diffusion_model.", "transformer.", "_orig_mod.", "module._orig_mod.", "pipe.dit.")
PREFIXES += ("model.", "model.diffusion_model.", "module.model.diffusion_model.")


@for_each(
    *((prefix, "plain") for prefix in PREFIXES),
    ("transformer.", "scaled_fp8"),
    ("model.", "scaled_fp8"),
    ("transformer.", "flux"),
    ("diffusion_model.", "whole checkpoint"),
)
def check_prefix(files, prefix, layout):
    """A file under a prefix, next to the bare file loaded by ComfyUI."""
    path, bare = (files.folder / f"{each}.safetensors" for each in ("prefixed", "bare"))
    family = FLUX if layout == "flux" else WAN
    if layout == "scaled_fp8":
        write_scaled_fp8(family, bare, layout)
    else:
        family.write(bare, "fp16")
    others = {key: torch.zeros(4, 4) for key in OTHERS} if layout == "whole checkpoint" else {}
    prefixed = {prefix + key: tensor for key, tensor in load_file(bare).items()}
    save_file(prefixed | others, path, family.metadata)
    assert same_as(path, bare, family)


def check_two_models_in_a_file_and_a_part_of_one_are_refused(files):
    path = files.folder / "two.safetensors"
    stored = {key: each.half() for key, each in WAN.weights().items()}
    both = {p + key: each.clone() for key, each in stored.items() for p in ("high.", "low.")}
    save_file(both, path)
    words = "holds 2 diffusion models, under the prefixes 'high.' and 'low.'"
    refuse_to_load(path, path.name, words)
    path = files.folder / "part.safetensors"
    save_file({f"net.{key}": each for key, each in stored.items() if "blocks." in key}, path)
    refuse_to_load(path, path.name, "not a diffusion model that this ComfyUI detects", "blocks.0.")


def scaled_file(form):
    """Return a file with quantised block matrices, and the file with their values."""
    values = {key: tensor.bfloat16() for key, tensor in WAN.weights().items()}
    stored = dict(values)
    for name, tensor in WAN.weights().items():
        if name.startswith("blocks.") and tensor.ndim == 2:
            stored[name], scale, values[name] = form.quantise(tensor)
            stored[f"{name.removesuffix('.weight')}.{form.key}"] = scale
    return stored, values


def marked(stored):
    """Return a file in ComfyUI's layout: a marker for each layer, and scales in fp32."""
    result = {}
    for key, tensor in stored.items():
        layer, _, last = key.rpartition(".")
        if "scale" not in last:
            result[key] = tensor
            continue
        scale = tensor.float()
        rows = scale if scale.numel() == 1 else scale.reshape(len(scale), -1)
        result[f"{layer}.weight_scale"] = rows
        name = FORMATS[stored[f"{layer}.weight"].dtype]
        result[f"{layer}.comfy_quant"] = json_tensor({"format": name})
    return result


@for_each(*SCALED)
def check_scales_without_a_marker(files, name):
    """The values of a file without markers are equal, and a marked file, where ComfyUI has it.

    ComfyUI rounds int8 layer inputs, so only the file with markers has equal results there.
    """
    path, reference = (files.folder / f"{each}.safetensors" for each in ("bare", "reference"))
    is_int8 = SCALED[name].dtype == INT8
    has_marks = QUANT_ALGOS and "blocks" not in name and FORMATS[SCALED[name].dtype] in QUANT_ALGOS
    stored, values = scaled_file(SCALED[name])
    save_file(stored, path)
    if has_marks:
        save_file(marked(stored), reference)
        assert same_as(path, reference)
    if not (has_marks and is_int8):
        save_file(values, reference)
        assert same_as(path, reference)


@for_each(
    *((dtype, "scaled_fp8") for dtype in (BF16, FP16)),
    *((dtype, "comfy_quant") for dtype in (BF16, FP16, FP64)),
)
def check_marked_scales_in_another_dtype(files, dtype, layout):
    """Next to the same values in fp32."""
    require(QUANT_ALGOS or layout == "scaled_fp8", MARKS)
    path, reference = (files.folder / f"{each}.safetensors" for each in ("other", "reference"))
    stored, _ = scaled_file(Form(scale=dtype, shape="[]", key="scale_weight"))
    stored = marked(stored) if layout == "comfy_quant" else stored

    def with_scales(dtype):
        mark = {"scaled_fp8": torch.zeros(2, dtype=E4M3)} if layout == "scaled_fp8" else {}
        return mark | {
            key: each.to(dtype) if key.endswith((".weight_scale", ".scale_weight")) else each
            for key, each in stored.items()
        }

    save_file(with_scales(dtype), path)
    save_file(with_scales(torch.float32), reference)
    assert same_as(path, reference)


def check_markers_in_other_spellings(files):
    """A layer's format by the bare name, in a tensor or in the header, next to the usual marker."""
    require(QUANT_ALGOS, MARKS)
    path, reference = (files.folder / f"{each}.safetensors" for each in ("marker", "reference"))
    quantised, stored = scaled_file(SCALED["one"])
    stored |= {key: each for key, each in quantised.items() if key.startswith(Q)}
    save_file(marked(stored), reference)
    bare = {f"{Q}.comfy_quant": torch.tensor(list(b"float8_e4m3fn"), dtype=torch.uint8)}
    header = {"_quantization_metadata": json.dumps({"layers": {Q: "float8_e4m3fn"}})}
    for more, metadata in ((bare, {}), ({}, header)):
        save_file(stored | more, path, metadata)
        assert same_as(path, reference)


def refuse_with(folder, more, words, without=""):
    path = folder / "refused.safetensors"
    stored, _ = scaled_file(SCALED["one"])
    save_file({key: each for key, each in (stored | more).items() if key != without}, path)
    refuse_to_load(path, path.name, words)


def check_marked_layers_without_a_part_are_refused(files):
    require(QUANT_ALGOS, MARKS)
    names = ("float8_e4m3fn", "nvfp4")
    fp8, nvfp4 = ({f"{Q}.comfy_quant": json_tensor({"format": name})} for name in names)
    plain = {f"{Q}.weight": torch.ones(128, 128)}
    start = f"marked as float8_e4m3fn, but {Q}"
    refuse_with(files.folder, fp8 | plain, f"{start}.weight is torch.float32")
    for part in ("weight_scale", "weight"):
        refuse_with(files.folder, fp8, f"{start}.{part} is missing", f"{Q}.{part}")
    refuse_with(files.folder, nvfp4, f"marked as nvfp4, but {Q}.weight_scale_2 is missing")


def check_a_broken_marker_and_a_second_scale_are_refused(files):
    require(QUANT_ALGOS, MARKS)
    broken = {f"{Q}.comfy_quant": torch.tensor(list(b"{"), dtype=torch.uint8)}
    refuse_with(files.folder, broken, f"{Q}.comfy_quant is not JSON")
    refuse_with(files.folder, {f"{Q}.scale_weight": torch.ones(1)}, f"{Q} has two scales")


PATCHES = "patch_embedding.weight"
GGUF_SHAPES = {
    "usual": lambda name, each: each.flatten(0, 1) if name == PATCHES else each,
    "without ones": lambda name, each: (
        each.squeeze().flatten(0, 1) if name == PATCHES else each.squeeze()
    ),
}


@for_each(*GGUF_SHAPES)
def check_gguf_with_other_shapes(files, name):
    path = files.folder / "shapes.gguf"
    decoded = files.folder / "decoded.safetensors"
    original = WAN.weights()
    changed = {key: GGUF_SHAPES[name](key, each).contiguous() for key, each in original.items()}
    write_gguf(path, changed, packed_type, "wan")
    decode(path, decoded, original)
    assert same_as(path, decoded)
