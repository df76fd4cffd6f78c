"""Flat layouts of blocks: aligned and disjoint tensors, views, and stored against computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wanstream.offload.formats.layout import (
    ALIGNMENT,
    allocate_flat,
    block_format,
    flat_layout,
    streamed_names,
    tensor_views,
)

F32 = torch.float32
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = [F32, torch.float16, BF16, FP8, torch.uint8, torch.int64, torch.bool]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8))
def test_views_are_aligned_disjoint_parts_of_the_memory(parts):
    given = [(f"t{index}", *part) for index, part in enumerate(parts)]
    layout = flat_layout(given)
    assert [(each.name, each.shape, each.dtype) for each in layout.tensors] == given
    flat = allocate_flat(layout.nbytes, "cpu").zero_()
    views = tensor_views(flat, layout)
    end = 0
    total = 0
    assert list(views) == [tensor.name for tensor in layout.tensors]
    for tensor in layout.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert end <= tensor.offset < end + ALIGNMENT
        end = tensor.offset + tensor.nbytes
        view = views[tensor.name]
        assert (tuple(view.shape), view.dtype) == (tensor.shape, tensor.dtype)
        view.fill_(1)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype).reshape(-1).view(torch.uint8)
        assert torch.equal(flat[tensor.offset : end], ones)
        total += int(ones.sum())
    assert flat.sum() == total
    assert layout.nbytes % ALIGNMENT == 0
    assert end <= layout.nbytes < end + ALIGNMENT


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 4097, 1_000_000])
def test_memory_is_aligned_and_of_the_exact_size(nbytes):
    for piece in [allocate_flat(nbytes, "cpu") for _ in range(8)]:
        assert piece.data_ptr() % ALIGNMENT == 0
        assert (tuple(piece.shape), piece.dtype) == ((nbytes,), torch.uint8)


def test_memory_is_made_outside_inference_mode():
    with torch.inference_mode():
        flat = allocate_flat(512, "cpu")
    assert not flat.is_inference()
    # An inference tensor could be written here too, but not after autograd has recorded it.
    flat.fill_(7)
    view = tensor_views(flat, flat_layout([("a", (64,), F32)]))["a"]
    (torch.ones(64, requires_grad=True) * view).sum().backward()


def test_raw_blocks_need_no_decoding_and_others_have_two_layouts():
    stored = {"a": ((4, 4), BF16), "b": ((3,), F32)}
    own = {"a": BF16, "b": F32}
    assert block_format(stored, own).is_raw
    assert not block_format(stored, BF16).is_raw
    assert not block_format(stored, own, scaled=["a"]).is_raw
    both = block_format({"a": ((256,), FP8), "b": ((256,), FP8)}, F32, scaled=["b"])
    assert [tensor.offset for tensor in both.stored.tensors] == [0, 256]
    assert [tensor.offset for tensor in both.computed.tensors] == [0, 1024]
    assert both.scaled == {"b"}


def test_only_linear_weights_stream_in_parameter_order():
    block = nn.Module()
    block.table = nn.Parameter(torch.zeros(3))
    block.norm = nn.LayerNorm(4)
    block.ffn = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))
    block.attention = nn.ModuleDict({"q": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1)})
    assert streamed_names(block) == ("ffn.0.weight", "ffn.2.weight", "attention.q.weight")
    assert streamed_names(nn.Linear(2, 2)) == ("weight",)
    assert streamed_names(nn.LayerNorm(2)) == ()
