"""Block times in each arithmetic, and by part."""

import torch

from wanstream.shapes import ExpertShape
from wanstream.wan.measurement import measure_block, meter

TINY = ExpertShape(width=256, ffn_width=512, blocks=2)


def test_block_is_measured_in_each_arithmetic_and_in_parts():
    times = measure_block(TINY, 64, torch.device("cpu"), most_s=0.0)
    assert next(iter(times)) == ""
    assert "int8" in times
    for name, each in times.items():
        assert each.visit_s > 0
        assert 0 < each.products_s <= each.parts["products"]
        assert 0 < each.attention_s <= each.parts["attention"]
        assert {"norms", "gates and norms", "rotary embedding", "activation"} <= set(each.parts)
        assert (each.decode_s > 0, "quantising" in each.parts) == (bool(name), bool(name))
        assert each.to_dict()["limit_share"] == each.limit_share


def test_a_format_that_is_too_slow_on_a_cpu_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(meter, "SLOWEST_VISIT_S", 0.0)
    assert [*measure_block(TINY, 64, torch.device("cpu"), formats=["int8"], most_s=0.0)] == [""]
    assert "a block in int8 would take 0 s on cpu, and is not measured" in caplog.text
