"""A real ComfyUI with this pack: one isolated server per session, and calls into ComfyUI's Python.

These tests are skipped without a ComfyUI on this machine. `wanstream.tools.comfyui` documents the
search path.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from wanstream.nodes.runs import write_video
from wanstream.tests.integration.comfy.servers import HERE, add_models, make_base
from wanstream.tools.comfyui import START_SECONDS, NoComfyUIError, find_comfyui, running_server

PACK = "ComfyUI-WanStream.test-1"
"""The pack's folder name: a dot and a dash, illegal in a Python name."""


@pytest.fixture(scope="session")
def comfyui():
    try:
        return find_comfyui()
    except NoComfyUIError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="session")
def vae_width(comfyui):
    """Return the `base_dim` for a VAE this ComfyUI can load.

    Older versions support only the real width.
    """
    looks = "decoder.head.0.gamma" in (comfyui.path / "comfy" / "sd.py").read_text(encoding="utf-8")
    return 16 if looks else 96


@pytest.fixture(scope="session")
def base(vae_width, sample_models, tmp_path_factory):
    """A base directory with the test model, test nodes, a picture, a video, and this pack.

    The pack is the archive for the Comfy Registry, without files that git does not have.
    """
    base = make_base(tmp_path_factory.mktemp("comfyui"), "clip.py", "gate.py", archived_as=PACK)
    add_models(base, sample_models, vae_width=vae_width)
    pipeline = base / "models" / "diffusers" / "wan"
    pipeline.mkdir(parents=True)
    (pipeline / "model_index.json").touch()
    Image.effect_noise((80, 60), 90).convert("RGB").save(base / "input" / "example.png")
    frames = torch.rand(9, 60, 80, 3, generator=torch.Generator().manual_seed(2))
    write_video(base / "input" / "example.mp4", frames, fps=16, crf=20, metadata={})
    return base


@pytest.fixture(scope="session")
def in_comfyui(comfyui, base, tmp_path_factory):
    """`in_comfyui(code, *arguments)` runs code in ComfyUI's Python, in a separate process.

    It returns the JSON value assigned to `answer`, and may take `seconds`. The code sees
    `arguments`, `folder_paths`, `nodes`, `io` and `ui`, and can import the modules in this folder.
    ComfyUI, which takes seconds to import, is imported before the process is forked.
    """
    folder = tmp_path_factory.mktemp("in_comfyui")
    files = {name: str(folder / name) for name in ("stdout", "stderr")}
    with subprocess.Popen(
        [comfyui.python, HERE / "inside" / "warm_comfyui.py", base],
        cwd=comfyui.path,
        env=comfyui.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as warm:
        assert warm.stdin is not None
        assert warm.stdout is not None

        def in_comfyui(code, *arguments, seconds=START_SECONDS):
            request = {"code": code, "arguments": arguments, "seconds": seconds, "files": files}
            print(json.dumps(request), file=warm.stdin, flush=True)
            status = warm.stdout.readline()
            assert status == "0\n", f"{status}{Path(files['stderr']).read_text()}"
            return json.loads(Path(files["stdout"]).read_text().splitlines()[-1])

        yield in_comfyui
        warm.stdin.close()


@pytest.fixture(scope="session")
def server(comfyui, base):
    """The session's own ComfyUI server."""
    with running_server(comfyui, base) as server:
        yield server
