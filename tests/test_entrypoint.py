"""Importing the pack does nothing, in any folder name and without being installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent

# As ComfyUI imports a folder from custom_nodes: the module's name is the path.
LOAD = """
import asyncio, importlib.util, json, logging, sys
folder = sys.argv[1]
name = folder.replace(".", "_x_")
root = logging.getLogger()
path, modules = list(sys.path), set(sys.modules)
handlers, level = list(root.handlers), root.level
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
found = {"new": sorted(set(sys.modules) - modules - {name}), "web": module.WEB_DIRECTORY}
found["logging"] = (root.handlers, root.level) == (handlers, level)

async def listed():
    extension = await module.comfy_entrypoint()
    return await extension.get_node_list()

nodes = asyncio.run(listed())
found["ids"] = [node.define_schema().node_id for node in nodes]
(loader,) = (node for node in nodes if node.define_schema().node_id == "WanStreamExperts")
try:
    loader.execute(high_noise="x", low_noise="x", compute_dtype="fp32")
except Exception as err:
    found["called"] = f"{type(err).__module__}.{type(err).__qualname__}"
print(json.dumps({**found, "path": sys.path == path, "modules": sorted(sys.modules)}))
"""


def test_import_and_entry_point_of_a_folder_with_any_name(tmp_path):
    folder = tmp_path / "ComfyUI-Wan2.2 with.dots-and spaces"
    folder.symlink_to(ROOT, target_is_directory=True)
    program = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["path"] is True
    assert found["logging"] is True
    assert found["new"] == [], "importing the pack loaded other modules"
    assert (ROOT / found["web"]).is_dir()
    assert found["called"] == "wanstream.StateError", "not the path of the pack"
    assert "WanStreamSampler" in found["ids"]
    assert len(set(found["ids"])) == len(found["ids"])
    modules = {*found["modules"]}
    assert "wanstream" not in modules, "the pack imported itself under a second name"
    # Importing them takes several times as long as all the rest, and nothing needs them before a
    # model is opened.
    assert not {"diffusers", "transformers", "peft", "accelerate", "ray", "ftfy"} & modules
