"""Expert pair: streamed forwards against `from_pretrained`, engine lifetime, refusals."""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
import threading
import weakref
from itertools import cycle
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.block_kernels import Kernels
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.wan import forward_lanes
from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.meta_model import parameter_shapes
from wanstream.wan.experts.open import open_experts

HIGH, LOW = {"seed": 1}, {"seed": 2}
BF16 = {"compute_dtype": torch.bfloat16}
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
}
STEPS = ["high", "high", "low"]


def bytes_read():
    """Return all bytes read by this process."""
    with open("/proc/self/io", encoding="ascii") as counters:
        return int(counters.readline().removeprefix("rchar: "))


@pytest.fixture
def reference(tiny_expert_folder):
    """`reference(folder, dtype)`: the model loaded by from_pretrained, copied to torch memory.

    from_pretrained maps the file's pages. Another alignment alone changes last bits.
    """

    def load(folder, dtype):
        model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model.eval().requires_grad_(False)

    return load


def reference_forward(model, lane, timestep):
    dtype = model.patch_embedding.weight.dtype
    return model(lane.latents.to(dtype), timestep, lane.text.to(dtype), return_dict=False)[0]


def streamed(pair, policy, lane, steps=STEPS):
    """Return velocities for one run with single steps."""
    engine = pair.engine(policy, "cpu")
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as run:
        for step, expert in enumerate(steps):
            timestep = torch.tensor([990.0 - step])
            visit = lambda block, at=(step, expert): run.visit(*at, block)  # noqa: E731
            velocities += forward_lanes(engine.models[expert], [lane], timestep, visit)
    return velocities


class TestStreamed:
    @pytest.mark.parametrize(
        ("policy", "dtype"),
        [*zip(POLICIES.values(), cycle((torch.float32, torch.bfloat16)), strict=False)],
        ids=str,
    )
    def test_equals_from_pretrained(self, tiny_expert_folder, reference, lane, dtype, policy):
        folders = {"high": tiny_expert_folder(**HIGH, shards=2), "low": tiny_expert_folder(**LOW)}
        models = {name: reference(folder, dtype) for name, folder in folders.items()}
        with open_experts(folders["high"], folders["low"], compute_dtype=dtype) as pair:
            pair.kernels = Kernels(math="exact")
            velocities = streamed(pair, policy, lane)
        for step, (expert, velocity) in enumerate(zip(STEPS, velocities, strict=True)):
            assert torch.equal(
                velocity, reference_forward(models[expert], lane, torch.tensor([990.0 - step]))
            )

    def test_fp8_equals_the_dequantised_model(
        self, tiny_expert_file, make_tiny_expert, lane, fp8_layout
    ):
        path = tiny_expert_file(fp8=fp8_layout, dtype=torch.float16, **HIGH)
        with open_experts(path, path, compute_dtype=torch.float32) as pair:
            pair.kernels = Kernels(math="exact")
            [velocity] = streamed(pair, OffloadPolicy.layerwise(), lane, ["low"])
        model = make_tiny_expert(dequantised_from=torch.float16, **HIGH)
        assert torch.equal(velocity, reference_forward(model, lane, torch.tensor([990.0])))

    @pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("compute", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_outer_parameters_are_those_of_from_pretrained(
        self, tiny_expert_folder, tiny_expert_file, reference, stored, compute
    ):
        """Compare values and dtypes, also in parameters kept in fp32, for every file dtype."""
        model = reference(tiny_expert_folder(dtype=stored), compute)
        file = tiny_expert_file(dtype=stored)
        with open_experts(file, file, compute_dtype=compute) as pair:
            ours = pair.engine(OffloadPolicy.layerwise(), "cpu").models["high"]
            resident = {
                name: tensor
                for name, tensor in ours.named_parameters()
                if tensor.numel() and not tensor.is_meta
            }
            embedders = (
                2 * 5
            )  # weight and bias: two time layers, two text layers and the projection
            assert len(resident) == len(list(model.parameters())) - 4 * 10 - embedders
            for name, tensor in resident.items():
                expected = model.get_parameter(name)
                assert tensor.dtype == expected.dtype, name
                assert torch.equal(tensor, expected), name
            for name, buffer in model.named_buffers():
                assert torch.equal(ours.get_buffer(name), buffer)
                assert ours.get_buffer(name).dtype == buffer.dtype

    @pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("compute", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_embedder_rows_are_those_of_from_pretrained(
        self, tiny_expert_folder, tiny_expert_file, reference, stored, compute, lane
    ):
        model, time = reference(tiny_expert_folder(dtype=stored), compute), torch.tensor([875.25])
        file = tiny_expert_file(dtype=stored)
        with open_experts(file, file, compute_dtype=compute) as pair:
            embedder = (
                pair.engine(OffloadPolicy.layerwise(), "cpu").models["high"].condition_embedder
            )
            [found] = embedder.rows(time, [lane.text])
            assert all(parameter.is_meta for parameter in embedder.parameters())
        expected = model.condition_embedder(time, lane.text.to(compute), None)
        assert [tensor.dtype for tensor in found] == [compute] * 3
        assert all(map(torch.equal, found, expected[:3]))

    def test_outer_fp8_weights_are_decoded(
        self, tiny_expert_file, tmp_path, make_tiny_expert, lane
    ):
        from safetensors.torch import load_file, save_file

        tensors = load_file(tiny_expert_file(fp8="scaled_fp8"))
        tensors["time_projection.1.weight"] = (tensors["time_projection.1.weight"] * 2).to(
            torch.float8_e4m3fn
        )
        tensors["time_projection.1.scale_weight"] = torch.tensor([0.5])
        save_file(tensors, tmp_path / "expert.safetensors")
        with open_experts(tmp_path / "expert.safetensors", tmp_path / "expert.safetensors") as pair:
            model, seen = pair.engine(OffloadPolicy.layerwise(), "cpu").models["high"], []
            model.condition_embedder.time_proj.register_forward_hook(
                lambda proj, *_: seen.append(proj.weight.clone())
            )
            model.condition_embedder.rows(torch.tensor([500.0]), [lane.text])
        original = make_tiny_expert().condition_embedder.time_proj.weight
        expected = ((original * 2).to(torch.float8_e4m3fn).float() * 0.5).to(torch.bfloat16)
        assert len(seen) == 1
        assert torch.equal(seen[0], expected)


class TestEngine:
    @pytest.fixture
    def pair(self, tiny_expert_folder):
        with open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)) as pair:
            yield pair

    def test_is_kept_for_the_same_policy_and_device(self, pair):
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        assert pair.engine(OffloadPolicy.layerwise(1), torch.device("cpu")) is engine

    def test_takes_on_another_policy(self, pair, lane):
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        expected = streamed(pair, OffloadPolicy.layerwise(1), lane)
        assert pair.engine(OffloadPolicy.block_swap(2, 1), "cpu") is engine
        again = streamed(pair, OffloadPolicy.block_swap(2, 1), lane)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
        with pytest.raises(ValueError, match="blocks"):
            pair.engine(OffloadPolicy.block_swap(5, 1), "cpu")
        assert pair.engine(OffloadPolicy.block_swap(2, 1), "cpu") is engine

    def test_closed_it_runs_and_takes_on_nothing(self, pair):
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        pair.close()
        visits = step_visits(["high"], engine.block_counts)
        for start in (
            lambda: engine.run(visits),
            lambda: engine.programs(visits),
            lambda: engine.set_policy(None),
        ):
            with pytest.raises(RuntimeError, match="detached"):
                start()

    def test_a_policy_that_does_not_fit_is_refused_and_leaves_the_pair_usable(self, pair):
        with pytest.raises(ValueError, match="blocks"):
            pair.engine(OffloadPolicy.block_swap(5, 1), "cpu")
        assert pair.engine(OffloadPolicy.block_swap(4, 1), "cpu").block_counts == {
            "high": 4,
            "low": 4,
        }

    def test_a_closed_pair_opens_again(self, pair, lane):
        first = streamed(pair, OffloadPolicy.layerwise(), lane)
        pair.close()
        pair.close()
        second = streamed(pair, OffloadPolicy.layerwise(), lane)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_closing_ends_every_thread(self, pair, lane):
        before = set(threading.enumerate())
        engine = pair.engine(
            OffloadPolicy.layerwise(), "cpu"
        )  # held, so closing has to do it, not the collector
        streamed(pair, OffloadPolicy.layerwise(), lane)
        assert set(threading.enumerate()) > before
        pair.close()
        assert set(threading.enumerate()) == before
        assert engine is not pair.engine(OffloadPolicy.layerwise(), "cpu")

    def test_closing_frees_the_models_without_the_collector(self, pair, lane):
        streamed(pair, OffloadPolicy.layerwise(), lane)
        models = [
            weakref.ref(model)
            for model in pair.engine(OffloadPolicy.layerwise(), "cpu").models.bare.values()
        ]
        gc.disable()
        try:
            pair.close()
            assert [model() for model in models] == [None] * len(models)
        finally:
            gc.enable()

    def test_an_engine_made_in_inference_mode_serves_outside_of_it(self, pair):
        with torch.inference_mode():
            model = pair.engine(OffloadPolicy.layerwise(), "cpu").models["high"]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert [name for name, tensor in tensors if tensor.is_inference()] == []

    def test_outer_bytes_are_those_of_the_models_looked_up(self, pair, lane):
        engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
        weights = pair.high.weights
        embedders = sum(
            tensor.nbytes
            for name, tensor in weights.items()
            if name.startswith("condition_embedder")
        )
        total = sum(tensor.nbytes for tensor in weights.values())
        resident = total - embedders - 4 * (8 * 256 * 256 + 2 * 256 * 512) * 4
        assert engine.models.non_block_bytes == 0
        engine.models["high"]
        assert engine.models.non_block_bytes == resident
        engine.models["high"]
        engine.models["low"]
        assert engine.models.non_block_bytes == 2 * resident
        engine.models["low"].condition_embedder.rows(torch.tensor([500.0]), [lane.text])
        assert engine.models.non_block_bytes == 2 * resident + embedders

    def test_a_file_that_vanished_is_an_error_of_the_look_up(self, tiny_expert_folder, tmp_path):
        folder = shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "expert")
        with open_experts(folder, folder) as pair:
            shutil.rmtree(folder)
            engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
            for _ in range(2):
                with pytest.raises(OSError, match="expert"):
                    engine.models["high"]
            assert engine.models.non_block_bytes == 0

    def test_a_file_that_came_back_is_read_again(self, tiny_expert_folder, tmp_path, lane):
        folder = shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "expert")
        with open_experts(folder, folder) as pair:
            folder.rename(tmp_path / "away")
            engine = pair.engine(OffloadPolicy.layerwise(), "cpu")
            with pytest.raises(OSError, match="expert"):
                engine.models["high"]
            (tmp_path / "away").rename(folder)
            streamed(pair, OffloadPolicy.layerwise(), lane, ["high", "high"])

    def test_an_engine_that_runs_is_not_taken_away(self, pair, lane):
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        with torch.inference_mode(), engine.run(step_visits(["low"], engine.block_counts)) as run:
            with pytest.raises(RuntimeError, match="running"):
                pair.engine(OffloadPolicy.layerwise(2), "cpu")
            assert pair.engine(OffloadPolicy.layerwise(1), "cpu") is engine
            visit = lambda block: run.visit(0, "low", block)  # noqa: E731
            forward_lanes(engine.models["low"], [lane], torch.tensor([990.0]), visit)


class TestChangedFile:
    def test_never_runs_under_the_header_of_the_former_one(self, tiny_expert_file, tmp_path, lane):
        file = Path(shutil.copy(tiny_expert_file(**HIGH), tmp_path / "expert.safetensors"))
        pair = open_experts(file, file)
        assert pair.is_current()
        streamed(pair, OffloadPolicy.layerwise(), lane)
        pair.close()
        Path(shutil.copy(tiny_expert_file(**LOW), tmp_path / "other")).replace(file)
        assert not pair.is_current()
        with pytest.raises(OSError, match="was changed after it was opened"):
            streamed(pair, OffloadPolicy.layerwise(), lane)
        pair.close()
        file.unlink()
        assert not pair.is_current()


class TestPair:
    def test_pipeline_folder_stands_for_both(self, tiny_expert_folder, tmp_path, lane):
        shutil.copytree(tiny_expert_folder(**HIGH), tmp_path / "transformer")
        shutil.copytree(tiny_expert_folder(**LOW), tmp_path / "transformer_2")
        with (
            open_experts(tmp_path) as pair,
            open_experts(tiny_expert_folder(**HIGH), tiny_expert_folder(**LOW)) as other,
        ):
            ours, theirs = (
                streamed(each, OffloadPolicy.layerwise(), lane) for each in (pair, other)
            )
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @pytest.mark.parametrize("in_channels", [16, 36])
    def test_in_channels(self, tiny_expert_file, in_channels):
        file = tiny_expert_file(in_channels=in_channels)
        assert open_experts(file, file).high.config.in_channels == in_channels

    @pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc")
    def test_only_headers_and_markers_are_read(self, tiny_expert_file, fp8_layout):
        file = tiny_expert_file(fp8=fp8_layout)
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        before = bytes_read()
        open_experts(file, file)
        # Python's buffered reader reads more than was requested.
        assert bytes_read() - before < 2 * header_bytes + 200_000
        assert file.stat().st_size > 20 * header_bytes + 200_000


OPEN_AND_MEASURE = """
import sys
from pathlib import Path
import diffusers.loaders.single_file_utils
from diffusers import WanTransformer3DModel
from wanstream.wan import open_experts

def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
before = peak_kib()
pair = open_experts(*sys.argv[1:])
print(peak_kib() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures the peak in /proc")
def test_opening_two_experts_of_1_gb_takes_less_than_64_mb(tmp_path):
    config = WanConfig(
        num_attention_heads=8,
        num_layers=30,
        ffn_dim=4096,
        in_channels=16,
        out_channels=16,
        text_dim=4096,
        freq_dim=256,
        patch_size=(1, 2, 2),
    )
    files = [tmp_path / f"{name}.safetensors" for name in ("high", "low")]
    for file in files:
        write_hollow_file(file, parameter_shapes(config))
        assert file.stat().st_size > 1e9
    command = [sys.executable, "-c", OPEN_AND_MEASURE, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_bytes = int(done.stdout) * 1024
    assert 0 < peak_bytes < 64e6


def write_hollow_file(path, shapes):
    """Write a full-size bf16 safetensors file, with a hole as data to save disk space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


class TestRefused:
    def test_low_noise_missing(self, tiny_expert_file, tiny_expert_folder):
        for high in (tiny_expert_file(), tiny_expert_folder()):
            with pytest.raises(
                CheckpointError, match="is one expert: give the low-noise expert too"
            ):
                open_experts(high)

    def test_nothing_there(self, tmp_path):
        with pytest.raises((OSError, ValueError), match=r"absent.*does not exist"):
            open_experts(tmp_path / "absent")

    def test_pipeline_of_one_transformer(self, tmp_path):
        (tmp_path / "transformer").mkdir()
        with pytest.raises(CheckpointError, match="has no transformer_2"):
            open_experts(tmp_path)

    def test_families_differ(self, tiny_expert_file):
        with pytest.raises(CheckpointError, match=r"is I2V, but the high-noise expert .* is T2V"):
            open_experts(tiny_expert_file(), tiny_expert_file(in_channels=36))

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ({"layers": 3}, "num_layers is 3 .* 4"),
            ({"heads": 1}, "heads is 1 .* 2"),
            ({"ffn_dim": 256}, "ffn_dim is 256"),
        ],
    )
    def test_sizes_differ(self, tiny_expert_file, shape, message):
        with pytest.raises(CheckpointError, match=message):
            open_experts(tiny_expert_file(), tiny_expert_file(**shape))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
    def test_compute_dtype(self, tiny_expert_file, dtype):
        with pytest.raises(ValueError, match="compute_dtype"):
            open_experts(tiny_expert_file(), tiny_expert_file(), compute_dtype=dtype)
