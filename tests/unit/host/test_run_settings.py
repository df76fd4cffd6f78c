"""Run settings in the table of runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from wanstream.host.run_events import BEGIN, RunEvents, run_settings
from wanstream.plan import AutoOffload
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef, LoraRef, WorkersRef

CPU = torch.device("cpu")
SHAPE = (1, 16, 21, 60, 104)
LAYERWISE = OffloadPolicy.layerwise()


def ref(**fields: Any) -> ExpertsRef:
    return ExpertsRef(
        high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"), **fields
    )


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (SHAPE, "832x480x81"),
        ((3, 16, 1, 8, 8), "64x64x1, 3 videos"),
        ((1, 48, 31, 44, 80), "1280x704x121"),
    ],
)
def test_the_size_is_that_of_the_video(shape: tuple[int, ...], words: str) -> None:
    assert run_settings(ref(), LAYERWISE, LAYERWISE, shape, CPU).size == words


def test_dtype_and_policy_are_what_is_computed_with() -> None:
    settings = run_settings(ref(compute_dtype="float16"), LAYERWISE, LAYERWISE, SHAPE, CPU)
    assert (settings.dtype, settings.policy, settings.lora) == ("fp16", "layerwise, 1 ahead", "")
    swap = OffloadPolicy.block_swap(12, 2, source="pinned")
    assert (
        run_settings(ref(), AutoOffload(), swap, SHAPE, CPU).policy
        == "auto: block_swap 12, 2 ahead, RAM"
    )


def test_loras_are_named_with_their_strength_and_once() -> None:
    pair = LoraRef(
        high_noise=Path("a/high.safetensors"), low_noise=Path("low.safetensors"), strength_low=0.5
    )
    same = LoraRef(high_noise=Path("one.safetensors"), low_noise=Path("one.safetensors"))
    settings = run_settings(ref(loras=(pair, same)), LAYERWISE, LAYERWISE, SHAPE, CPU)
    assert settings.lora == "high 1, low 0.5, one 1"


def test_memory_of_the_machine_is_known_where_this_process_computes() -> None:
    here = run_settings(ref(), LAYERWISE, LAYERWISE, SHAPE, CPU)
    assert (here.workers, here.device_total, here.ram_total) == (
        None,
        None,
        psutil.virtual_memory().total,
    )
    there = run_settings(ref(), LAYERWISE, LAYERWISE, SHAPE, CPU, workers=WorkersRef(count=2))
    assert (there.workers, there.device_total, there.ram_total) == (2, None, None)


def test_settings_are_announced_with_the_beginning() -> None:
    told: list[tuple[str, Any]] = []
    settings = run_settings(ref(), LAYERWISE, LAYERWISE, SHAPE, CPU)

    def announce(event: str, payload: Any) -> None:
        told.append((event, json.loads(json.dumps(payload))))

    with RunEvents(announce, prompt_id="p", node_id="7", experts=["high"], settings=settings):
        pass
    assert told[0][0] == BEGIN
    assert told[0][1]["settings"] == asdict(settings)
