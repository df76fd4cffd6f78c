from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import wanstream.host
import wanstream.nodes
from wanstream.host import io
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.workflow.validate import converted, rules_of, sockets_of
from wanstream.host.folders import MODEL_KINDS
from wanstream.nodes import WanStreamExtension, inputs
from wanstream.nodes.loaders import WanStreamLora
from wanstream.plan.machine import expected_machine
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.embedded import embedded_host

NODES = asyncio.run(WanStreamExtension().get_node_list())
EACH_NODE = pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)

MOST_STATEMENTS = 14

FILE, LATENT_FILE = "x.safetensors", "x.latent"


@EACH_NODE
def test_a_choice_that_does_not_exist_is_refused_before_the_run(
    node: type[io.ComfyNode], tmp_path: Path
) -> None:
    """ComfyUI compares no choice taken by the node's own check."""
    with embedded_host.opened(Folders(models=tmp_path, output=tmp_path, input=tmp_path)):
        rules = rules_of(node)
        choices = {name for name, each in rules.sockets.items() if each.io_type == "COMBO"}
        for name in choices & rules.own_checked - rules.listed:
            for value in ("no such choice", "", "../x"):
                with pytest.raises((ValueError, OSError)):
                    rules.own_faults({name: value}, {}, set())


@EACH_NODE
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan"])
def test_no_number_of_a_node_may_be_nan(node: type[io.ComfyNode], value: object) -> None:
    for socket in sockets_of(node.INPUT_TYPES()).values():
        if socket.io_type == "FLOAT":
            assert converted(socket, value)[1] is not None


@EACH_NODE
def test_a_node_runs_again_when_a_file_was_replaced_and_shows_no_folder(
    node: type[io.ComfyNode], tmp_path: Path
) -> None:
    """ComfyUI writes fingerprints into saved files."""
    for kind in (*MODEL_KINDS, "latents"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / (LATENT_FILE if kind == "latents" else FILE)).touch()
    listed = {f"latents/{LATENT_FILE}", FILE}
    with embedded_host.opened(Folders(models=tmp_path, output=tmp_path, input=tmp_path)):
        chosen = {
            each.id: listed & set(getattr(each, "options", None) or ())
            for each in node.define_schema().inputs
        }
        for name, (file,) in ((name, files) for name, files in chosen.items() if files):
            before = repr(node.fingerprint_inputs(**{name: file}))
            assert not {"/", "\\"} & set(before.replace(file, "")), name
            assert before == repr(node.fingerprint_inputs(**{name: file}))
            for path in tmp_path.glob(f"*/{Path(file).name}"):
                path.write_text(f"{name} was replaced")
            after = repr(node.fingerprint_inputs(**{name: file}))
            assert after != before, name
            assert node.fingerprint_inputs(**{name: "gone.safetensors"}), name
            assert file != FILE or name in node.LISTED_INPUTS


def test_a_lora_runs_again_when_the_settings_next_to_it_change(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / FILE).touch()
    with embedded_host.opened(Folders(models=tmp_path, output=tmp_path, input=tmp_path)):
        found = [WanStreamLora.fingerprint_inputs(high_noise=FILE)]
        for text in ("{}", '{"lora_alpha": 1}'):
            (tmp_path / "loras" / "adapter_config.json").write_text(text)
            found.append(WanStreamLora.fingerprint_inputs(high_noise=FILE))
    assert len(set(found)) == 3


# Saved workflows refer to ids, inputs and outputs: a change here breaks them.
SNAPSHOT = {
    "WanStreamExperts": (
        "high_noise low_noise compute_dtype storage attention compile arithmetic kernels",
        "WANSTREAM_EXPERTS",
    ),
    "WanStreamOneExpert": (
        "file compute_dtype storage attention compile arithmetic kernels",
        "WANSTREAM_EXPERTS",
    ),
    "WanStreamLora": (
        "experts high_noise low_noise strength_high strength_low strength_steps",
        "WANSTREAM_EXPERTS",
    ),
    "WanStreamLoadDiffusionModel": (
        "unet_name weight_dtype policy share_visits",
        "MODEL",
    ),
    "WanStreamStreamModel": ("model policy share_visits", "MODEL"),
    "WanStreamJoinExperts": ("high_noise low_noise boundary_ratio", "MODEL"),
    "WanStreamSplitExperts": ("model", "MODEL MODEL"),
    "WanStreamLoadCheckpoint": ("ckpt_name policy share_visits", "MODEL CLIP VAE"),
    "WanStreamLoadCLIP": ("clip_name type device policy", "CLIP"),
    "WanStreamDualCLIP": ("clip_name1 clip_name2 type device policy", "CLIP"),
    "WanStreamTripleCLIP": ("clip_name1 clip_name2 clip_name3 policy", "CLIP"),
    "WanStreamQuadrupleCLIP": ("clip_name1 clip_name2 clip_name3 clip_name4 policy", "CLIP"),
    "WanStreamStreamCLIP": ("clip policy", "CLIP"),
    "WanStreamModelRun": ("model latent", "WANSTREAM_RUN"),
    "WanStreamLayerwise": (
        "prefetch_blocks weights_source ram_blocks chunk_tokens",
        "WANSTREAM_POLICY",
    ),
    "WanStreamAutoOffload": ("vram_budget_gb ram_budget_gb", "WANSTREAM_POLICY"),
    "WanStreamBlockSwap": (
        "blocks_to_swap prefetch_blocks weights_source ram_blocks chunk_tokens",
        "WANSTREAM_POLICY",
    ),
    "WanStreamWorkers": (
        "count layout data stage cfg ring ulysses cluster weights threads max_restarts timeout_s",
        "WANSTREAM_WORKERS",
    ),
    "WanStreamCache": (
        "kind preset threshold calibration max_consecutive_skips retention",
        "WANSTREAM_CACHE",
    ),
    "WanStreamCacheCalibration": ("run filename_prefix", "STRING"),
    "WanStreamTextEncode": ("text_encoder positive negative", "CONDITIONING CONDITIONING"),
    "WanStreamEmptyLatent": ("width height frames batch_size model", "LATENT"),
    "WanStreamImageToVideo": (
        "positive negative vae image width height frames batch_size end_image clip_vision "
        "clip_crop",
        "CONDITIONING CONDITIONING LATENT",
    ),
    "WanStreamFunControl": (
        "positive negative vae control_video width height frames batch_size start_image "
        "reference_image model clip_vision",
        "CONDITIONING CONDITIONING LATENT",
    ),
    "WanStreamBernini": (
        "positive negative vae width height frames batch_size source_video reference_video "
        "reference_image reference_image_2 reference_image_3 reference_image_4 longest_side",
        "CONDITIONING CONDITIONING LATENT",
    ),
    "WanStreamContinueVideo": (
        "positive negative frames overlap previous previous_file anchor",
        "CONDITIONING CONDITIONING LATENT",
    ),
    "WanStreamLoadLatent": ("file", "LATENT"),
    "WanStreamSaveLatent": ("latent filename_prefix", "LATENT"),
    "WanStreamJoinClips": (
        "clip_1 clip_2 overlap shared_frames clip_3 clip_4 clip_5 clip_6 clip_7 clip_8",
        "IMAGE",
    ),
    "WanStreamGuidance": (
        "guidance_steps nag_scale nag_tau nag_alpha context_guidance",
        "WANSTREAM_GUIDANCE",
    ),
    "WanStreamContextWindows": (
        "frames overlap stride blend repeat_image shift_windows",
        "WANSTREAM_WINDOWS",
    ),
    "WanStreamPreview": ("vae latent_scale frames every_s", "WANSTREAM_PREVIEW"),
    "WanStreamSampler": (
        "experts positive negative latent seed steps solver schedule flow_shift boundary_ratio "
        "switch_step guidance_high guidance_low start_step end_step add_noise leftover_noise "
        "policy sigmas workers cache guidance windows preview",
        "LATENT WANSTREAM_RUN",
    ),
    "WanStreamLane": ("positive negative latent seed lanes", "WANSTREAM_LANES"),
    "WanStreamLaneSampler": (
        "experts lanes steps solver schedule flow_shift boundary_ratio switch_step guidance_high "
        "guidance_low start_step end_step add_noise leftover_noise policy sigmas workers cache "
        "guidance windows preview",
        "WANSTREAM_LANE_LATENTS WANSTREAM_RUN",
    ),
    "WanStreamLaneLatent": ("latents index", "LATENT"),
    "WanStreamSigmas": ("schedule steps flow_shift denoise", "SIGMAS"),
    "WanStreamGuider": (
        "experts positive negative boundary_ratio guidance_high guidance_low flow_shift policy "
        "cache guidance windows",
        "GUIDER",
    ),
    "WanStreamVAEDecode": (
        "vae latent tile_size workers memory_gb compute_dtype latent_scale",
        "IMAGE",
    ),
    "WanStreamSaveVideo": ("images fps filename_prefix crf latent format audio", ""),
    "WanStreamDecodeVideo": (
        "vae latent fps filename_prefix crf tile_size memory_gb compute_dtype latent_scale "
        "format audio",
        "",
    ),
    "WanStreamBenchmark": (
        "run warmup repeats cooldown_s policies prefetch steps filename_prefix trace run_b run_c "
        "run_d",
        "IMAGE STRING",
    ),
}


def test_ids_inputs_and_outputs_are_those_of_saved_workflows() -> None:
    found = {}
    for node in NODES:
        schema = node.define_schema()
        inputs = " ".join(socket.id for socket in schema.inputs)
        found[schema.node_id] = (inputs, " ".join(socket.io_type for socket in schema.outputs))
    assert found == SNAPSHOT


@EACH_NODE
def test_a_node_says_what_it_is_and_what_its_settings_cost(node: type[io.ComfyNode]) -> None:
    schema = node.define_schema()
    assert schema.node_id == node.__name__
    assert schema.category.removeprefix("WanStream/") in {
        "loaders",
        "offload",
        "sampling",
        "video",
        "benchmark",
    }
    assert schema.search_aliases
    assert schema.display_name
    assert schema.description.endswith(".")
    for socket in schema.inputs:
        assert (socket.tooltip or "").endswith("."), f"{socket.id} has no tooltip"


@EACH_NODE
def test_defaults_pass_their_own_limits(node: type[io.ComfyNode]) -> None:
    for socket in node.define_schema().inputs:
        options = socket.as_dict()
        if "min" in options:
            assert options["min"] <= options["default"] <= options["max"], socket.id
        if "options" in options and "default" in options:
            assert options["default"] in options["options"], socket.id


def test_execute_stays_short() -> None:
    """A node translates: longer code belongs in another package."""
    for file in Path(wanstream.nodes.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(part, ast.FunctionDef) and part.name == "execute":
                count = sum(isinstance(each, ast.stmt) for each in ast.walk(part)) - 1
                assert count <= MOST_STATEMENTS, f"{file.name}:{part.lineno} has {count} statements"


@pytest.mark.parametrize(
    "fields", [{"node_id", "category"}, {"node_id", "category", "search_aliases"}]
)
def test_words_of_the_search_are_given_only_to_a_comfyui_that_knows_them(
    fields: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanstream.host, "_SCHEMA_FIELDS", fields)
    found = wanstream.host.search_aliases("block swap, offload")
    assert found == (
        {"search_aliases": ["block swap", "offload"]} if "search_aliases" in fields else {}
    )


@pytest.mark.parametrize("arguments", [{"id"}, {"id", "advanced"}])
def test_inputs_are_advanced_only_in_a_comfyui_that_can_hide_them(
    arguments: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_INPUT_ARGUMENTS", arguments)
    assert inputs.advanced() == ({"advanced": True} if "advanced" in arguments else {})


SHORT, LONG = 32_760, 75_600
"""Tokens at 832x480x81 and 1280x720x81."""


def _memory_gb(tokens: int, lanes: int = 2, chunk_tokens: int | None = None) -> float:
    return T2V_A14B.working_bytes([tokens] * lanes, chunk_tokens=chunk_tokens) / 1e9


def test_tooltips_have_the_figures_of_the_planner() -> None:
    tooltips = {
        f"{schema.node_id}.{each.id}": each.tooltip or ""
        for schema in (node.define_schema() for node in NODES)
        for each in schema.inputs
    }
    saved = _memory_gb(LONG) - _memory_gb(LONG, chunk_tokens=8192)
    assert f"8192 saves {saved:.1f} GB" in tooltips["WanStreamLayerwise.chunk_tokens"]
    more = [_memory_gb(tokens, lanes=4) - _memory_gb(tokens) for tokens in (SHORT, LONG)]
    words = "{:.1f} GB of device memory at 832x480x81, {:.1f} GB at 1280x720x81".format(*more)
    assert words in tooltips["WanStreamLane.latent"]
    card = expected_machine("RTX 4090", ram_bytes=2**35, disk_bytes_per_s=1e9)
    rate = T2V_A14B.streamed_bytes() * card.flops_per_s / T2V_A14B.block_flops(SHORT) / 1e9
    assert f"({rate:.1f} GB/s at 832x480x81" in tooltips["WanStreamLayerwise.weights_source"]
    page = Path(wanstream.nodes.__file__).parents[1] / "docs" / "native-families.md"
    inside = re.findall(r" GB \| ([\d.]+) % \|", page.read_text(encoding="utf-8"))
    outside = sorted(100 - float(share) for share in inside)
    words = f"outside the blocks, {outside[0]:.1f} to {outside[-1]:.1f} % of the file"
    assert words in tooltips["WanStreamLoadDiffusionModel.unet_name"]
