"""A real ComfyUI with this pack: one isolated server per session, and calls into ComfyUI's Python.

These tests are skipped without a ComfyUI on this machine. `wanstream.tools.comfyui` documents the
search path.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wanstream.testing import (
    TinyShape,
    make_expert,
    save_expert_file,
    save_expert_folder,
    write_tiny_model,
)
from wanstream.testing.components import save_text_encoder_folders
from wanstream.testing.model import make_image_encoder
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.testing.weights import make_text_encoder, make_tiny_vae, make_vae
from wanstream.tools.comfyui import PACK as PLAIN_PACK
from wanstream.tools.comfyui import (
    START_SECONDS,
    ComfyUI,
    NoComfyUIError,
    Server,
    find_comfyui,
    running_server,
)
from wanstream.wan.latents import WAN21

ROOT = Path(__file__).parents[3]
PACK = "ComfyUI-WanStream.test-1"
"""The pack's folder name: a dot and a dash, illegal in a Python name."""

# A node for the tests alone: it keeps the server busy until a file appears.
GATE = """
import pathlib, time

class TestGate:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = ("STRING",), "wait", True, "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {})}}

    def wait(self, file):
        while not pathlib.Path(file).exists():
            time.sleep(0.02)
        return (file,)

NODE_CLASS_MAPPINGS = {"TestGate": TestGate}
"""

GUIDER_CASES = """
import guider_cases
answer = guider_cases.answers(*arguments)
"""


# A failing module must not take the other modules' results with it.
NATIVE_CASES = """
import gc, importlib, pathlib, traceback
import comfy.model_management
answer = {}
for name in arguments[0]:
    folder = pathlib.Path(arguments[1], name)
    folder.mkdir()
    try:
        answer[name] = importlib.import_module(name).answers(str(folder))
    except Exception:
        answer[name] = {"error": traceback.format_exc()}
    comfy.model_management.unload_all_models()
    gc.collect()
"""


@pytest.fixture(scope="session")
def comfyui() -> ComfyUI:
    try:
        return find_comfyui()
    except NoComfyUIError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="session")
def vae_width(comfyui: ComfyUI) -> int:
    """Return the `base_dim` for a VAE this ComfyUI can load.

    Older versions support only the real width.
    """
    looks = "decoder.head.0.gamma" in (comfyui.path / "comfy" / "sd.py").read_text(encoding="utf-8")
    return 16 if looks else 96


@pytest.fixture(scope="session")
def base(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with this pack, test nodes, a picture, and a few model names."""
    base = tmp_path_factory.mktemp("comfyui")
    _create_named_files(base)
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes" / "gate.py").write_text(GATE)
    (base / "custom_nodes" / "clip_node.py").symlink_to(Path(__file__).with_name("clip_node.py"))
    return base


@pytest.fixture(scope="session")
def named_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only base directory with the files in `base` before tests add models or latents."""
    base = tmp_path_factory.mktemp("names")
    _create_named_files(base)
    return base


def _create_named_files(base: Path) -> None:
    """Create a few models, and a picture name for the node lists.

    A graph is refused for any file without a model in it, so these are real.
    """
    models = ("diffusion_models", "vae_approx", "diffusers/wan")
    for folder in ("input", "output", *(f"models/{name}" for name in models)):
        (base / folder).mkdir(parents=True)
    pipeline = base / "models" / "diffusers" / "wan"
    make_vae(seed=0).save_pretrained(pipeline / "vae")
    save_text_encoder_folders(
        make_text_encoder(seed=0, vocabulary=len(VOCABULARY)), pipeline, dtype=torch.float16
    )
    make_image_encoder(seed=0, image_size=28).save_pretrained(pipeline / "image_encoder")
    save_file(make_tiny_vae(WAN21, seed=0), base / "models" / "vae_approx" / "taew2_1.safetensors")
    expert = make_expert(TinyShape(layers=1, heads=1, ffn_dim=128, text_dim=64), seed=0)
    for name in ("high", "low"):
        save_expert_file(
            expert,
            base / "models" / "diffusion_models" / f"{name}.safetensors",
            dtype=torch.float32,
        )
    save_expert_folder(expert, pipeline / "transformer", dtype=torch.float32)
    (base / "models" / "diffusion_models" / "pickle.pt").touch()
    (pipeline / "model_index.json").touch()
    (base / "input" / "picture.png").touch()


@pytest.fixture(scope="session")
def in_comfyui(
    comfyui: ComfyUI, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """`in_comfyui(code, *arguments)` runs code in ComfyUI's Python, in a separate process.

    It returns the JSON value assigned to `answer`, and may take `seconds`. The code sees
    `arguments`, `folder_paths`, `nodes`, `io` and `ui`, and can import the modules in this folder.
    ComfyUI, which takes seconds to import, is imported before the process is forked.
    """
    files = {
        name: str(tmp_path_factory.mktemp("in_comfyui") / name) for name in ("stdout", "stderr")
    }
    command = [comfyui.python, Path(__file__).with_name("warm_comfyui.py")]
    with subprocess.Popen(
        [*command, base, Path(__file__).parent],
        cwd=comfyui.path,
        env=comfyui.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as warm:
        assert warm.stdin is not None
        assert warm.stdout is not None

        def in_comfyui(code: str, *arguments: object, seconds: int = START_SECONDS) -> Any:
            request = {"code": code, "arguments": arguments, "seconds": seconds, "files": files}
            print(json.dumps(request), file=warm.stdin, flush=True)
            status = warm.stdout.readline()
            assert status == "0\n", f"{status}{Path(files['stderr']).read_text()}"
            return json.loads(Path(files["stdout"]).read_text().splitlines()[-1])

        yield in_comfyui
        warm.stdin.close()


@pytest.fixture(scope="session")
def server(comfyui: ComfyUI, base: Path) -> Iterator[Server]:
    """The session's own ComfyUI server."""
    with running_server(comfyui, base) as server:
        yield server


@pytest.fixture(scope="session")
def stocked_server(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with this pack, a node for texts and the test model, four blocks deep."""
    base = tmp_path_factory.mktemp("stocked")
    for folder in ("custom_nodes", "input", "output"):
        (base / folder).mkdir()
    (base / "custom_nodes" / PLAIN_PACK).symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes" / "clip_node.py").symlink_to(Path(__file__).with_name("clip_node.py"))
    write_tiny_model(base / "models", layers=4)
    with running_server(comfyui, base) as server:
        yield server


@pytest.fixture(scope="session")
def guider_answers(
    in_comfyui: Callable[..., Any],
    tiny_expert_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The value for every case in `guider_cases.py`."""
    folder = tmp_path_factory.mktemp("guider")
    for kind, channels in (("t2v", 16), ("i2v", 36)):
        for seed, name in enumerate(("high", "low"), start=1):
            (folder / f"{kind}_{name}.safetensors").symlink_to(
                tiny_expert_file(seed=seed, in_channels=channels)
            )
    results: dict[str, Any] = in_comfyui(GUIDER_CASES, str(folder), seconds=900)
    return results


@pytest.fixture(scope="session")
def native_answers(
    request: pytest.FixtureRequest,
    in_comfyui: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """The values for all native model cases, by case module.

    One process runs the modules that the selected tests name in `NATIVE_CASES`, because ComfyUI
    takes seconds to start.
    """
    modules = {
        getattr(item.module, "NATIVE_CASES", None)
        for item in request.session.items
        if hasattr(item, "module")
    }
    names = sorted(modules - {None})
    results: dict[str, dict[str, Any]] = in_comfyui(
        NATIVE_CASES, names, str(tmp_path_factory.mktemp("native")), seconds=1800
    )
    return results


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The value for every case in a test module's `NATIVE_CASES`, else in `guider_cases.py`."""
    name = getattr(request.module, "NATIVE_CASES", None)
    if name is None:
        results: dict[str, Any] = request.getfixturevalue("guider_answers")
        return results
    results = request.getfixturevalue("native_answers")[name]
    assert "error" not in results, results["error"]
    return results


@pytest.fixture
def case(answers: dict[str, Any]) -> Callable[[str], Any]:
    """Return `case(name)`, which returns a result, skips it, or fails with the case's traceback."""

    def results(name: str) -> Any:
        value = answers[name]
        if isinstance(value, dict):
            assert "error" not in value, value["error"]
            if "skip_reason" in value:
                pytest.skip(value["skip_reason"])
        return value

    return results


@pytest.fixture
def newer_case(
    answers: dict[str, Any], case: Callable[[str], Any], comfyui: ComfyUI
) -> Callable[[str], Any]:
    """Return `case` for what ComfyUI has since 0.33.0. Only older versions skip what they lack."""

    def results(name: str) -> Any:
        if name not in answers and comfyui.version() < (0, 33):
            pytest.skip("not in this ComfyUI")
        return case(name)

    return results
