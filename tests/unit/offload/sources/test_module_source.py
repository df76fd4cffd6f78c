from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey


def block(seed: int, dtype: torch.dtype = torch.float32, width: int = 12) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 20), nn.Linear(20, width, bias=False)
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_the_weights_of_every_block(dtype):
    stacks = {"high": [block(0, dtype), block(1, dtype)], "low": [block(2, dtype)]}
    source = ModuleSource(stacks)
    assert list(source.formats) == [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
    for key in list(source.formats):
        both = source.formats[key]
        assert both.is_raw
        assert (source.file_bytes(key), source.scales(key)) == (both.stored.nbytes, {})
        flat = allocate_flat(both.stored.nbytes, "cpu")
        source.read_block(key, flat)
        views = tensor_views(flat, both.computed)
        assert list(views) == ["1.weight", "2.weight"]
        for name, view in views.items():
            assert torch.equal(view, stacks[key.expert][key.block].get_parameter(name))


def test_keeps_the_originals_while_others_stand_in():
    module = block(3)
    weight = module[1].weight.detach().clone()
    source = ModuleSource({"only": [module]})
    module[1]._parameters["weight"] = nn.Parameter(torch.zeros(20, 12))
    flat = allocate_flat(source.formats[BlockKey("only", 0)].stored.nbytes, "cpu")
    source.read_block(BlockKey("only", 0), flat)
    assert torch.equal(
        tensor_views(flat, source.formats[BlockKey("only", 0)].stored)["1.weight"], weight
    )


def test_blocks_of_one_stack_may_differ():
    source = ModuleSource({"only": [block(0), block(1, torch.float16, width=300)]})
    sizes = [source.formats[key].stored.nbytes for key in list(source.formats)]
    assert sizes == [2 * 1024, 2 * 12032]


def test_a_weight_without_data_is_refused_by_name():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"block 1 of 'high': 0\.weight has a shape but no data"):
        ModuleSource({"high": [block(0), module]})


def test_weights_made_in_inference_mode_can_be_read():
    with torch.inference_mode():
        source = ModuleSource({"only": [block(0)]})
    flat = allocate_flat(source.formats[BlockKey("only", 0)].stored.nbytes, "cpu")
    source.read_block(BlockKey("only", 0), flat)


def test_close_lets_go_of_the_weights():
    source = ModuleSource({"only": [block(0)]})
    weight = weakref.ref(source._weights[BlockKey("only", 0)]["1.weight"])
    source.close()
    source.close()
    assert weight() is None
