"""All nodes: what saved workflows refer to, limits, fingerprints, help pages, and a cancel."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as wan_vae
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.umt5.modeling_umt5 import UMT5Block

import wanstream.host
import wanstream.nodes
from wanstream.host import io
from wanstream.host.embedded.workflow.validate import converted, rules_of, sockets_of
from wanstream.host.folders import MODEL_KINDS
from wanstream.nodes import inputs
from wanstream.nodes.loaders import WanStreamLora
from wanstream.nodes.runs import video_file
from wanstream.plan.machine import expected_machine
from wanstream.schema import Cancelled
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.host import given_nodes as given
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tools.locales import input_lines as input_lines_in_chinese
from wanstream.tools.locales import page_file, section, translated_by_hand

NODES = given.PACK
EACH_NODE = pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
CATEGORIES = {"loaders", "offload", "sampling", "video", "benchmark"}
MOST_STATEMENTS = 14
FILE = "x.safetensors"
LATENT_FILE = "x.latent"

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


# --- schemas --------------------------------------------------------------------------------------


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
    schemas = [node.define_schema() for node in NODES]
    sockets = [(schema.node_id, each) for schema in schemas for each in schema.inputs]
    tooltips = {f"{node_id}.{each.id}": each.tooltip or "" for node_id, each in sockets}
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


# --- help pages -----------------------------------------------------------------------------------


WEB = Path(wanstream.nodes.__file__).parents[1] / "web"
DOCS = WEB / "docs"

LOCALE = WEB.parent / "locales" / "zh" / "nodeDefs.json"
CHINESE = json.loads(LOCALE.read_text(encoding="utf-8"))
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
CODE = re.compile(r"`[^`\n]+`")
RUN = "run scripts/locales"
BOLD = r"\*\*(.+?)\*\*"
WIDGETS = {"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"}


def page_of(node, language="en"):
    return page_file(DOCS, node.__name__, language).read_text(encoding="utf-8")


def fixed_options(options):
    """Return the choices shipped with the node, [] if they depend on installed models."""
    return list(options.get("options", ())) if "default" in options else []


def test_every_node_has_its_pages():
    """The English page serves all languages without a page."""
    expected = {f"{node.__name__}{page}.md" for node in NODES for page in ("", "/zh")}
    assert {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")} == expected


def test_only_script_in_web_names_every_module():
    """ComfyUI imports every .js below the folder into the page.

    Browsers may cache old .mjs files.
    """
    (script,) = WEB.rglob("*.js")
    assert script == WEB / "wanstream.js"
    modules = sorted(file.relative_to(WEB / "overlay").as_posix() for file in WEB.rglob("*.mjs"))
    named = re.findall(r'^  "(.+\.mjs)"', script.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == modules


def test_no_script_in_web_makes_elements_from_text():
    """Texts come from prompts by anyone, and `dom.mjs` keeps them texts."""
    markup = re.compile(r"\w+HTML|DOMParser|\.write\(|createContextual|srcdoc")
    for file in WEB.rglob("*.*js"):
        assert not markup.findall(file.read_text(encoding="utf-8")), file.name


@EACH_NODE
def test_page_has_its_parts(node):
    page = page_of(node)
    schema = node.define_schema()
    assert page.isascii()
    assert page.splitlines()[0] == f"# {schema.display_name}"
    for title in ("Inputs", "Outputs", "Recommendations", "Example", "Errors"):
        assert section(page, title).strip(), title
    assert len(page.splitlines()) <= 72
    for output in schema.outputs:
        assert f"`{output.display_name}`" in section(page, "Outputs")
    # The side panel is about 300 pixels wide: three or more columns do not fit.
    for line in [*page.splitlines(), *page_of(node, "zh").splitlines()]:
        assert line.count("|") <= 3 or not line.startswith("|"), line


@EACH_NODE
def test_inputs_have_the_defaults_and_limits_of_the_schema(node):
    """The lines of the Chinese page are made from the schema."""
    schema = node.define_schema()
    lines = [line for line in section(page_of(node), "Inputs").splitlines() if line[:2] == "- "]
    made = input_lines_in_chinese(schema, CHINESE[schema.node_id])
    for socket, line, chinese in zip(schema.inputs, lines, made, strict=True):
        found = re.fullmatch(r"- `(\w+)` \((.+?)\): .+\.", line)
        assert found, line
        name, words = found.groups()
        values = CODE.findall(re.findall("（(.*?)）：", chinese)[0])
        assert (name, CODE.findall(words)[: len(values)]) == (socket.id, values)
        for option in fixed_options(socket.as_dict()):
            assert f"`{option}`" in words, (socket.id, option)
            assert f"`{option}`" in chinese, (socket.id, option)
        has_default = "default" in socket.as_dict()
        assert words.startswith("default `") == has_default, socket.id
        assert has_default or words.startswith("optional") == bool(socket.optional), socket.id


@EACH_NODE
def test_example_sets_every_widget_to_a_valid_value(node):
    found = re.search(r"```json\n(.*?)```", section(page_of(node), "Example"), re.DOTALL)
    assert found
    values = json.loads(found[1])
    sockets = node.define_schema().inputs
    widgets = {each.id: each.as_dict() for each in sockets if each.io_type in WIDGETS}
    assert values.keys() == widgets.keys()
    for name, options in widgets.items():
        if "min" in options:
            assert options["min"] <= values[name] <= options["max"], name
        elif fixed := fixed_options(options):
            assert values[name] in fixed or values[name].endswith(".safetensors"), name


@EACH_NODE
def test_page_names_only_nodes_links_and_settings_that_exist(node):
    """The help panel resolves links against the canvas, so pages name nodes in bold, not files.

    A word in code that looks like a setting is a node's input, output or option.
    """
    page = page_of(node)
    schemas = [other.define_schema() for other in NODES]
    assert set(re.findall(BOLD, page)) <= {schema.display_name for schema in schemas}
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        assert target.startswith("https://") or (DOCS / target).is_file(), target
    known = {"text_encoder", "diffusion_models", "wanstream_timeline", "fp8_scaled"}
    for socket in (socket for schema in schemas for socket in schema.inputs):
        known |= {socket.id, *fixed_options(socket.as_dict())}
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", prose)) <= known


def messages_in(page: str, title: str) -> list[list[str]]:
    rows = [line for line in section(page, title).splitlines() if line.startswith("| ")]
    return [CODE.findall(row.split("|")[1]) for row in rows[1:]]


@EACH_NODE
def test_chinese_page_agrees_with_the_english_one(node):
    schema = node.define_schema()
    english = page_of(node)
    chinese = page_of(node, "zh")
    said = CHINESE[schema.node_id]
    assert chinese.splitlines()[0] == f"# {said['display_name']}"
    lines = section(chinese, "输入").split("\n")[1:-2]
    assert lines == input_lines_in_chinese(schema, said), RUN
    assert section(chinese, "示例").strip() == section(english, "Example").strip(), RUN
    assert messages_in(english, "Errors") == messages_in(chinese, "错误") != []
    assert chinese.count("\n## ") == english.count("\n## ")


@EACH_NODE
def test_chinese_page_has_the_same_figures_and_nodes(node):
    schemas = [other.define_schema() for other in NODES]
    names = {each.display_name: CHINESE[each.node_id]["display_name"] for each in schemas}
    english, chinese = (translated_by_hand(DOCS, node.__name__, lang) for lang in ("en", "zh"))
    assert Counter(NUMBER.findall(chinese)) == Counter(NUMBER.findall(english))
    assert set(re.findall(BOLD, chinese)) == {names[name] for name in re.findall(BOLD, english)}
    # Emphasis closed right after a bracket does not end before an ideograph.
    assert not re.search(r"）\*\*[\u4e00-\u9fff]", chinese)
    assert {*CODE.findall(english)} == {*CODE.findall(chinese)}


# --- a cancel around sampling ---------------------------------------------------------------------


SIZE = {"width": 32, "height": 32, "frames": 17, "batch_size": 1}
ENCODED = {"vae": given.VAE, **given.PROMPTS, **SIZE}
CONTROL = {**ENCODED, "control_video": given.VIDEO}
SEEN = {"model": "Wan2.1 Fun Control", "clip_vision": given.CLIP, "start_image": given.VIDEO}
TEXT = {"text_encoder": given.UMT5, "positive": "a", "negative": "b"}
DECODED = {"vae": given.VAE, "latent": given.LATENT}
SAVED = {"images": given.VIDEO, "fps": 16.0, "filename_prefix": "x", "crf": 40}
PHASES = {
    "control video": ("FunControl", CONTROL, wan_vae.WanEncoder3d),
    "start image": ("ImageToVideo", {**ENCODED, "image": given.VIDEO}, wan_vae.WanResidualBlock),
    "source video": ("Bernini", {**ENCODED, "source_video": given.VIDEO}, wan_vae.WanEncoder3d),
    "seen image": ("FunControl", {**CONTROL, **SEEN}, CLIPEncoderLayer),
    "text": ("TextEncode", TEXT, UMT5Block),
    "decode": ("VAEDecode", DECODED, wan_vae.WanDecoder3d),
    "decode in tiles": ("VAEDecode", {**DECODED, "tile_size": 64}, wan_vae.WanDecoder3d),
    "save": ("SaveVideo", SAVED, video_file),
}
"""Node, inputs, and the owner of the function for one chunk, layer, block or frame."""


@pytest.mark.parametrize(
    ("phase", "calls"), [(phase, 1 + at % 2) for at, phase in enumerate(PHASES)]
)
def test_cancel_ends_every_phase_with_the_work_in_hand(phase, calls, run, output, monkeypatch):
    class_type, inputs, owner = PHASES[phase]
    name = "_picture" if owner is video_file else "forward"
    compute = getattr(owner, name)
    done = 0

    def counted(*args, **kwargs):
        nonlocal done
        # The memory is counted on meta.
        if not any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            done += 1
            if done == calls:
                embedded_host.stop()
        return compute(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    with pytest.raises(Cancelled):
        run(given.graph_around(f"WanStream{class_type}", inputs, frames=17))
    # The text encoder computes each block once per prompt, twice in all.
    assert done <= calls + (phase == "text")
    assert not [*output.rglob("*.mp4*")]
