from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wanstream.offload.formats.layout import (
    ALIGNMENT,
    BlockFormat,
    allocate_flat,
    block_format,
    flat_layout,
    streamed_names,
    tensor_views,
)

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize(
    ("tensors", "offsets", "sizes", "total"),
    [
        ([], [], [], 0),
        ([("a", (64,), torch.float32)], [0], [256], 256),
        ([("a", (65,), torch.float32)], [0], [260], 512),
        ([("a", (3, 5), torch.bfloat16), ("b", (2,), torch.uint8)], [0, 256], [30, 2], 512),
        (
            [("a", (), torch.float32), ("b", (0, 7), torch.float16), ("c", (1,), torch.bool)],
            [0, 256, 256],
            [4, 0, 1],
            512,
        ),
        (
            [("q", (5120, 5120), torch.bfloat16), ("ffn", (13824, 5120), torch.bfloat16)],
            [0, 52428800],
            [52428800, 141557760],
            193986560,
        ),
    ],
)
def test_layout_table(tensors, offsets, sizes, total):
    layout = flat_layout(tensors)
    assert [tensor.offset for tensor in layout.tensors] == offsets
    assert [tensor.nbytes for tensor in layout.tensors] == sizes
    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in layout.tensors] == tensors
    assert layout.nbytes == total


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8))
def test_tensors_are_aligned_ordered_and_disjoint(parts):
    layout = flat_layout((f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(parts))
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
    assert layout.nbytes % ALIGNMENT == 0
    assert end <= layout.nbytes < end + ALIGNMENT


@settings(deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8))
def test_views_share_the_flat_memory(parts):
    layout = flat_layout((f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(parts))
    flat = allocate_flat(layout.nbytes, "cpu").zero_()
    views = tensor_views(flat, layout)
    assert list(views) == [tensor.name for tensor in layout.tensors]
    for tensor in layout.tensors:
        view = views[tensor.name]
        assert (tuple(view.shape), view.dtype) == (tensor.shape, tensor.dtype)
        view.fill_(1)
        piece = flat[tensor.offset : tensor.offset + tensor.nbytes]
        assert torch.equal(
            piece, torch.ones(tensor.shape, dtype=tensor.dtype).reshape(-1).view(torch.uint8)
        )
    assert flat.sum() == sum(
        int(torch.ones(tensor.shape, dtype=tensor.dtype).reshape(-1).view(torch.uint8).sum())
        for tensor in layout.tensors
    )


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(512, dtype=torch.int8),
        torch.empty(2, 256, dtype=torch.uint8),
        torch.empty(255, dtype=torch.uint8),
    ],
)
def test_views_refuse_other_memory(wrong):
    with pytest.raises(AssertionError):
        tensor_views(wrong, flat_layout([("a", (64,), torch.float32)]))


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 4097, 1_000_000])
def test_memory_is_aligned_and_of_the_exact_size(nbytes):
    pieces = [allocate_flat(nbytes, "cpu") for _ in range(8)]
    for piece in pieces:
        assert piece.data_ptr() % ALIGNMENT == 0
        assert (tuple(piece.shape), piece.dtype) == ((nbytes,), torch.uint8)


def test_memory_is_made_outside_inference_mode():
    with torch.inference_mode():
        flat = allocate_flat(512, "cpu")
    assert not flat.is_inference()
    flat.fill_(
        7
    )  # an inference tensor could be written here too, but not after autograd has recorded it
    view = tensor_views(flat, flat_layout([("a", (64,), torch.float32)]))["a"]
    (torch.ones(64, requires_grad=True) * view).sum().backward()


def test_raw_means_that_nothing_is_decoded():
    stored = {"a": ((4, 4), torch.bfloat16), "b": ((3,), torch.float32)}
    own = {"a": torch.bfloat16, "b": torch.float32}
    assert block_format(stored, own).is_raw
    assert not block_format(stored, torch.bfloat16).is_raw
    assert not block_format(stored, own, scaled=["a"]).is_raw


def test_computed_layout_has_its_own_offsets():
    both = block_format(
        {"a": ((256,), torch.float8_e4m3fn), "b": ((256,), torch.float8_e4m3fn)},
        torch.float32,
        scaled=["b"],
    )
    assert [tensor.offset for tensor in both.stored.tensors] == [0, 256]
    assert [tensor.offset for tensor in both.computed.tensors] == [0, 1024]
    assert both.scaled == {"b"}


@pytest.mark.parametrize(
    "computed",
    [[("b", (4,), torch.float32)], [("a", (5,), torch.float32)], []],
    ids=["name", "shape", "count"],
)
def test_the_two_layouts_of_a_block_must_agree(computed):
    stored = flat_layout([("a", (4,), torch.float32)])
    with pytest.raises(AssertionError, match="layouts differ"):
        BlockFormat(stored=stored, computed=flat_layout(computed))


def test_only_linear_weights_stream_in_parameter_order():
    block = nn.Module()
    block.table = nn.Parameter(torch.zeros(3))
    block.norm = nn.LayerNorm(4)
    block.ffn = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))
    block.attention = nn.ModuleDict({"q": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1)})
    assert streamed_names(block) == ("ffn.0.weight", "ffn.2.weight", "attention.q.weight")
    in_order = [name for name, _ in block.named_parameters() if name in streamed_names(block)]
    assert tuple(in_order) == streamed_names(block)
    assert streamed_names(nn.Linear(2, 2)) == ("weight",)
    assert streamed_names(nn.LayerNorm(2)) == ()
