"""The planner's run and predicted timelines: estimates equal the engine's figures and real runs."""

from dataclasses import replace

import pytest
import torch

from wanstream.block_kernels import Kernels
from wanstream.devices import auto_dtype
from wanstream.offload.core.pages import in_pages
from wanstream.plan.programs import step_visits
from wanstream.sampling import lane_names, run_shape
from wanstream.sampling.cache import Stage
from wanstream.sampling.estimate import predicted_calls, predicted_timeline, request_run_shape
from wanstream.sampling.steps import Side
from wanstream.schema import OffloadPolicy
from wanstream.shapes import VideoShape
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, run
from wanstream.wan.experts.open import open_experts, open_single_model

LANES = (Stage("high"), lane_names(1, (Side.POSITIVE,)))
GPU = torch.device("cuda", 0)
RESIDENT = OffloadPolicy.resident()
PARTLY_IN_RAM = replace(OffloadPolicy.block_swap(2, 1, source="pinned"), ram_blocks=3)
BF16 = torch.bfloat16
ON_CPU = {"machine": CPU_MACHINE, "device": CPU}


@pytest.mark.parametrize(
    ("stored", "storage", "decodes"),
    [(BF16, "as stored", False), (torch.float32, "as stored", True), (BF16, "fp8", True)],
)
def test_the_planner_knows_the_files_decoded_on_arrival(tiny_expert_file, stored, storage, decodes):
    path = tiny_expert_file(dtype=stored)
    shape = (1, 16, 1, 4, 4)
    given = {"lanes": {0: LANES}, "sides": {"high": (0,), "low": (0,)}}
    with open_experts(path, path, compute_dtype=torch.bfloat16, storage=storage) as pair:
        on_cpu, on_gpu = (run_shape(pair, shape, device, **given).blocks for device in (CPU, GPU))
        assert on_cpu.decodes == on_gpu.decodes == decodes
        # A CPU decodes from RAM slots, or reads straight into buffers with nothing to decode.
        engine = pair.engine(LAYERWISE, CPU)
        visits = step_visits(["high"], engine.block_counts)
        with engine.run(visits) as active:
            for visit in visits:
                with active.visit(*visit):
                    pass
        assert pair.host_bytes == (2 * in_pages(on_cpu.stored_bytes) if decodes else 0)
        # A GPU's memory is counted once: resident tensors, two buffers, and two blocks during
        # decoding.
        raw = 2 * on_gpu.stored_bytes if decodes else 0
        planned = 2 * on_gpu.computed_bytes + raw + on_gpu.outside_bytes
        assert planned == pair.device_bytes(LAYERWISE, device=GPU)


def test_the_planner_gets_the_figures_of_the_5b_model(tiny_expert_file):
    """Widths, channels and bytes from file headers, 16 pixels per latent pixel, one model."""
    path = tiny_expert_file(dtype=torch.bfloat16, in_channels=48, heads=3, ffn_dim=640, layers=2)
    video = VideoShape(width=1280, height=704, frames=121, per_latent=16)
    given = {"lanes": {0: LANES, 1: LANES}, "sides": {"high": (0, 0), "low": (0, 0)}}
    with open_single_model(path, compute_dtype=torch.bfloat16) as pair:
        shape = run_shape(pair, (1, 48, 31, 44, 80), GPU, **given)
        expert = shape.expert
        blocks = shape.blocks
        assert (expert.width, expert.ffn_width, expert.blocks) == (384, 640, 2)
        assert (expert.in_channels, expert.out_channels) == (48, 48)
        assert shape.tokens == video.tokens == 27_280
        assert dict(shape.lanes) == {"high": 2}
        assert blocks.computed_bytes == expert.streamed_bytes()
        planned = 2 * blocks.computed_bytes + blocks.outside_bytes
        assert planned == pair.device_bytes(LAYERWISE, device=GPU)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (RESIDENT, torch.float32),
        (OffloadPolicy.layerwise(2, source="pinned"), torch.float32),
        (PARTLY_IN_RAM, torch.bfloat16),
    ],
    ids=str,
)
def test_the_predicted_bytes_are_the_bytes_moved(policy, dtype, open_pair, make_request):
    """The second run starts with blocks in the buffers, and is predicted as well."""
    pair = open_pair(dtype=dtype)
    request = make_request()

    def figures(step):
        moved = step.transfers.read_bytes, step.transfers.copied_bytes, step.bytes_moved
        return step.index, step.expert, step.sigma, *moved

    for _ in range(2):
        predicted = predicted_timeline(pair, request, policy, **ON_CPU)
        measured = run(pair, request, policy).timeline
        assert [*map(figures, predicted.steps)] == [*map(figures, measured.steps)]
        phases = [[phase.name for phase in each.phases] for each in (predicted, measured)]
        assert phases[0] == phases[1]
        assert (predicted.kind, measured.kind) == ("simulated", "measured")
        assert predicted.switch_step == measured.switch_step == 2


def test_a_late_run_keeps_its_step_numbers_and_calls_start_at_0(pair, make_request):
    request = make_request(start_step=2)
    steps = predicted_timeline(pair, request, LAYERWISE, **ON_CPU).steps
    sigmas = request.step_plan.schedule.sigmas[2:5]
    assert [(step.index, step.expert) for step in steps] == [(2, "low"), (3, "low"), (4, "low")]
    assert tuple(step.sigma for step in steps) == sigmas
    shape = request_run_shape(pair, request, CPU)
    calls = predicted_calls(pair, shape, sigmas, LAYERWISE, **ON_CPU).steps
    assert [step.index for step in calls] == [0, 1, 2]
    assert [replace(step, index=step.index + 2) for step in calls] == [*steps]


def test_the_limit_of_a_step_is_that_of_its_lanes(open_pair, make_request):
    pair = open_pair(dtype=auto_dtype(CPU))
    request = make_request(guidance=(3.0, 1.0))
    rates = {"product_flops_per_s": {"": 1e9}, "attention_flops_per_s": 2e9}
    rated = CPU_MACHINE.with_figures(**rates)

    def limits(pair, machine=rated):
        timeline = predicted_timeline(pair, request, RESIDENT, machine=machine, device=CPU)
        return [step.limit_s for step in timeline.steps]

    shape = pair.high.config.shape
    tokens = request_run_shape(pair, request, CPU).lane_tokens("low")[0]
    block_s = shape.linear_flops(tokens) / 1e9 + shape.attention_flops(tokens) / 2e9
    assert limits(pair) == pytest.approx([lanes * 4 * block_s for lanes in (2, 2, 1, 1, 1)])
    assert limits(pair, CPU_MACHINE) == limits(open_pair(dtype=torch.float16)) == [None] * 5
    pair.kernels = Kernels(attention="sdpa")
    assert limits(pair) == [None] * 5


def test_a_prediction_makes_no_engine_and_changes_none(pair, make_request):
    request = make_request()
    predicted_timeline(pair, request, LAYERWISE, **ON_CPU)
    assert pair.loaded_bytes == 0
    run(pair, request)
    before = pair.current_engine(LAYERWISE, CPU), pair.loaded_bytes
    assert before[0] is not None
    cold = predicted_timeline(pair, request, RESIDENT, **ON_CPU)
    assert pair.current_engine(RESIDENT, CPU) is None
    assert (pair.current_engine(LAYERWISE, CPU), pair.loaded_bytes) == before
    assert cold.bytes_moved == 8 * pair.block_bytes.stored, "another policy starts from nothing"
