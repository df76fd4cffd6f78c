"""Blocks read from modules' own weights, and stacks joined into one source."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.sources import TensorSource, joined_source
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey

KEY = BlockKey("only", 0)


def block(seed: int, dtype: torch.dtype = torch.float32, width: int = 12) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.LayerNorm(width), nn.Linear(width, 20), nn.Linear(20, width, bias=False)
    return nn.Sequential(*layers).to(dtype)


def read(source, key: BlockKey = KEY) -> dict[str, torch.Tensor]:
    flat = allocate_flat(source.formats[key].stored.nbytes, "cpu")
    source.read_block(key, flat)
    return tensor_views(flat, source.formats[key].stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_the_weights_of_every_block(dtype):
    stacks = {"high": [block(0, dtype), block(1, dtype)], "low": [block(2, dtype, width=300)]}
    source = ModuleSource(stacks)
    assert list(source.formats) == [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
    for key, both in source.formats.items():
        assert both.is_raw
        assert (source.file_bytes(key), source.scales(key)) == (both.stored.nbytes, {})
        views = read(source, key)
        assert list(views) == ["1.weight", "2.weight"]
        for name, view in views.items():
            assert torch.equal(view, stacks[key.expert][key.block].get_parameter(name))


def test_keeps_the_originals_while_others_stand_in_until_close():
    with torch.inference_mode():
        module = block(3)
        source = ModuleSource({"only": [module]})
    weight = module[1].weight.detach().clone()
    kept = weakref.ref(source._weights[KEY]["1.weight"])
    module[1]._parameters["weight"] = nn.Parameter(torch.zeros(20, 12))
    assert torch.equal(read(source)["1.weight"], weight)
    source.close()
    source.close()
    assert kept() is None


def test_a_weight_without_data_is_refused_by_name():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"block 1 of 'high': 0\.weight has a shape but no data"):
        ModuleSource({"high": [block(0), module]})


def test_a_joined_source_reads_each_stack_from_its_own():
    high, low = (ModuleSource({"model": [block(seed)]}) for seed in range(2))
    in_memory = joined_source({"high": high, "low": low})
    assert isinstance(in_memory, TensorSource)

    class Other:
        """Source outside memory."""

        formats = low.formats
        read_block = staticmethod(low.read_block)

    for source in (in_memory, joined_source({"high": high, "low": Other()})):
        for key, own in ((BlockKey("high", 0), high), (BlockKey("low", 0), low)):
            expected = read(own, BlockKey("model", 0)).values()
            assert all(map(torch.equal, read(source, key).values(), expected))
