"""Every CONDITIONING key is read, known to be harmless, or refused by name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wanstream.sampling.inputs import conditioning_keys, native_inputs
from wanstream.sampling.inputs.conditioning_keys import IGNORED, READ, REFUSED, TEXT_TENSORS
from wanstream.sampling.steps.errors import ConditioningError

TEXT = torch.zeros(1, 4, 4096)
EMPTY = {"samples": torch.zeros(1, 16, 3, 4, 6)}
TENSOR = torch.zeros(1)


def accept(**options):
    native_inputs([[TEXT, options]], None, EMPTY)


def test_no_key_is_in_two_lists():
    keys = [*READ, *REFUSED, *TEXT_TENSORS, *IGNORED]
    assert len(set(keys)) == len(keys)


VALUES: dict[str, object] = {
    **dict.fromkeys(REFUSED, TENSOR),
    **dict.fromkeys(("control", "hooks"), object()),
    **{key: [TENSOR] for key in ("vace_frames", "vace_mask")},
    "model_conds": {"y": object()},
    "area": (64, 64, 0, 0),
    "gligen": ("position", object(), []),
    "timestep_start": 0.5,
    "vace_strength": [1.0],
}
"""A value that a node would set for each refused key."""


@pytest.mark.parametrize(("key", "value"), VALUES.items(), ids=VALUES)
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_refused_keys_are_named(side, key, value):
    plain = [[TEXT, {}]]
    carries = [[TEXT, {"pooled_output": None, key: value}]]
    sides = {"positive": plain, "negative": plain, side: carries}
    with pytest.raises(ConditioningError, match=rf"^{side} carries .*\({key}\)"):
        native_inputs(sides["positive"], sides["negative"], EMPTY)


CARRIERS = {
    "tensor": TENSOR,
    "array": np.zeros(1),
    "list": [1, [TENSOR]],
    "dict": {"a": {"b": (TENSOR,)}},
    "object": SimpleNamespace(inner=SimpleNamespace(states=TENSOR)),
    "module": torch.nn.Linear(1, 1),
    "deep": {"a": [{"b": [{"c": [{"d": [{"e": [TENSOR]}]}]}]}]},
}


@pytest.mark.parametrize("value", CARRIERS.values(), ids=CARRIERS)
def test_an_unknown_key_with_a_tensor_is_refused(value):
    known = r"under 'from_next_year'.*remove the node .*: attention_mask, .*reference_latents"
    with pytest.raises(ConditioningError, match=known):
        accept(from_next_year=value)


PASSING = [
    {"strength": 0.5, "mask_strength": 1.0, "set_area_to_bounds": False, "default": True},
    {"guidance": 4.0, "uuid": "4f", "prompt_type": "negative", "frame_rate": 24.0, "fps": 16},
    {"noise_augmentation": 0.0, "start_percent": 0.0, "end_percent": 1.0},
    {"clip_start_percent": 0.0, "clip_end_percent": 1.0},
    {"start_percent": None, "end_percent": None},
    {"clip_start_percent": None, "clip_end_percent": None},
    {"control": None, "model_conds": {}, "hooks": None, "vace_frames": [], "keyframe_idxs": None},
    {"note of a pack": "any text", "numbers": [1, 2.5, {"a": None}], "flag": object()},
    {"control_apply_to_uncond": True, "pose_strength": 1.0, "reference_latents_method": "offset"},
    {"strength": torch.tensor(1.0)},
    {"strength": np.float32(0.5), "numbers of a pack": [np.int64(3), np.zeros(())]},
    {"logger of a pack": SimpleNamespace(log=logging.getLogger("a.pack"))},
    {"module of a pack": SimpleNamespace(library=torch)},
    *({key: TENSOR} for key in TEXT_TENSORS),
]


@pytest.mark.parametrize("options", PASSING, ids=lambda options: ", ".join(options))
def test_bookkeeping_and_text_tensors_pass_without_a_word(options, caplog):
    with caplog.at_level(logging.INFO, "wanstream.sampling"):
        accept(**options)
    assert not caplog.records


@pytest.mark.parametrize("key", IGNORED)
def test_keys_ignored_by_native_sampling_are_logged(key, caplog):
    with caplog.at_level(logging.INFO, "wanstream.sampling"):
        accept(**{key: [TENSOR]})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"positive carries {key}, which is ignored")


def test_objects_that_refer_to_each_other_are_searched_once():
    class Looked(SimpleNamespace):
        looks = 0

        @property
        def shape(self) -> None:
            Looked.looks += 1
            assert Looked.looks <= 5, "searched again and again"
            raise AttributeError

    web = [Looked() for _ in range(5)]
    for each in web:
        each.others = web
    accept(from_next_year=web)
    assert Looked.looks == 5
    Looked.looks = 0
    web[3].inner = [TENSOR]
    with pytest.raises(ConditioningError, match="carries a tensor"):
        accept(from_next_year=web)


def test_a_value_too_large_to_search_is_refused(monkeypatch):
    monkeypatch.setattr(conditioning_keys, "MAX_SEARCHED", 50)
    accept(from_next_year=[[]] * 1000, more=list(range(1000)))
    with pytest.raises(ConditioningError, match="too many objects to search"):
        accept(from_next_year=[[] for _ in range(100)])


RANGES = ("start_percent", "end_percent", "clip_start_percent", "clip_end_percent")


@pytest.mark.parametrize(
    ("options", "message"),
    [*(({key: 0.5}, "range of steps") for key in RANGES), ({"strength": 0.0}, "strength 0")],
)
def test_entries_for_a_part_of_the_run_are_refused(options, message):
    with pytest.raises(ConditioningError, match=message):
        accept(**options)


def test_an_entry_without_a_text_is_refused():
    with pytest.raises(ConditioningError, match="positive has no text, but a NoneType"):
        native_inputs([[None, {"cross_attn": TEXT}]], None, EMPTY)
