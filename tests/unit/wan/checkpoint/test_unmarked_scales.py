"""Scales without a marker, in other dtypes: the dequantised file's bits, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.offload.formats import EightBit, read_header
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.plan.programs import BlockKey
from wanstream.schema.refs import Arithmetic
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.key_names import parameter_names
from wanstream.wan.checkpoint.open import open_expert
from wanstream.wan.checkpoint.quantised_layers import unmarked_layers
from wanstream.wan.experts.storage import Precision, block_source

from .test_checkpoint import dequantised
from .test_model_part import LAYER, SMALL

Tensors = dict[str, torch.Tensor]
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of a file's quantised matrices."""

    dtype: torch.dtype = E4M3
    scale: torch.dtype = FP32
    shape: str = "[out, 1]"
    key: str = "weight_scale"
    marker: str = ""
    """File marker, or text in each layer marker."""

    def quantise(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales."""
        rows = len(matrix)
        blocks = {"n": matrix.shape[1] // 64, "2": 2}.get(self.shape.removeprefix("[out, ")[0], 1)
        parts = matrix.view(rows if "out" in self.shape else 1, blocks, -1)
        largest = 127.0 if self.dtype == INT8 else 400.0
        scales = (parts.abs().amax(dim=2, keepdim=True) / largest).to(self.scale)
        codes = parts / scales.float()
        codes = (codes.round() if self.dtype == INT8 else codes).to(self.dtype).view(matrix.shape)
        sizes = {"out": rows, "n": blocks}
        shape = [
            sizes.get(size) or int(size) for size in self.shape.strip("[]").split(", ") if size
        ]
        return codes, scales.reshape(shape)


FORMS = [
    # LightX2V
    Form(),
    Form(scale=BF16),
    Form(dtype=INT8),
    Form(dtype=INT8, scale=BF16),
    Form(dtype=INT8, scale=FP16, shape="[out]"),
    Form(dtype=INT8, scale=FP64),
    Form(shape="[out]", scale=FP16),
    # a lost file marker, ModelOpt, and other spellings
    Form(shape="[]", key="scale_weight"),
    Form(shape="[1]", key="scale_weight", scale=BF16),
    Form(shape="[1, 1]", dtype=E5M2, key="scale_weight"),
    Form(shape="[1]", dtype=INT8, scale=BF16, key="scale_weight"),
    # musubi-tuner: blocks along the input
    Form(shape="[out, n, 1]", key="scale_weight"),
    Form(shape="[out, n, 1]", key="scale_weight", scale=BF16, marker="scaled_fp8"),
    Form(shape="[out, n, 1]", dtype=INT8, scale=FP16),
    Form(shape="[out, n]", dtype=E5M2, scale=FP64),
    Form(shape="[out, 2, 1]", key="scale_weight", scale=BF16),
    Form(shape="[out, 1, 1]", key="scale_weight", scale=BF16),
    # unquantised weights
    Form(dtype=BF16, key="scale_weight"),
    Form(dtype=FP16, scale=BF16, shape="[]"),
    Form(dtype=FP32, shape="[out]"),
    # scale dtypes next to markers
    *(
        Form(scale=scale, shape="[]", key="scale_weight", marker="scaled_fp8")
        for scale in (BF16, FP16, FP64)
    ),
    *(Form(scale=scale, marker='{"format": "float8_e4m3fn"}') for scale in (BF16, FP16, FP64)),
    Form(scale=BF16, dtype=INT8, marker='{"format": "int8_tensorwise"}'),
    # markers in other spellings
    Form(marker='"float8_e4m3fn"'),
    Form(marker="float8_e4m3fn"),
    Form(marker='{"format": "float8_e4m3fn"}\0'),
    Form(dtype=INT8, marker=' {"format": "int8_tensorwise", "params": {}}\n'),
]


@pytest.fixture
def quantised(
    tiny_expert_file: Callable[..., Path], tmp_path: Path
) -> Callable[[Form], tuple[Path, Tensors]]:
    """`quantised(form)`: a file with block matrices in this form, and all values in fp32 by key."""

    def write(form: Form) -> tuple[Path, Tensors]:
        tensors, values = load_file(tiny_expert_file(**SMALL)), {}
        if form.marker == "scaled_fp8":
            tensors["scaled_fp8"] = torch.zeros(0, dtype=form.dtype)
        for key, tensor in list(tensors.items()):
            if not key.startswith("blocks.") or tensor.dim() != 2:
                values[key] = tensor
                continue
            layer = key.removesuffix(".weight")
            codes, scale = form.quantise(tensor)
            tensors |= {
                key: codes,
                f"{layer}.{form.key}": scale,
                f"{layer}.scale_input": torch.ones(1),
            }
            if form.marker not in ("", "scaled_fp8"):
                tensors[f"{layer}.comfy_quant"] = torch.tensor(
                    list(form.marker.encode()), dtype=torch.uint8
                )
            factor = scale.float().reshape((*scale.shape, 1, 1, 1)[:3])
            values[key] = (codes.float().view(*factor.shape[:2], -1) * factor).view(tensor.shape)
        values.pop("scaled_fp8", None)
        path = tmp_path / "quantised.safetensors"
        save_file(tensors, path)
        return path, {parameter_names(path, values)[key]: value for key, value in values.items()}

    return write


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_are_those_of_the_dequantised_file(
    quantised: Callable[..., tuple[Path, Tensors]], form: Form
) -> None:
    path, values = quantised(form)
    read = dequantised(open_expert(path))
    assert read.keys() == values.keys()
    assert [name for name, value in read.items() if not torch.equal(value, values[name])] == []


@pytest.mark.parametrize("arithmetic", ["decoded", "as stored"])
@pytest.mark.parametrize(
    ("form", "multiplied"),
    [
        (Form(), True),
        (Form(scale=BF16), True),
        (Form(scale=FP64), True),
        (Form(dtype=INT8, scale=BF16), True),
        (Form(dtype=INT8, scale=FP16, shape="[1]"), True),
        (Form(shape="[out, n, 1]", scale=BF16), False),
        (Form(dtype=INT8, shape="[out, n, 1]"), False),
        (Form(dtype=BF16), False),
    ],
    ids=str,
)
def test_blocks_stream_with_their_scales(
    quantised: Callable[..., tuple[Path, Tensors]],
    form: Form,
    multiplied: bool,
    arithmetic: Arithmetic,
) -> None:
    """Blocks decoded to bf16 have rounded values, and multiplied codes come with fp32 scales."""
    path, values = quantised(form)
    source = block_source(
        {"high": open_expert(path)},
        Precision(compute_dtype=BF16, arithmetic=arithmetic),
        direct=False,
    )
    key = BlockKey("high", 0)
    layout = source.formats[key]
    raw, computed = (allocate_flat(part.nbytes, "cpu") for part in (layout.stored, layout.computed))
    source.read_block(key, raw)
    decode_block(raw, computed, layout, source.scales(key))
    source.close()
    views = tensor_views(computed, layout.computed)
    for tensor in layout.computed.tensors:
        expected = values[f"blocks.0.{tensor.name}"]
        assert isinstance(tensor.packing, EightBit) == (multiplied and arithmetic == "as stored")
        if isinstance(tensor.packing, EightBit):
            codes, scales = tensor.packing.split(views[tensor.name], tensor.shape)
            assert scales.dtype == FP32
            assert torch.equal(codes.float() * scales, expected)
        else:
            assert torch.equal(views[tensor.name], expected.bfloat16())


def marker(**settings: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


ROTATED = {
    "blocks.0.ffn.0.comfy_quant": marker(
        format="int8_tensorwise", convrot=True, convrot_groupsize=64
    )
}
REFUSED: list[tuple[Form, Tensors, str]] = [
    (Form(dtype=INT8), ROTATED, r"is int8 next to rotated layers, but nothing says whether it is"),
    (
        Form(dtype=E4M3),
        {f"{LAYER}.weight_scale": torch.zeros(128, 4, dtype=torch.uint8)},
        "scales in torch.uint8, as",
    ),
    (
        Form(),
        {f"{LAYER}.weight": torch.zeros(128, 64, dtype=torch.uint8)},
        "is torch.uint8 with a scale, and nothing",
    ),
    (
        Form(),
        {f"{LAYER}.weight_scale": torch.ones(127)},
        r"weight_scale is torch.float32 \[127\]; .* each of the 128",
    ),
    (
        Form(),
        {f"{LAYER}.weight_scale": torch.ones(128, 3, 1)},
        r"\[128, 3, 1\]; a scale is .* block of their 128 colu",
    ),
    (Form(), {f"{LAYER}.weight_scale": torch.ones(1, 2)}, r"\[1, 2\]; a scale is"),
    (Form(), {f"{LAYER}.weight_scale": torch.ones(128, 2, 2)}, r"\[128, 2, 2\]; a scale is"),
    (
        Form(dtype=BF16, shape="[out, n, 1]"),
        {},
        "is bfloat16 and has 2 scales for each row, which is known for fp8",
    ),
    (Form(), {f"{LAYER}.scale_weight": torch.ones(1)}, f"{LAYER} has two scales, "),
    (Form(), {"blocks.0.extra.weight_scale": torch.ones(1)}, "blocks.0.extra.weight is missing"),
    (
        Form(),
        {"head.head.weight": torch.zeros(64, 128, dtype=E4M3)},
        "head.head.weight is fp8 without a scale, though",
    ),
    *(
        (
            Form(),
            {f"{LAYER}{ending}": torch.zeros(4)},
            f"is quantised as {name}.*: it holds {LAYER}{ending}",
        )
        for ending, name in (
            (".qweight", "GPTQ or AWQ"),
            (".wscales", "SVDQuant"),
            (".weight.absmax", "bitsandbytes"),
            (".weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
            (".SCB", "bitsandbytes"),
            (".weight._data", "quanto"),
            ("._weight_qdata", "torchao"),
            (".zero_point", "SDNQ"),
            (".weight_packed", "compressed-tensors"),
            (".weight_scale_inv", "fp8 in blocks of rows and columns"),
            (".weight_s_rel", "asym_w4a8_int8"),
        )
    ),
    *(
        (
            Form(key=key),
            {},
            rf"\.{key} has the name of a scale of blocks\.0\.\S+ in an unknown spelling",
        )
        for key in ("scale", "scale_w", "weight.scale", "weight_scales", "weight_scaling")
    ),
]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {f"{LAYER}.weight_scale": None},
            f"{LAYER}.weight is torch.float8_e4m3fn without a scale, though others have",
        ),
        (
            {f"{LAYER}.weight_scale": None, f"{LAYER}.scale": torch.ones(1)},
            "in an unknown spelling",
        ),
        (
            {f"{LAYER}.weight": torch.zeros(8, 8, dtype=INT8), f"{LAYER}.weight_scale": None},
            "is torch.int8 without a",
        ),
        ({f"{LAYER}.weight_scale": None, "scaled_fp8": torch.zeros(0, dtype=E4M3)}, ""),
        (
            {
                f"{LAYER}.weight_scale": None,
                f"{LAYER}.scale_weight": torch.ones(1),
                f"{LAYER}.out_scale": torch.ones(1),
            },
            "",
        ),
    ],
    ids=["one of many", "spelling", "int8", "scaled_fp8", "of the output"],
)
def test_codes_without_a_scale_in_a_model_of_any_family(
    quantised: Callable[..., tuple[Path, Tensors]],
    edit: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    """Next to `scaled_fp8`, ComfyUI takes layers without a scale as a plain cast.

    Next to a known scale, others belong to inputs and outputs. ComfyUI ignores them.
    """
    path, _ = quantised(Form(shape="[]"))
    save_file(
        {key: each for key, each in {**load_file(path), **edit}.items() if each is not None}, path
    )
    tensors = read_header(path).tensors
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        assert (LAYER in unmarked_layers(path, tensors, ())) == (f"{LAYER}.out_scale" in edit)


@pytest.mark.parametrize(
    ("form", "more", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_what_cannot_be_read_is_refused_by_name(
    quantised: Callable[..., tuple[Path, Tensors]], form: Form, more: Tensors, message: str
) -> None:
    path, _ = quantised(form)
    save_file({**load_file(path), **more}, path)
    with pytest.raises(CheckpointError, match=message) as error:
        open_expert(path)
    assert path.name in str(error.value)
