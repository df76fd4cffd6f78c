"""Shipped workflows without a ComfyUI.

Canvas file, API twin and thumbnail agree, and the nodes accept every input.

`tests/integration/browser` checks them in the frontend, and `tests/integration/comfy` in a server.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from PIL import Image, ImageChops, ImageStat

from wanstream.nodes.runs import write_video
from wanstream.shapes.expert import T2V_A14B, TI2V_5B, ExpertShape
from wanstream.tests.support.host.embedded import embedded_host, run_workflow
from wanstream.tests.support.host.given_nodes import PACK
from wanstream.tools.arrange import MODEL_FILES, NOTE_TYPE, models_of
from wanstream.tools.graphs import by_name, names_of
from wanstream.tools.templates import TITLES, WORKFLOWS, template, template_path
from wanstream.tools.thumbnails import FOOTPRINTS, thumbnail

NAMES = sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))
SCHEMAS = {node.__name__: node.define_schema() for node in PACK}
EXPERTS = ("WanStreamExperts", "WanStreamOneExpert")
MODELS = ("WanStreamLoadDiffusionModel", "WanStreamStreamModel")
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced")
WIDGETS = {"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"}


EMBEDDED = {"LoadImage", "LoadVideo", "GetVideoComponents"}
"""ComfyUI nodes in the embedded host."""

VARIANTS = {"fun_control", "fun_inp", "bernini"}
VARIANTS |= {f"{name}_workers" for name in VARIANTS}


def prompt_of(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def classes(prompt):
    return {node["class_type"] for node in prompt.values()}


def our_nodes(name):
    """Yield the nodes of this pack in a workflow, with their schemas."""
    for node in prompt_of(name).values():
        if node["class_type"] in SCHEMAS:
            yield node, SCHEMAS[node["class_type"]]


OURS = [name for name in NAMES if classes(prompt_of(name)) <= {*SCHEMAS, *EMBEDDED}]
NATIVE = [name for name in NAMES if classes(prompt_of(name)) & {*MODELS}]
EACH = pytest.mark.parametrize("name", NAMES)


def test_every_workflow_has_three_files():
    assert sorted(TITLES) == NAMES
    for suffix in ("json", "jpg"):
        assert {path.stem for path in WORKFLOWS.glob(f"*.{suffix}")} == {*TITLES.values()}


def test_comfyui_takes_templates_from_one_folder():
    """ComfyUI serves only the first folder in a pack with one of five names."""
    known = ("example_workflows", "example", "examples", "workflow", "workflows")
    assert [name for name in known if (WORKFLOWS.parent / name).exists()] == ["workflows"]


def canvas_names(canvas):
    """Return each canvas node's name by id, as `names_of` does."""
    counts = Counter(node["type"] for node in canvas["nodes"])
    keys = [(node, "type" if counts[node["type"]] == 1 else "title") for node in canvas["nodes"]]
    return {node["id"]: node[key] for node, key in keys}


@pytest.mark.parametrize("folder", ["tools/notes", "web/docs"])
def test_notes_and_help_pages_name_templates_by_title(folder):
    short = re.compile(rf"(?<![/.\w])({'|'.join(n for n in NAMES if '_' in n or '2v' in n)})(?!\w)")
    pages = (WORKFLOWS.parent / folder).rglob("*.md")
    found = {page.name: short.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: names for name, names in found.items() if names} == {}


@EACH
def test_thumbnail_is_small_and_wide(name):
    path = template_path(name).with_suffix(".jpg")
    assert path.stat().st_size < 100_000
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("JPEG", (800, 450))


@EACH
def test_canvas_has_the_nodes_of_the_api_file_and_a_note(name):
    types = {node["type"] for node in template(name)["nodes"]}
    assert types == classes(prompt_of(name)) | {NOTE_TYPE}


@EACH
def test_every_input_of_our_nodes_has_a_valid_value(name):
    """The frontend saves every widget, so a complete API file can be compared with an export."""
    for node, schema in our_nodes(name):
        given = node["inputs"]
        sockets = {socket.id: socket for socket in schema.inputs}
        widgets = {name for name, socket in sockets.items() if socket.io_type in WIDGETS}
        needed = widgets | {name for name, socket in sockets.items() if not socket.optional}
        assert needed <= given.keys() <= sockets.keys()
        for socket_id, socket in sockets.items():
            options = socket.as_dict()
            value = given.get(socket_id)
            if "min" in options:
                assert options["min"] <= value <= options["max"], socket_id
            elif options.get("options") and "default" in options and value not in MODEL_FILES:
                assert value in options["options"], socket_id


@EACH
def test_files_are_listed_and_linked(name, sample_models):
    """Nodes 2.0 draws text in backticks blue on grey-blue, so notes do not use backticks."""
    prompt = prompt_of(name)
    canvas = template(name)
    values = [value for node in prompt.values() for value in node["inputs"].values()]
    named = {value for value in values if str(value).endswith("tensors")}
    assert named <= MODEL_FILES.keys()
    for file in (MODEL_FILES[value] for value in named):
        # The test model has no native models. The servers in tests have only their names.
        assert (sample_models / file.directory / file.name).is_file() or name in NATIVE
    (note,) = (node for node in canvas["nodes"] if node["type"] == NOTE_TYPE)
    (text,) = note["widgets_values"]
    assert "`" not in text
    for file in (MODEL_FILES[value] for value in named):
        assert f"**{file.directory}/** [{file.name}]({file.url})" in text
    names = canvas_names(canvas)
    named_nodes = names_of(prompt)
    carried = {names[node["id"]]: node["properties"].get("models", []) for node in canvas["nodes"]}
    for node_id, node in prompt.items():
        assert carried[named_nodes[node_id]] == [file._asdict() for file in models_of(node)]


@EACH
def test_nodes_keep_the_names_of_menus_and_documents(name):
    """A custom title hides the name used in documents, in every language.

    Only nodes with the same class need one.
    """
    counts = Counter(node["class_type"] for node in prompt_of(name).values())
    for node, schema in our_nodes(name):
        if counts[node["class_type"]] == 1:
            assert node["_meta"]["title"] == schema.display_name
    for node in template(name)["nodes"]:
        kind = node["type"]
        assert ("title" in node) == (kind == NOTE_TYPE or counts[kind] > 1), kind


def test_thumbnails_are_drawn_for_their_workflows():
    drawn = {name: thumbnail(name) for name in NAMES}
    assert len({picture.tobytes() for picture in drawn.values()}) == len(NAMES)
    for name, picture in drawn.items():
        with Image.open(template_path(name).with_suffix(".jpg")) as kept:
            difference = ImageChops.difference(picture, kept.convert("RGB"))
        assert max(ImageStat.Stat(difference).mean) < 5, f"{name}: run scripts/workflows"


@pytest.mark.parametrize(
    ("label", "shape", "experts", "weight_bytes"),
    [
        ("Wan2.2 A14B", T2V_A14B, 2, 1),
        ("Wan2.1 14B", replace(T2V_A14B, in_channels=36, image_width=1280), 1, 1),
        ("Wan2.1 1.3B", ExpertShape(width=1536, ffn_width=8960, blocks=30), 1, 2),
        ("Wan2.2 5B", TI2V_5B, 1, 2),
    ],
)
def test_thumbnail_sizes(label, shape, experts, weight_bytes):
    parameters = shape.non_block_parameters + shape.blocks * shape.streamed_parameters
    shown = FOOTPRINTS[label]
    assert shown.weights == pytest.approx(experts * weight_bytes * parameters / 1e9, rel=0.05)
    assert shown.buffers == pytest.approx(2 * shape.streamed_bytes() / 1e9, abs=0.06)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NATIVE])
def test_compute_dtype_is_chosen_by_the_machine(name):
    (loader,) = (node for node in prompt_of(name).values() if node["class_type"] in EXPERTS)
    assert loader["inputs"]["compute_dtype"] == "auto"


@EACH
def test_every_link_of_the_canvas_has_two_ends(name):
    canvas = template(name)
    nodes = {node["id"]: node for node in canvas["nodes"]}
    assert all(isinstance(node_id, int) for node_id in nodes)
    ids = [link[0] for link in canvas["links"]]
    assert len({*ids}) == len(ids)
    assert canvas["last_link_id"] >= max(ids)
    assert canvas["last_node_id"] >= max(nodes)
    for link, source, output, target, socket, kind in canvas["links"]:
        assert link in nodes[source]["outputs"][output]["links"]
        assert nodes[source]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][socket]["link"] == link
    linked = [socket.get("link") for node in nodes.values() for socket in node["inputs"]]
    assert sorted(link for link in linked if link is not None) == sorted(ids)


@EACH
def test_canvas_equals_the_api_file(name):
    """Compare all nodes' links, and our nodes' widgets in schema order."""
    prompt = prompt_of(name)
    canvas = template(name)
    inputs_by_name = by_name(prompt)
    names = canvas_names(canvas)
    origin = {link[0]: (names[link[1]], link[2]) for link in canvas["links"]}
    for node in canvas["nodes"]:
        if node["type"] == NOTE_TYPE:
            continue
        class_type, inputs = inputs_by_name.pop(names[node["id"]])
        assert node["type"] == class_type
        linked = [socket for socket in node["inputs"] if socket.get("link") is not None]
        links = {socket["name"]: origin[socket["link"]] for socket in linked}
        assert links == {key: value for key, value in inputs.items() if isinstance(value, tuple)}
        if class_type in SCHEMAS:
            assert dict(_widgets(node)) == {key: inputs[key] for key in inputs if key not in links}
    assert not inputs_by_name


def _widgets(node):
    """Yield our nodes' widgets. A seed's second widget is how it changes after a run."""
    values = iter(node.get("widgets_values", ()))
    for socket in SCHEMAS[node["type"]].inputs:
        if socket.io_type in WIDGETS:
            yield socket.id, next(values)
            if socket.as_dict().get("control_after_generate"):
                assert next(values) == "fixed"
    assert not [*values]


def _small(name):
    """The workflow, small enough for a test."""
    prompt = prompt_of(name)
    for node in prompt.values():
        if "width" in node["inputs"]:
            node["inputs"] |= {"width": 32, "height": 32, "frames": 5}
        if node["class_type"] == "WanStreamContinueVideo":
            node["inputs"]["frames"] = 9  # more than the 5 shared by clips
        if "steps" in node["inputs"]:
            node["inputs"]["steps"] = 4
        if "layout" in node["inputs"]:
            # The planner's choice, without a measurement of this machine.
            node["inputs"] |= {"layout": "manual", "cfg": 2, "threads": 1}
    return prompt


@pytest.fixture(scope="module")
def shared_workers():
    """Workflows with equal workers share their processes, as in ComfyUI, until the last test."""
    yield
    embedded_host.memory.worker_registry.close()


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.integration] if "WanStreamWorkers" in classes(prompt_of(name)) else []


# `tests/integration/comfy` runs the others in both hosts, and compares.
ALONE = ["t2v", *(name for name in OURS if name in VARIANTS or name.endswith("workers"))]


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in ALONE])
@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_workflow_of_our_nodes_runs_without_comfyui(name, sample_models, tmp_path):
    if _marks(name) and find_spec("ray") is None:
        pytest.skip(f'RAY IS NOT INSTALLED, SO {name} DID NOT RUN: pip install "ray>=2.52"')
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "example.png")
    frames = torch.rand(5, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    write_video(tmp_path / "example.mp4", frames, fps=16, crf=20, metadata={})
    places = {"models": sample_models, "output": tmp_path / "output", "input_dir": tmp_path}
    try:
        history = run_workflow(_small(name), nodes=PACK, keep=["sampler"], **places)
    finally:
        embedded_host.free_experts()
    assert not history.node_errors
    latent, _ = history.results["sampler"]
    frames = 3 if "WanStreamContinueVideo" in classes(prompt_of(name)) else 2
    shape = (1, 48, 2, 2, 2) if name.startswith("wan22_5b") else (1, 16, frames, 4, 4)
    assert latent["samples"].shape == shape
    assert torch.isfinite(latent["samples"]).all()
    assert latent["samples"].std() > 0.1
    (saved,) = (file for shown in history.outputs.values() for file in shown.get("images", ()))
    assert (tmp_path / "output" / saved["subfolder"] / saved["filename"]).stat().st_size > 0


def test_most_workflows_run_without_comfyui():
    assert {*NAMES} - {*OURS, *NATIVE} == {"guider", "native_mixed"}


def test_native_workflows_have_a_loader_for_each_sampler():
    assert {*NATIVE, "native_mixed"} == {name for name in NAMES if name.startswith("native_")}
    for name in NATIVE:
        kinds = Counter(node["class_type"] for node in prompt_of(name).values())
        samplers = sum(kinds[kind] for kind in SAMPLERS)
        assert samplers == (2 if name == "native_wan22" else 1)
        assert sum(kinds[kind] for kind in MODELS) == samplers + kinds["WanStreamJoinExperts"]
        assert "UNETLoader" not in kinds
