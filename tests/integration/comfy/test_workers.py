"""Workers behind a sampler in a real ComfyUI server, on the CPU, with a real Ray."""

import signal
import time

import psutil
import pytest
import torch

from wanstream.tests.integration.comfy import servers
from wanstream.tests.support.polling import eventually
from wanstream.tools import comfyui as tools

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(600)]

GONE_SECONDS = 60
WORDS = "the workers have unloaded their experts"
SEED = 5


@pytest.fixture(scope="module")
def with_ray(comfyui):
    """A ComfyUI whose Python has Ray."""
    if not servers.python_runs(comfyui, "import ray"):
        pytest.skip(
            "COMFYUI WITHOUT RAY, SO NO WORKERS RAN IN IT: "
            f'{comfyui.python} -m pip install "ray>=2.52"'
        )
    return comfyui


@pytest.fixture(scope="module")
def served(with_ray, tmp_path_factory):
    """A server with the test model.

    It ends as by Ctrl-C, together with all processes started by tests.
    """
    base = tmp_path_factory.mktemp("workers")
    tools.populate(base, workflows=["workers"])
    # A background shell lets programs ignore Ctrl-C, and so would the server.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with tools.running_server(with_ray, base) as server:
        signal.signal(signal.SIGINT, before)
        yield server
        comfyui = psutil.Process(server.process_id)
        workers = workers_of(server)
        family = comfyui.children(recursive=True)
        comfyui.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs([comfyui, *family], timeout=GONE_SECONDS)
        found = [" ".join(process.cmdline()).strip() for process in left]
        for process in left:
            process.kill()
        assert len(workers) == 2
        assert found == [], "ComfyUI has left these behind"


def prompt(*, workers=True, seed=SEED, **sampler):
    """The shipped workflow up to the latent. Without `workers`, this process computes it."""
    nodes = servers.tapped(servers.small("workers", sampler={"seed": seed, **sampler}))
    del nodes["frames"], nodes["save"]
    if workers:
        # The planner's choice, without a measurement of this machine.
        nodes["workers"]["inputs"] |= {"layout": "manual", "cfg": 2, "threads": 1}
    else:
        del nodes["workers"], nodes["sampler"]["inputs"]["workers"]
    return nodes


@pytest.fixture(scope="module")
def alone(served):
    """The latent as ComfyUI's own process computes it."""
    return servers.latent_of(served, served.run(prompt(workers=False)))


@pytest.fixture
def same(served, alone):
    """`same(end_step)` runs again. The workers before and after the test are the same.

    Another end beyond the last step is the same run, and ComfyUI keeps no result for it.
    """
    before = workers_of(served)

    def same(end_step):
        history = served.run(prompt(end_step=end_step))
        assert torch.equal(servers.latent_of(served, history), alone)

    yield same
    assert len(before) == 2
    assert workers_of(served) == before


def workers_of(server):
    family = psutil.Process(server.process_id).children(recursive=True)
    return {
        process.pid
        for process in family
        if process.cmdline() and process.cmdline()[0].startswith("ray::WanStreamWorker")
    }


def test_workers_compute_what_this_process_does(served, alone):
    history = served.run(prompt())
    assert torch.equal(servers.latent_of(served, history), alone)
    run = served.get("/wanstream/runs")["runs"][-1]
    assert (run["node"], run["ended"], run["error"]) == ("sampler", True, None)
    assert [step["expert"] for step in run["timeline"]["steps"]] == run["experts"]
    (kept,) = history["outputs"]["sampler"]["wanstream_timeline"]
    assert [step["expert"] for step in kept["steps"]] == ["high"] * 3 + ["low"]


def test_next_queue_items_find_the_same_workers(served, same, alone):
    other = servers.latent_of(served, served.run(prompt(seed=6)))
    assert torch.equal(other, servers.latent_of(served, served.run(prompt(workers=False, seed=6))))
    assert not torch.equal(other, alone)
    same(9999)


def test_cancel_ends_the_run_and_leaves_the_workers(served, same):
    prompt_id = served.queue(prompt(seed=7, steps=1000))

    def has_begun():
        time.sleep(tools.POLL_SECONDS)  # each poll costs the server time
        runs = served.get("/wanstream/runs")["runs"]
        return any(run["prompt_id"] == prompt_id and run["records"] for run in runs)

    assert eventually(has_begun, limit_s=tools.RUN_SECONDS), "no step was run"
    served.post("/interrupt", {})
    events = [event for event, _ in served.wait(prompt_id)["status"]["messages"]]
    assert events[-1] == "execution_interrupted"
    same(9998)


def test_unloading_models_empties_the_workers_and_keeps_them(served, same):
    """ComfyUI's memory manager counts worker memory.

    The menu button posts the same request.
    """
    servers.free_until(
        served, lambda: WORDS in servers.said(served), memory=False, limit_s=tools.RUN_SECONDS
    )
    same(9997)
