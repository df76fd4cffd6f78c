"""Expert pair: streamed forwards against `from_pretrained`, engine lifetime, changed files."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch

from wanstream.block_kernels import Kernels
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.opened_experts import (
    FIRST_TIME,
    LAYERWISE,
    PINNED,
    RESIDENT,
    STEPS,
    SWAP,
    plain_velocity,
    run_step,
    run_steps,
    streamed,
    whole_model,
)
from wanstream.wan.experts.open import open_experts

HIGH = {"seed": 1}
LOW = {"seed": 2}
FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16


class TestStreamed:
    @pytest.mark.parametrize(
        ("policy", "dtype"),
        [(RESIDENT, FP32), (PINNED, BF16), (SWAP, FP32)],
        ids=str,
    )
    def test_equals_from_pretrained(self, tiny_expert_folder, lane, dtype, policy):
        folders = {"high": tiny_expert_folder(**HIGH, shards=2), "low": tiny_expert_folder(**LOW)}
        models = {name: whole_model(folder, dtype) for name, folder in folders.items()}
        with open_experts(folders["high"], folders["low"], compute_dtype=dtype) as pair:
            pair.kernels = Kernels(math="exact")
            velocities = streamed(pair, policy, lane, steps=STEPS)
        for step, (expert, velocity) in enumerate(zip(STEPS, velocities, strict=True)):
            expected = plain_velocity(models[expert], lane, FIRST_TIME - step)
            assert torch.equal(velocity, expected)

    @pytest.mark.parametrize(
        ("stored", "compute"), [(FP32, BF16), (FP16, FP32), (BF16, FP16)], ids=str
    )
    def test_outer_parameters_equal_from_pretrained(
        self, tiny_expert_folder, tiny_expert_file, stored, compute, lane
    ):
        """Compare values and dtypes, also in parameters kept in fp32, and embedder rows."""
        model = whole_model(tiny_expert_folder(dtype=stored), compute)
        file = tiny_expert_file(dtype=stored)
        with open_experts(file, file, compute_dtype=compute) as pair:
            ours = pair.engine(LAYERWISE, "cpu").models["high"]
            parameters = ours.named_parameters()
            resident = {name: p for name, p in parameters if p.numel() and not p.is_meta}
            # Weight and bias of two time layers, two text layers and the projection.
            embedders = 2 * 5
            assert len(resident) == len(list(model.parameters())) - 4 * 10 - embedders
            for name, tensor in resident.items():
                expected = model.get_parameter(name)
                assert tensor.dtype == expected.dtype, name
                assert torch.equal(tensor, expected), name
            for name, buffer in model.named_buffers():
                assert ours.get_buffer(name).dtype == buffer.dtype
                assert torch.equal(ours.get_buffer(name), buffer)
            time = torch.tensor([875.25])
            [found] = ours.condition_embedder.rows(time, [lane.text])
            assert all(parameter.is_meta for parameter in ours.condition_embedder.parameters())
        expected = model.condition_embedder(time, lane.text.to(compute), None)
        assert [tensor.dtype for tensor in found] == [compute] * 3
        assert all(map(torch.equal, found, expected[:3]))

    def test_outer_fp8_weights_are_decoded(self, changed_expert, make_tiny_expert, lane):
        original = make_tiny_expert().condition_embedder.time_proj.weight
        name = "time_projection.1"
        codes = (original * 2).to(torch.float8_e4m3fn)
        change = {f"{name}.weight": codes, f"{name}.scale_weight": torch.tensor([0.5])}
        path = changed_expert(change, fp8="scaled_fp8")
        seen = []
        with open_experts(path, path) as pair:
            embedder = pair.engine(LAYERWISE, "cpu").models["high"].condition_embedder
            hook = lambda projection, *_: seen.append(projection.weight.clone())  # noqa: E731
            embedder.time_proj.register_forward_hook(hook)
            embedder.rows(torch.tensor([500.0]), [lane.text])
        assert len(seen) == 1
        assert torch.equal(seen[0], (codes.float() * 0.5).to(BF16))

    def test_pipeline_folder_stands_for_both(self, tiny_expert_folder, tmp_path, lane):
        shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "transformer")
        shutil.copytree(tiny_expert_folder(**LOW), tmp_path / "transformer_2")
        experts = tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)
        with open_experts(tmp_path) as pair, open_experts(*experts) as other:
            assert torch.equal(run_steps(pair, lane), run_steps(other, lane))


@pytest.fixture
def pair(tiny_expert_folder):
    with open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)) as pair:
        yield pair


class TestEngine:
    def test_takes_on_another_policy(self, pair, lane):
        engine = pair.engine(LAYERWISE, "cpu")
        expected = run_steps(pair, lane)
        assert pair.engine(LAYERWISE, torch.device("cpu")) is engine
        assert pair.engine(SWAP, "cpu") is engine
        assert torch.equal(run_steps(pair, lane, SWAP), expected)
        with pytest.raises(ValueError, match="blocks"):
            pair.engine(OffloadPolicy.block_swap(5, 1), "cpu")
        assert pair.engine(SWAP, "cpu") is engine

    def test_closed_engine_does_nothing_and_the_pair_opens_again(self, pair, lane):
        before = set(threading.enumerate())
        # Held, so closing has to end the threads, not the collector.
        engine = pair.engine(LAYERWISE, "cpu")
        first = run_steps(pair, lane)
        models = [weakref.ref(model) for model in engine.models.bare.values()]
        assert set(threading.enumerate()) > before
        visits = step_visits(["high"], engine.block_counts)
        gc.disable()
        try:
            pair.close()
            assert [model() for model in models] == [None] * len(models)
        finally:
            gc.enable()
        assert set(threading.enumerate()) == before
        starts = (
            lambda: engine.run(visits),
            lambda: engine.programs(visits),
            lambda: engine.set_policy(None),
        )
        for start in starts:
            with pytest.raises(RuntimeError, match="detached"):
                start()
        pair.close()
        assert pair.engine(LAYERWISE, "cpu") is not engine
        assert torch.equal(run_steps(pair, lane), first)

    def test_engine_made_in_inference_mode_serves_outside(self, pair):
        with torch.inference_mode():
            model = pair.engine(LAYERWISE, "cpu").models["high"]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert [name for name, tensor in tensors if tensor.is_inference()] == []

    def test_file_that_vanished_is_read_again_once_it_is_back(
        self, tiny_expert_folder, tmp_path, lane
    ):
        folder = tmp_path / "expert"
        away = tmp_path / "away"
        shutil.copytree(tiny_expert_folder(**HIGH), folder)
        with open_experts(folder, folder) as pair:
            folder.rename(away)
            engine = pair.engine(LAYERWISE, "cpu")
            for _ in range(2):
                with pytest.raises(OSError, match="expert"):
                    engine.models["high"]
            assert engine.models.non_block_bytes == 0
            away.rename(folder)
            run_steps(pair, lane)

    def test_running_engine_is_not_taken_away(self, pair, lane):
        engine = pair.engine(LAYERWISE, "cpu")
        visits = step_visits(["low"], engine.block_counts)
        with torch.inference_mode(), engine.run(visits) as engine_run:
            with pytest.raises(RuntimeError, match="running"):
                pair.engine(OffloadPolicy.layerwise(2), "cpu")
            assert pair.engine(LAYERWISE, "cpu") is engine
            run_step(engine, engine_run, 0, "low", lane)


def test_changed_file_never_runs_under_the_former_header(tiny_expert_file, tmp_path, lane):
    file = Path(shutil.copy(tiny_expert_file(**HIGH), tmp_path / "expert.safetensors"))
    pair = open_experts(file, file)
    assert pair.is_current()
    run_steps(pair, lane)
    pair.close()
    Path(shutil.copy(tiny_expert_file(**LOW), tmp_path / "other")).replace(file)
    assert not pair.is_current()
    with pytest.raises(OSError, match="was changed after it was opened"):
        run_steps(pair, lane)
    pair.close()
    file.unlink()
    assert not pair.is_current()
