"""Node schemas: what saved workflows refer to, limits, fingerprints, and figures in tooltips."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import wanstream.host
import wanstream.nodes
from wanstream.host import io
from wanstream.host.embedded.workflow.validate import converted, rules_of, sockets_of
from wanstream.host.folders import MODEL_KINDS
from wanstream.nodes import inputs
from wanstream.nodes.loaders import WanStreamLora
from wanstream.plan.machine import expected_machine
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.host.given_nodes import PACK as NODES

EACH_NODE = pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
CATEGORIES = {"loaders", "offload", "sampling", "video", "benchmark"}
MOST_STATEMENTS = 14
FILE, LATENT_FILE = "x.safetensors", "x.latent"

Node = type[io.ComfyNode]


@EACH_NODE
@pytest.mark.usefixtures("opened")
def test_unknown_choice_is_refused_before_the_run(node):
    """ComfyUI compares no choice taken by the node's own check."""
    rules = rules_of(node)
    choices = {name for name, each in rules.sockets.items() if each.io_type == "COMBO"}
    for name in choices & rules.own_checked - rules.listed:
        for value in ("no such choice", "", "../x"):
            with pytest.raises((ValueError, OSError)):
                rules.own_faults({name: value}, {}, set())


@EACH_NODE
def test_node_runs_again_after_a_file_was_replaced(node, opened):
    """Fingerprints contain no folder, because ComfyUI writes them into saved files."""
    for kind in (*MODEL_KINDS, "latents"):
        (opened / kind).mkdir()
        (opened / kind / (LATENT_FILE if kind == "latents" else FILE)).touch()
    listed = {f"latents/{LATENT_FILE}", FILE}
    for socket in node.define_schema().inputs:
        name = socket.id
        files = listed & set(getattr(socket, "options", None) or ())
        for file in files:
            before = repr(node.fingerprint_inputs(**{name: file}))
            assert not {"/", "\\"} & set(before.replace(file, "")), name
            assert before == repr(node.fingerprint_inputs(**{name: file}))
            for path in opened.glob(f"*/{Path(file).name}"):
                path.write_text(f"{name} was replaced")
            assert repr(node.fingerprint_inputs(**{name: file})) != before, name
            assert node.fingerprint_inputs(**{name: "gone.safetensors"}), name
            assert file != FILE or name in node.LISTED_INPUTS


def test_lora_runs_again_after_its_settings_changed(opened):
    (opened / "loras").mkdir()
    (opened / "loras" / FILE).touch()
    found = {WanStreamLora.fingerprint_inputs(high_noise=FILE)}
    for text in ("{}", '{"lora_alpha": 1}'):
        (opened / "loras" / "adapter_config.json").write_text(text)
        found.add(WanStreamLora.fingerprint_inputs(high_noise=FILE))
    assert len(found) == 3


# Saved workflows refer to ids, inputs and outputs: a change here breaks them.
SNAPSHOT = """\
Experts: high_noise low_noise compute_dtype storage attention compile arithmetic kernels ->
  WANSTREAM_EXPERTS
OneExpert: file compute_dtype storage attention compile arithmetic kernels -> WANSTREAM_EXPERTS
Lora: experts high_noise low_noise strength_high strength_low strength_steps -> WANSTREAM_EXPERTS
LoadDiffusionModel: unet_name weight_dtype policy share_visits -> MODEL
StreamModel: model policy share_visits -> MODEL
JoinExperts: high_noise low_noise boundary_ratio -> MODEL
SplitExperts: model -> MODEL MODEL
LoadCheckpoint: ckpt_name policy share_visits -> MODEL CLIP VAE
LoadCLIP: clip_name type device policy -> CLIP
DualCLIP: clip_name1 clip_name2 type device policy -> CLIP
TripleCLIP: clip_name1 clip_name2 clip_name3 policy -> CLIP
QuadrupleCLIP: clip_name1 clip_name2 clip_name3 clip_name4 policy -> CLIP
StreamCLIP: clip policy -> CLIP
ModelRun: model latent -> WANSTREAM_RUN
Layerwise: prefetch_blocks weights_source ram_blocks chunk_tokens -> WANSTREAM_POLICY
AutoOffload: vram_budget_gb ram_budget_gb -> WANSTREAM_POLICY
BlockSwap: blocks_to_swap prefetch_blocks weights_source ram_blocks chunk_tokens ->
  WANSTREAM_POLICY
Workers: count layout data stage cfg ring ulysses cluster weights threads max_restarts timeout_s
  -> WANSTREAM_WORKERS
Cache: kind preset threshold calibration max_consecutive_skips retention -> WANSTREAM_CACHE
CacheCalibration: run filename_prefix -> STRING
TextEncode: text_encoder positive negative -> CONDITIONING CONDITIONING
EmptyLatent: width height frames batch_size model -> LATENT
ImageToVideo: positive negative vae image width height frames batch_size end_image clip_vision
  clip_crop -> CONDITIONING CONDITIONING LATENT
FunControl: positive negative vae control_video width height frames batch_size start_image
  reference_image model clip_vision -> CONDITIONING CONDITIONING LATENT
Bernini: positive negative vae width height frames batch_size source_video reference_video
  reference_image reference_image_2 reference_image_3 reference_image_4 longest_side ->
  CONDITIONING CONDITIONING LATENT
ContinueVideo: positive negative frames overlap previous previous_file anchor -> CONDITIONING
  CONDITIONING LATENT
LoadLatent: file -> LATENT
SaveLatent: latent filename_prefix -> LATENT
JoinClips: clip_1 clip_2 overlap shared_frames clip_3 clip_4 clip_5 clip_6 clip_7 clip_8 -> IMAGE
Guidance: guidance_steps nag_scale nag_tau nag_alpha context_guidance -> WANSTREAM_GUIDANCE
ContextWindows: frames overlap stride blend repeat_image shift_windows -> WANSTREAM_WINDOWS
Preview: vae latent_scale frames every_s -> WANSTREAM_PREVIEW
Sampler: experts positive negative latent seed steps solver schedule flow_shift boundary_ratio
  switch_step guidance_high guidance_low start_step end_step add_noise leftover_noise policy
  sigmas workers cache guidance windows preview -> LATENT WANSTREAM_RUN
Lane: positive negative latent seed lanes -> WANSTREAM_LANES
LaneSampler: experts lanes steps solver schedule flow_shift boundary_ratio switch_step
  guidance_high guidance_low start_step end_step add_noise leftover_noise policy sigmas workers
  cache guidance windows preview -> WANSTREAM_LANE_LATENTS WANSTREAM_RUN
LaneLatent: latents index -> LATENT
Sigmas: schedule steps flow_shift denoise -> SIGMAS
Guider: experts positive negative boundary_ratio guidance_high guidance_low flow_shift policy
  cache guidance windows -> GUIDER
VAEDecode: vae latent tile_size workers memory_gb compute_dtype latent_scale -> IMAGE
SaveVideo: images fps filename_prefix crf latent format audio ->
DecodeVideo: vae latent fps filename_prefix crf tile_size memory_gb compute_dtype latent_scale
  format audio ->
Benchmark: run warmup repeats cooldown_s policies prefetch steps filename_prefix trace run_b run_c
  run_d -> IMAGE STRING
"""


def test_ids_inputs_and_outputs_are_those_of_saved_workflows():
    found = []
    for schema in (node.define_schema() for node in NODES):
        names = " ".join(socket.id for socket in schema.inputs)
        outputs = " ".join(socket.io_type for socket in schema.outputs)
        found.append(f"{schema.node_id.removeprefix('WanStream')}: {names} -> {outputs}".rstrip())
    assert sorted(found) == sorted(SNAPSHOT.replace("\n  ", " ").splitlines())


@EACH_NODE
def test_node_describes_itself_and_its_inputs(node):
    schema = node.define_schema()
    assert schema.node_id == node.__name__
    assert schema.category.removeprefix("WanStream/") in CATEGORIES
    assert schema.search_aliases
    assert schema.display_name
    assert schema.description.endswith(".")
    for socket in schema.inputs:
        assert (socket.tooltip or "").endswith("."), f"{socket.id} has no tooltip"
        options = socket.as_dict()
        if "min" in options:
            assert options["min"] <= options["default"] <= options["max"], socket.id
        if "options" in options and "default" in options:
            assert options["default"] in options["options"], socket.id
    for socket in sockets_of(node.INPUT_TYPES()).values():
        if socket.io_type == "FLOAT":
            for value in (float("nan"), float("inf"), "nan"):
                assert converted(socket, value)[1] is not None


def test_execute_stays_short():
    """A node translates: longer code belongs in another package."""
    for file in Path(wanstream.nodes.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(part, ast.FunctionDef) and part.name == "execute":
                count = sum(isinstance(each, ast.stmt) for each in ast.walk(part)) - 1
                assert count <= MOST_STATEMENTS, f"{file.name}:{part.lineno} has {count} statements"


@pytest.mark.parametrize("is_known", [False, True])
def test_later_schema_fields_are_given_only_where_they_are_known(is_known, monkeypatch):
    fields = {"node_id", "category", *["search_aliases"] * is_known}
    monkeypatch.setattr(wanstream.host, "_SCHEMA_FIELDS", fields)
    expected = {"search_aliases": ["block swap", "offload"]} if is_known else {}
    assert wanstream.host.search_aliases("block swap, offload") == expected
    monkeypatch.setattr(inputs, "_INPUT_ARGUMENTS", {"id", *["advanced"] * is_known})
    assert inputs.advanced() == ({"advanced": True} if is_known else {})


SHORT, LONG = 32_760, 75_600
"""Tokens at 832x480x81 and 1280x720x81."""


def _memory_gb(tokens: int, lanes: int = 2, chunk_tokens: int | None = None) -> float:
    return T2V_A14B.working_bytes([tokens] * lanes, chunk_tokens=chunk_tokens) / 1e9


def test_tooltips_have_the_figures_of_the_planner():
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
