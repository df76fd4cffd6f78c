"""The host's view of the queue item in ComfyUI: id, ledger and dynamic VRAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.comfy

ASK = """
import torch
from installed_pack import load_pack
load_pack()
from comfy_execution.utils import CurrentNodeContext
from wanstream.host import current_host
host = current_host()

outside = host.events.ledger()
with outside.phase("open", torch.device("cpu")):
    pass
nobodys = [phase.name for phase in host.events.ledger().phases()]
ids, phases = [host.events.executing().prompt_id], []
for prompt, node, name in (("p1", "1", "open"), ("p2", "1", "open"), ("p1", "2", "text")):
    with CurrentNodeContext(prompt, node):
        ids.append(host.events.executing().prompt_id)
        with host.events.ledger().phase(name, torch.device("cpu")):
            pass
        phases.append([phase.name for phase in host.events.ledger().phases()])
ids.append(host.events.executing().prompt_id)
answer = {"ids": ids, "phases": phases, "nobodys": nobodys, "dynamic": host.memory.dynamic_bytes()}
"""

DYNAMIC = """
from comfy import memory_management
from installed_pack import load_pack
load_pack()
from wanstream.host import current_host
host = current_host()

before = host.memory.dynamic_bytes()
memory_management.aimdo_enabled = True  # as main.py does where a GPU is there
answer = [before, host.memory.dynamic_bytes()]
"""


def test_phases_are_kept_by_queue_item(in_comfyui: Callable[..., Any]) -> None:
    found = in_comfyui(ASK)
    assert found["ids"] == [None, "p1", "p2", "p1", None]
    assert found["phases"] == [["open"], ["open"], ["open", "text"]]
    assert found["nobodys"] == [], "a ledger outside a queue item is nobody's"
    assert found["dynamic"] is None, "a CPU has no dynamic VRAM"


def test_dynamic_vram_is_asked_where_it_is_used(in_comfyui: Callable[..., Any]) -> None:
    if not in_comfyui(
        "from importlib.util import find_spec\nanswer = bool(find_spec('comfy.memory_management'))"
    ):
        pytest.skip("this ComfyUI has no dynamic VRAM")
    assert in_comfyui(DYNAMIC) == [None, 0]
