"""Importing the pack does nothing, in any folder name and without being installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent

# As ComfyUI imports a folder from custom_nodes: the module's name is the path.
LOAD = """
import importlib.util, json, logging, sys
folder = sys.argv[1]
name = folder.replace(".", "_x_")
before = {"path": list(sys.path), "modules": set(sys.modules),
          "handlers": list(logging.getLogger().handlers), "level": logging.getLogger().level}
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
print(json.dumps({
    "path": sys.path == before["path"],
    "new": sorted(set(sys.modules) - before["modules"] - {name}),
    "logging": logging.getLogger().handlers == before["handlers"]
    and logging.getLogger().level == before["level"],
    "web": module.WEB_DIRECTORY,
}))
"""


def _run(code: str, *args: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, timeout=120
    )
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_import_as_comfyui_does_changes_nothing(tmp_path):
    folder = tmp_path / "ComfyUI-Wan2.2-Stream"
    folder.symlink_to(ROOT, target_is_directory=True)
    found = _run(LOAD, str(folder))
    assert found["path"] is True
    assert found["logging"] is True
    assert found["new"] == [], "importing the pack loaded other modules"
    assert (ROOT / str(found["web"])).is_dir()


ENTRY = """
import asyncio, importlib.util, json, sys
name = sys.argv[1].replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, sys.argv[1] + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
path = list(sys.path)

async def nodes():
    extension = await module.comfy_entrypoint()
    return await extension.get_node_list()

found = {node.define_schema().node_id: node for node in asyncio.run(nodes())}
ids = list(found)
try:
    found["WanStreamExperts"].execute(high_noise="x", low_noise="x", compute_dtype="fp32")
except Exception as err:
    called = f"{type(err).__module__}.{type(err).__qualname__}"
modules = sorted(sys.modules)
print(json.dumps({"ids": ids, "called": called, "path": sys.path == path, "modules": modules}))
"""


def test_entry_point_lists_nodes_without_model_libraries(tmp_path):
    folder = tmp_path / "pack with.dots-and spaces"
    folder.symlink_to(ROOT, target_is_directory=True)
    found = _run(ENTRY, str(folder))
    ids = found["ids"]
    assert found["called"] == "wanstream.StateError", "not the path of the pack"
    assert isinstance(ids, list)
    assert "WanStreamSampler" in ids
    assert len(set(ids)) == len(ids)
    assert found["path"] is True
    modules = found["modules"]
    assert isinstance(modules, list)
    assert "wanstream" not in modules, "the pack imported itself under a second name"
    # Importing them takes several times as long as all the rest, and nothing needs them before a
    # model is opened.
    assert not {"diffusers", "transformers", "peft", "accelerate", "ray", "ftfy"}.intersection(
        modules
    )
