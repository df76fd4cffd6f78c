"""What a real ComfyUI server tells of the nodes that run: to pages that are interested, and nothing otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.workbench.comfyui import ComfyUI, running_server

pytestmark = pytest.mark.comfy

SECONDS = 60
WORKFLOW = "c6ee4ad1-0d5c-4d34-9a0c-3a0a1b1c5f11"


class Gate:
    """A node that runs until it is opened."""

    def __init__(self, server: Any, file: Path) -> None:
        self.server, self.file = server, file

    def queue(self) -> str:
        prompt = {"7": {"class_type": "TestGate", "inputs": {"file": str(self.file)}}}
        prompt_id: str = self.server.queue(prompt, extra_pnginfo={"workflow": {"id": WORKFLOW}})
        return prompt_id

    def open(self) -> None:
        self.file.touch()


@pytest.fixture
def gate(server: Any, tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(server, tmp_path / "open")
    yield gate
    gate.open()


def items(server: Any) -> dict[str, dict[str, Any]]:
    return {item["prompt_id"]: item for item in server.get("/wanstream/runs")["items"]}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not so after {SECONDS} s"
        time.sleep(0.05)


def node(server: Any, prompt_id: str) -> dict[str, Any]:
    figures: dict[str, Any] = items(server).get(prompt_id, {}).get("nodes", {}).get("7", {})
    return figures


def test_nobody_looks_at_nodes_while_no_page_is_interested(server: Any, gate: Gate) -> None:
    gate.open()
    prompt_id = gate.queue()
    server.wait(prompt_id)
    assert prompt_id not in items(server)


def test_a_page_that_is_opened_in_the_middle_tells_no_time_that_nobody_measured(server: Any, gate: Gate) -> None:
    """Before all tests that make the server look: nobody may do so while the first node runs."""
    first = {"class_type": "PrimitiveString", "inputs": {"value": str(gate.file)}}
    prompt_id = server.queue({"1": first, "7": {"class_type": "TestGate", "inputs": {"file": ["1", 0]}}})
    until(lambda: bool(server.get("/queue")["queue_running"]))
    time.sleep(1)
    server.post("/wanstream/watch", {"seconds": 4})
    until(lambda: bool(node(server, prompt_id)))
    assert node(server, prompt_id)["partly"]
    gate.open()
    server.wait(prompt_id)
    until(lambda: not items(server)[prompt_id]["running"])
    (gate_id, figures), *_ = items(server)[prompt_id]["nodes"].items()
    assert (gate_id, figures["partly"], figures["running"]) == ("7", True, False)
    assert figures["seconds"] > 0
    assert "1" not in items(server)[prompt_id]["nodes"], "not 0.0 s"
    time.sleep(5)  # the interest is over, for the tests below


@pytest.mark.parametrize("body", [{}, {"seconds": "soon"}, {"seconds": -1}, {"seconds": 1e9}, {"seconds": None}, []])
def test_an_interest_that_makes_no_sense_is_refused_in_words(server: Any, body: Any) -> None:
    status, answer = server.post("/wanstream/watch", body)
    assert status == 400
    assert "seconds" in answer["error"]


def test_a_node_is_seen_while_it_runs_and_afterwards(server: Any, gate: Gate) -> None:
    assert server.post("/wanstream/watch", {"seconds": 120}) == (200, {"seconds": 120.0})
    prompt_id = gate.queue()
    until(lambda: bool(node(server, prompt_id)))
    assert node(server, prompt_id)["running"]
    gate.open()
    server.wait(prompt_id)
    until(lambda: not items(server)[prompt_id]["running"])
    figures = node(server, prompt_id)
    assert (figures["class_type"], figures["running"]) == ("TestGate", False)
    assert figures["seconds"] > 0
    assert figures["rss_peak"] > 0
    assert figures["device_used_peak"] is None, "there is no device but the CPU"
    assert items(server)[prompt_id]["workflow"] == WORKFLOW


def test_every_item_of_a_queue_is_seen(server: Any, tmp_path: Path) -> None:
    server.post("/wanstream/watch", {"seconds": 120})
    gates = [Gate(server, tmp_path / str(number)) for number in range(2)]
    ids = [gate.queue() for gate in gates]
    for gate, prompt_id in zip(gates, ids, strict=True):
        until(lambda prompt_id=prompt_id: bool(node(server, prompt_id)))
        gate.open()
    until(lambda: all(prompt_id in items(server) and not items(server)[prompt_id]["running"] for prompt_id in ids))
    assert all(node(server, prompt_id)["seconds"] > 0 for prompt_id in ids)


def test_a_quick_last_node_has_run_and_one_from_the_cache_has_not(server: Any, tmp_path: Path) -> None:
    server.post("/wanstream/watch", {"seconds": 120})
    told = []
    for number in range(2):
        gate = Gate(server, tmp_path / str(number))
        prompt_id = server.queue(
            {
                "1": {"class_type": "PrimitiveString", "inputs": {"value": str(tmp_path)}},
                "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
                "7": {"class_type": "TestGate", "inputs": {"file": str(gate.file)}},
                "8": {"class_type": "PreviewAny", "inputs": {"source": ["7", 0]}},
            }
        )
        until(lambda prompt_id=prompt_id: bool(node(server, prompt_id)))
        gate.open()
        server.wait(prompt_id)
        until(lambda prompt_id=prompt_id: not items(server)[prompt_id]["running"])
        nodes = items(server)[prompt_id]["nodes"]
        told.append({node_id: figures["ran"] for node_id, figures in sorted(nodes.items())})
    assert told == [
        {"1": True, "2": True, "7": True, "8": True},
        {"1": False, "2": False, "7": True, "8": True},
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_memory_of_the_device_is_seen(comfyui: ComfyUI, base: Path, tmp_path: Path) -> None:
    (tmp_path / "custom_nodes").symlink_to(base / "custom_nodes", target_is_directory=True)
    with running_server(comfyui, tmp_path, cpu=False) as server:
        server.post("/wanstream/watch", {"seconds": 120})
        gate = Gate(server, tmp_path / "open")
        prompt_id = gate.queue()
        until(lambda: bool(node(server, prompt_id).get("device_used_peak")))
        gate.open()
        server.wait(prompt_id)
        assert node(server, prompt_id)["device_used_peak"] <= torch.cuda.mem_get_info()[1]
