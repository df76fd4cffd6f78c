"""Workers share every lane's tokens through diffusers' context parallelism."""

import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from wanstream.distributed.worker.parallel_forward import backend_for
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.schema import Mesh, MeshError, OffloadPolicy, parse_step_strengths
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing import experts, make_lora
from wanstream.tests.support.distributed import split_jobs
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan import Nag

LAYERWISE = OffloadPolicy.layerwise(1)
SWAP = OffloadPolicy.block_swap(2)
CHUNKED = replace(LAYERWISE, chunk_tokens=8)


@pytest.fixture(scope="session")
def wide(experts_ref):
    """`wide(dtype=float32, **shape)`: experts with four heads."""
    return partial(experts_ref, heads=4)


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [(Mesh(ulysses=2), SWAP), (Mesh(ulysses=4), CHUNKED), (Mesh(cfg=2, ulysses=2), LAYERWISE)],
    ids=split_jobs.row_id,
)
def test_ulysses_gives_what_one_worker_gives(mesh, policy, split, wide, make_request, check_split):
    split.join(mesh)
    _, results = check_split(wide(), make_request(), policy)
    for worker in results:
        assert worker["gathered"] == worker["crossed"] > 0


def test_int8_attention_gets_all_tokens_of_its_heads(split, wide, make_request, check_split):
    split.join(Mesh(ulysses=2))
    given = make_request(), CHUNKED
    plain = split.alone(wide(), *given)
    with split.int8_attention():
        alone, results = check_split(replace(wide(), attention="int8"), *given)
        assert [shape[1:3] for shape in split.all(split_jobs.job_seen)] == [(2, 48)] * 2
    for latents in (alone, results[0]["latents"]):
        assert difference(latents, plain) <= ROUNDING
    for worker in results:
        assert worker["gathered"] == worker["crossed"] > 0
    assert torch.equal(split.alone(wide(), *given), plain)


def test_windows_and_nag_on_shared_tokens(split, wide, make_request, check_split):
    """Window tokens are split like video tokens. Attention to both texts is local."""
    split.join(Mesh(ulysses=2))
    windows = ContextWindows(frames=2, overlap=1)
    request = make_request(shape=(1, 16, 3, 8, 12), guidance=(4.0, 1.0), nag=Nag(), windows=windows)
    check_split(wide(), request, CHUNKED)


@pytest.fixture
def save_lora(make_tiny_expert, tmp_path):
    """`save_lora(seed=1, in_channels=16, **settings)`: a LoRA for `wide` experts."""

    def save(*, seed=1, in_channels=16, **settings):
        path = tmp_path / f"{seed}.safetensors"
        lora = make_lora(make_tiny_expert(heads=4, in_channels=in_channels), seed=seed)
        experts.save_lora(lora, path, dtype=torch.float32)
        return LoraRef(high_noise=path, low_noise=path, **settings)

    return save


def test_images_and_loras_on_shared_tokens(split, wide, make_request, save_lora, check_split):
    split.join(Mesh(cfg=2, ulysses=2))
    loras = [save_lora(seed=seed, in_channels=36, strength_high=0.5 * seed) for seed in (1, 2)]
    given = {"image_condition": normal(1, 20, 2, 8, 12, seed=21), "solver": "unipc"}
    request = make_request(shape=(2, 16, 2, 8, 12), **given)
    plain = split.alone(wide(in_channels=36), request, SWAP)
    alone, _ = check_split(replace(wide(in_channels=36), loras=tuple(loras)), request, SWAP)
    assert difference(plain, alone) > 1e-3


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [(Mesh(ulysses=2), SWAP), (Mesh(cfg=2), OffloadPolicy.resident())],
    ids=split_jobs.row_id,
)
def test_three_stages_on_two_workers(
    mesh, policy, split, wide, make_request, save_lora, check_split
):
    """Both workers change a LoRA's strength, biases included, before the same step."""
    split.join(mesh)
    lora = save_lora(steps=parse_step_strengths("0: 0, 3: 0.5"))
    request = make_request(guidance_steps=(3.0, 1.0))
    constant = split.alone(replace(wide(), loras=(replace(lora, steps=()),)), request, policy)
    alone, _ = check_split(replace(wide(), loras=(lora,)), request, policy)
    assert difference(constant, alone) > 1e-3


@pytest.mark.slow
def test_compiled_blocks_on_shared_tokens(split, wide, make_request):
    """Graphs break at collectives.

    Gathered bytes are counted in each run, traced or not, and for any video size.
    """
    split.join(Mesh(ulysses=2))
    longer = torch.randn(1, 16, 5, 4, 8, generator=torch.Generator().manual_seed(1))
    for request in (make_request(), make_request(noise=longer)):
        job = split_jobs.job_run_compiled, wide(layers=2), request, LAYERWISE
        for plain, first, second in split.all(*job):
            assert torch.equal(first["latents"], plain["latents"])
            assert torch.equal(second["latents"], plain["latents"])
            assert plain["gathered"] == first["gathered"] == second["gathered"] > 0
            assert (plain["graphs"], second["graphs"]) == (0, 0)
            assert first["graphs"] > 0


@pytest.mark.parametrize(
    "mesh", [Mesh(ring=4), Mesh(ring=2, ulysses=2), Mesh(cfg=2, ring=2)], ids=str
)
def test_a_ring_gives_what_one_worker_gives(mesh, split, wide, make_request, check_split):
    split.join(mesh)
    with split.attention_with_lse():
        _, results = check_split(wide(), make_request(), LAYERWISE)
    for worker in results:
        assert worker["gathered"] == worker["crossed"] > 0


def test_a_ring_rounds_bf16_no_worse_than_one_worker_does(split, wide, make_request):
    split.join(Mesh(ring=2))
    given = wide(dtype=torch.bfloat16), make_request(), LAYERWISE
    exact = split.alone(wide(), *given[1:])
    with split.attention_with_lse():
        alone = split.alone(*given)
        results = split.run(*given)
    of_ring, of_one = (difference(each, exact) for each in (results[0]["latents"], alone))
    assert of_ring <= 1.5 * of_one


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [(Mesh(ulysses=2), CHUNKED), (Mesh(ring=2), LAYERWISE)],
    ids=split_jobs.row_id,
)
def test_the_models_are_as_they_were(mesh, policy, split, wide):
    split.join(mesh)
    with split.attention_with_lse():
        results = split.all(split_jobs.job_attach_and_detach, wide(), policy)
    for before, inside, after in results:
        assert before != inside
        assert before == after


@pytest.mark.parametrize(
    ("mesh", "shape", "heads", "message"),
    [
        (Mesh(ulysses=2), (1, 16, 1, 2, 2), 4, "ulysses 2 cannot split 1 tokens evenly"),
        (Mesh(ulysses=2), (1, 16, 2, 8, 12), 1, "ulysses 2 cannot split 1 heads evenly"),
        (Mesh(ring=2), (1, 16, 2, 8, 12), 4, "'native' returns no log-sum-exp on cpu in float32"),
    ],
    ids=["tokens", "heads", "ring"],
)
def test_what_does_not_fit_is_refused_by_all_and_they_go_on(
    mesh, shape, heads, message, split, experts_ref, make_request
):
    split.join(mesh)
    given = experts_ref(heads=heads), make_request(shape=shape), LAYERWISE
    for answer in [process.start(split_jobs.job_run, *given) for process in split.processes[:2]]:
        with pytest.raises(MeshError, match=message):
            answer.result(60)
    assert split.alone(*given).isfinite().all()


HALF = torch.bfloat16
NO_LSE = "'int8' returns no log-sum-exp, which a ring needs"


@pytest.mark.parametrize(
    ("name", "mesh", "dtype", "chosen"),
    [
        (None, Mesh(ring=2, ulysses=2), HALF, "_native_flash"),
        ("_native_cudnn", Mesh(ring=2), HALF, "_native_cudnn"),
        ("int8", Mesh(ulysses=2), HALF, "int8"),
        (None, Mesh(ring=2, ulysses=2), torch.float32, "use ulysses 4 instead, or bf16 on a GPU"),
        ("xformers", Mesh(ulysses=2), HALF, "'xformers' does not support several workers; choose"),
        ("int8", Mesh(ring=2, ulysses=2), HALF, NO_LSE),
    ],
)
def test_a_backend_is_chosen_for_the_mesh_or_refused(name, mesh, dtype, chosen):
    assert backend_for(None, Mesh(ulysses=2), torch.device("cpu"), torch.float32) is None
    with pytest.raises(MeshError, match=chosen) if " " in chosen else nullcontext():
        assert backend_for(name, mesh, torch.device("cuda:0"), dtype) == chosen


@pytest.mark.parametrize(
    ("ulysses", "cases"),
    [(2, [(torch.float32, 3, None)]), (4, [(torch.bfloat16, 1, None), (torch.bfloat16, 2, 64)])],
    ids=["2", "4"],
)
def test_estimate_of_shared_tokens(ulysses, cases, split):
    split.join(Mesh(ulysses=ulysses))
    counting = str(Path(__file__).parents[2] / "support" / "offload" / "alive_tensors.py")
    for case in cases:
        for alive, estimate in split.all(split_jobs.job_hold, counting, *case):
            assert 0.9 * estimate <= alive <= 1.03 * estimate


@pytest.mark.parametrize(
    ("spans_machines", "shape", "stop_at", "stop"),
    [
        (False, (1, 16, 2, 8, 12), {1: 9}, (2, 1)),
        (True, (1, 16, 2, 8, 12), {3: 5}, (2, 0)),
        (True, (1, 16, 3, 6, 10), {3: 5}, (2, 0)),
    ],
    ids=["48 tokens", "48 tokens between machines", "45 tokens between machines"],
)
def test_a_stop_of_one_stops_all_before_the_same_block(
    spans_machines, shape, stop_at, stop, split, wide, make_request, check_split
):
    """Between machines, before the same step.

    With 45 tokens the shares are unequal, and the workers exchange their sizes.
    """
    mesh = Mesh(cfg=2, ulysses=2)
    split.join(mesh, spans_machines=spans_machines)
    given = wide(), make_request(shape=shape), LAYERWISE
    assert split.all(split_jobs.job_run_until, *given, stop_at, None) == [stop] * mesh.size
    check_split(*given)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["lost", "hanging"])
def test_a_worker_that_is_lost_in_a_run_is_told_by_the_others(
    sent, split, wide, make_request, check_split
):
    mesh = Mesh(cfg=2, ulysses=2)
    split.join(mesh, timeout_s=3.0)
    given = wide(), make_request(), LAYERWISE
    job = split_jobs.job_run_until, *given, {3: 6}, sent
    answers = [process.start(*job) for process in split.processes[:4]]
    try:
        for answer in answers[:3]:
            with pytest.raises((PeerLostError, WorkerTimeoutError), match="no sign of rank 3"):
                answer.result()
    finally:
        split.processes.replace(3)
    split.leave()
    split.join(mesh)
    check_split(*given)


FRAMES = (1, 48, 3, 4, 8)
"""8 tokens in each of 3 frames for Wan2.2 TI2V-5B: two workers have one frame and a half."""


@pytest.fixture
def ti2v(make_task, tiny_expert_folder):
    """`ti2v(**changes)`: the model with four heads, and a request with a first frame."""

    def make(**changes):
        mask = torch.ones(1, 1, *FRAMES[2:])
        mask[:, :, 0] = 0
        start = {"mask": mask, "latent": normal(*FRAMES, seed=21) * (1 - mask)}
        steps = {"switch_step": None, "boundary_ratio": 0.0}
        request = {"noise": normal(*FRAMES, seed=20), **start, **steps, **changes}
        folder = tiny_expert_folder(heads=4, in_channels=48, layers=2)
        ref = ExpertsRef(high_noise=folder, single=True, compute_dtype="float32")
        return ref, make_task(request=request).request

    return make


@pytest.mark.parametrize("policy", [LAYERWISE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2)], ids=str)
def test_two_workers_use_the_timesteps_of_their_tokens(mesh, policy, split, ti2v, check_split):
    split.join(mesh)
    check_split(*ti2v(), policy)
    alone, _ = check_split(*ti2v(windows=ContextWindows(frames=2, overlap=1)), policy)
    assert difference(split.alone(*ti2v(mask=None), policy), alone) > 1e-3


def test_compiled_blocks_with_timesteps_of_tokens(split, ti2v):
    """One graph for all blocks and steps, with both timesteps among a worker's tokens or not."""
    for number in range(2):  # new processes have compiled nothing
        split.processes.at_least(2).replace(number)
    split.join(Mesh(ulysses=2))
    results = split.all(split_jobs.job_run_compiled, *ti2v(), LAYERWISE)
    for plain, compiled, again in results:
        assert difference(compiled["latents"], plain["latents"]) <= ROUNDING
        assert torch.equal(again["latents"], compiled["latents"])
        assert again["graphs"] == 0
    assert results[0][1]["graphs"] == results[1][1]["graphs"]
