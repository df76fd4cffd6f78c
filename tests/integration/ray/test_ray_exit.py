"""Workers and Ray end with a process with the pack imported as in ComfyUI."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from wanstream.tests.support.distributed.programs import LIMIT_S, environment, started

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GONE_S = 30

COMFY_LIKE = """
import importlib.util, json, sys
folder = sys.argv[1]
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
refs, ray_pool = (importlib.import_module(f"{name}.{part}") for part in sys.argv[2:])
pool = ray_pool.RayPool(refs.WorkersRef(count=1, threads=1), "cpu", store_bytes=128 << 20)
(worker,) = pool.workers
print(json.dumps([worker.call("facts").result(60).pid, *worker.started.logs]), flush=True)
input()
"""


def test_workers_end_with_a_process_that_imports_the_pack_as_comfyui_does(tmp_path):
    """It returns with an open pool. The pack is in a folder with another name."""
    folder = tmp_path / "pack with.dots-and spaces"
    folder.symlink_to(ROOT, target_is_directory=True)
    program = [sys.executable, "-c", COMFY_LIKE, folder, "schema.refs", "distributed.ray.pool"]
    given = environment()
    given.pop("PYTHONPATH", None)
    with started(program, cwd=tmp_path, env=given) as process:
        worker, *logs = json.loads(process.stdout.readline())
        children = psutil.Process(process.pid).children(recursive=True)
        assert worker in {child.pid for child in children}
        process.communicate("\n", timeout=LIMIT_S)
        assert process.returncode == 0
    _, left = psutil.wait_procs(children, timeout=GONE_S)
    assert left == []
    assert [log for log in logs if Path(log).parents[2].exists()] == []
