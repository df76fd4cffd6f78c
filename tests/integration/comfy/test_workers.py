"""Workers behind a sampler in a real ComfyUI server, on the CPU, with a real Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from wanstream.tools.comfyui import (
    POLL_SECONDS,
    RUN_SECONDS,
    START_SECONDS,
    ComfyUI,
    Server,
    populate,
    running_server,
)

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
GONE_SECONDS = 60
SEEDS = (5, 6)
VARIANTS = ("fun_control", "fun_inp", "bernini")

Prompt = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def with_ray(comfyui: ComfyUI) -> ComfyUI:
    """A ComfyUI whose Python has Ray."""
    looks = "from importlib.util import find_spec; print(find_spec('ray') is not None)"
    found = subprocess.run(
        [comfyui.python, "-c", looks], capture_output=True, text=True, timeout=START_SECONDS
    )
    if found.stdout.strip() != "True":
        pytest.skip(
            "COMFYUI WITHOUT RAY, SO NO WORKERS RAN IN IT: "
            f'{comfyui.python} -m pip install "ray>=2.52"'
        )
    return comfyui


@pytest.fixture(scope="module")
def served(with_ray: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the test model.

    It ends as by Ctrl-C, together with all processes started by tests.
    """
    base = tmp_path_factory.mktemp("workers")
    populate(base, workflows=["workers", *(f"{name}_workers" for name in VARIANTS)])
    # A background shell lets programs ignore Ctrl-C, and so would the server.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with running_server(with_ray, base) as server:
        signal.signal(signal.SIGINT, before)
        yield server
        comfyui, workers = psutil.Process(server.process_id), workers_of(server)
        family = comfyui.children(recursive=True)
        comfyui.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs([comfyui, *family], timeout=GONE_SECONDS)
        found = [" ".join(process.cmdline()).strip() for process in left]
        for process in left:
            process.kill()
        assert len(workers) == 2
        assert found == [], "ComfyUI has left these behind"


def prompt(seed: int, *, workers: bool, **sampler: Any) -> Prompt:
    """The shipped workflow up to the latent, small. Without `workers`, this process computes it."""
    nodes: Prompt = json.loads(
        (ROOT / "workflows" / "api" / "workers.json").read_text(encoding="utf-8")
    )
    kept = {name: nodes[name] for name in ("experts", "policy", "text", "latent", "sampler")}
    kept["latent"]["inputs"] |= {"width": 64, "height": 48, "frames": 9}
    kept["sampler"]["inputs"] |= {"seed": seed, "steps": 4, **sampler}
    if workers:
        kept["workers"] = nodes["workers"]
        # The planner's choice, without a measurement of this machine.
        kept["workers"]["inputs"] |= {"layout": "manual", "cfg": 2, "threads": 1}
    else:
        del kept["sampler"]["inputs"]["workers"]
    save = {"samples": ["sampler", 0], "filename_prefix": "tap"}
    return {**kept, "save": {"class_type": "SaveLatent", "inputs": save}}


def variant_prompt(name: str, *, workers: bool) -> Prompt:
    """A shipped workflow variant over workers, small and with a tap.

    Without `workers` this process computes.
    """
    nodes: Prompt = json.loads(
        (ROOT / "workflows" / "api" / f"{name}_workers.json").read_text(encoding="utf-8")
    )
    for node in nodes.values():
        sizes = {"width": 64, "height": 48, "frames": 9, "steps": 4, "tile_size": 0}
        node["inputs"] |= {
            key: value for key, value in sizes.items() if isinstance(node["inputs"].get(key), int)
        }
    if workers:
        nodes["workers"]["inputs"] |= {"layout": "manual", "cfg": 2, "threads": 1}
    else:
        del (
            nodes["workers"],
            nodes["sampler"]["inputs"]["workers"],
            nodes["frames"]["inputs"]["workers"],
        )
    tap = {"samples": ["sampler", 0], "filename_prefix": "tap"}
    nodes["video file"] = nodes.pop("save")
    return {**nodes, "save": {"class_type": "SaveLatent", "inputs": tap}}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_over_workers_gives_the_latent_of_one_process(served: Server, name: str) -> None:
    alone = latent_of(served, served.run(variant_prompt(name, workers=False)))
    history = served.run(variant_prompt(name, workers=True))
    assert torch.equal(latent_of(served, history), alone)
    (video,) = history["outputs"]["video file"]["images"]
    assert (served.base / "output" / video["subfolder"] / video["filename"]).stat().st_size > 0


def latent_of(server: Server, history: dict[str, Any]) -> torch.Tensor:
    (saved,) = history["outputs"]["save"]["latents"]
    return load_file(server.base / "output" / saved["subfolder"] / saved["filename"])[
        "latent_tensor"
    ]


@pytest.fixture(scope="module")
def alone(served: Server) -> dict[int, torch.Tensor]:
    """The latents as ComfyUI's own process computes them."""
    return {seed: latent_of(served, served.run(prompt(seed, workers=False))) for seed in SEEDS}


@pytest.fixture
def watch(with_ray: ComfyUI, served: Server, tmp_path: Path) -> Callable[[Prompt], list[str]]:
    """`watch(prompt)` runs a prompt and returns the output of `docs/examples/progress.py`."""

    def watch(nodes: Prompt) -> list[str]:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(nodes))
        command = [str(with_ray.python), str(ROOT / "docs" / "examples" / "progress.py"), str(file)]
        environment = {**with_ray.environment(), "COMFYUI_URL": served.url}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return watch


def until_a_step_is_told(server: Server, prompt_id: str) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not any(
        run["prompt_id"] == prompt_id and run["records"]
        for run in server.get("/wanstream/runs")["runs"]
    ):
        assert time.monotonic() < deadline, "no step was run"
        time.sleep(POLL_SECONDS)


def workers_of(server: Server) -> set[int]:
    family = psutil.Process(server.process_id).children(recursive=True)
    return {
        process.pid
        for process in family
        if process.cmdline() and process.cmdline()[0].startswith("ray::WanStreamWorker")
    }


def test_workers_compute_what_this_process_does_and_the_node_shows_it(
    served: Server,
    with_ray: ComfyUI,
    alone: dict[int, torch.Tensor],
    watch: Callable[[Prompt], list[str]],
) -> None:
    lines = watch(prompt(SEEDS[0], workers=True))
    assert lines[-1] == "execution_success"
    assert [line for line in lines if line.startswith("sampler: ")][-1] == "sampler: 4 of 4"
    steps = [line.split(":")[0] for line in lines if line.startswith("step ")]
    assert steps == [
        f"step {number} of 4 ({expert})" for number, expert in enumerate(["high"] * 3 + ["low"], 1)
    ]
    run = served.get("/wanstream/runs")["runs"][-1]
    assert (run["node"], run["ended"], run["error"]) == ("sampler", True, None)
    assert [step["expert"] for step in run["timeline"]["steps"]] == run["experts"]
    (history,) = (entry for entry in served.get("/history?max_items=1").values())
    assert torch.equal(latent_of(served, history), alone[SEEDS[0]])
    (kept,) = history["outputs"]["sampler"]["wanstream_timeline"]
    assert len(kept["steps"]) == 4


def test_the_next_queue_item_finds_the_same_workers_and_computes_what_the_graph_says(
    served: Server, alone: dict[int, torch.Tensor]
) -> None:
    before = workers_of(served)
    assert len(before) == 2
    for seed in reversed(SEEDS):
        # Another end beyond the last step is the same run, and ComfyUI keeps no result for it.
        history = served.run(prompt(seed, workers=True, end_step=9999))
        assert torch.equal(latent_of(served, history), alone[seed])
    assert workers_of(served) == before


def test_cancel_ends_the_run_and_leaves_the_workers(
    served: Server, alone: dict[int, torch.Tensor]
) -> None:
    before = workers_of(served)
    prompt_id = served.queue(prompt(7, workers=True, steps=1000))
    until_a_step_is_told(served, prompt_id)
    served.post("/interrupt", {})
    events = [event for event, _ in served.wait(prompt_id)["status"]["messages"]]
    assert events[-1] == "execution_interrupted"
    history = served.run(prompt(SEEDS[0], workers=True, end_step=9998))
    assert torch.equal(latent_of(served, history), alone[SEEDS[0]])
    assert workers_of(served) == before


def test_unloading_models_empties_the_workers_and_keeps_them(
    served: Server, alone: dict[int, torch.Tensor]
) -> None:
    """ComfyUI's memory manager counts worker memory.

    The menu button posts the same request.
    """
    before = workers_of(served)
    log = served.base / "server.log"
    deadline = time.monotonic() + RUN_SECONDS
    while "the workers have unloaded their experts" not in log.read_text(
        encoding="utf-8", errors="replace"
    ):
        # ComfyUI may sleep through a request that arrives as it falls asleep.
        served.post("/free", {"unload_models": True})
        assert time.monotonic() < deadline, "no request reached the workers"
        time.sleep(1)
    history = served.run(prompt(SEEDS[1], workers=True, end_step=9997))
    assert torch.equal(latent_of(served, history), alone[SEEDS[1]])
    assert workers_of(served) == before
