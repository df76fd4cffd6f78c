"""Time around a graph's steps in a real server: Load Diffusion Model, streamed and whole.

python benchmarks/native/graph.py [--before CHECKOUT]

`COMFYUI_PATH` and `COMFYUI_PYTHON` name the ComfyUI. Each loader has a separate server. For each
family it runs a graph with 4 steps at CFG 1 and a LoRA: first, with another LoRA, with another
seed, and with a larger latent. `--before` also runs the pack in another checkout, such as an older
one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from wanstream.benchmarks.record import record
from wanstream.tools.comfyui import Server, find_comfyui, running_server

STEPS = 4
ROUNDS = 5
FAMILIES = ("wan", "z_image")
STREAMED = "WanStreamLoadDiffusionModel"
WHOLE = "UNETLoader"
RUNS = {
    "first": {"lora": "first", "seed": 1, "larger": False},
    "another LoRA": {"lora": "second", "seed": 1, "larger": False},
    "another seed": {"lora": "second", "seed": 2, "larger": False},
    "larger": {"lora": "second", "seed": 2, "larger": True},
}
ROOT = Path(__file__).parents[2]


def graph(family: str, loader: str, *, lora: str, seed: int, larger: bool) -> dict[str, Any]:
    def node(class_type: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": class_type, "inputs": inputs}

    return {
        "inputs": node("GraphInputs", family=family, larger=larger),
        "model": node(loader, unet_name=f"{family}.safetensors", weight_dtype="default"),
        "lora": node(
            "LoraLoaderModelOnly",
            model=["model", 0],
            lora_name=f"{family}_{lora}.safetensors",
            strength_model=1.0,
        ),
        "sampler": node(
            "KSampler",
            model=["lora", 0],
            seed=seed,
            steps=STEPS,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["inputs", 0],
            negative=["inputs", 1],
            latent_image=["inputs", 2],
            denoise=1.0,
        ),
        "saved": node("SaveLatent", samples=["sampler", 0], filename_prefix="latent"),
    }


def measure(server: Server, loader: str) -> dict[str, dict[str, float]]:
    """Return seconds by family and run, in total and outside the model calls."""
    found = {}
    calls = server.base / "calls.jsonl"
    for family in FAMILIES:
        for name, settings in RUNS.items():
            # Each run begins a new file, because the node only appends.
            calls.unlink(missing_ok=True)
            entry = server.run(graph(family, loader, **settings))
            times = {kind: data["timestamp"] for kind, data in entry["status"]["messages"]}
            # ComfyUI's timestamps are in milliseconds.
            total_s = (times["execution_success"] - times["execution_start"]) / 1000
            lines = [json.loads(line) for line in calls.read_text().splitlines()]
            assert len(lines) == STEPS
            steps_s = lines[-1][1] - lines[0][0]
            found[f"{family}, {name}"] = {
                "total_s": total_s,
                "steps_s": steps_s,
                "outside_s": total_s - steps_s,
                "outside_share": (total_s - steps_s) / total_s,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    before = parser.parse_args().before
    packs = {"streamed": (ROOT, STREAMED), "whole": (ROOT, WHOLE)}
    if before is not None:
        packs["before"] = (before.resolve(), STREAMED)
    comfyui = find_comfyui()
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in packs}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for name, (pack, loader) in packs.items():
                base = Path(folder) / f"{name} {number}"
                nodes = base / "custom_nodes"
                nodes.mkdir(parents=True)
                (user := base / "user" / "default").mkdir(parents=True)
                # Without this setting, the pack does not stream models as small as these.
                (user / "comfy.settings.json").write_text('{"WanStream.SmallModels": true}')
                (nodes / "wanstream").symlink_to(pack, target_is_directory=True)
                (nodes / "graph.py").symlink_to(Path(__file__).with_name("graph_nodes.py"))
                # The first server writes the models, and all others share them.
                if number or name != "streamed":
                    (base / "models").symlink_to(Path(folder) / "streamed 0" / "models")
                # A new server for each round, so no run finds nodes cached by an earlier one.
                with running_server(comfyui, base) as server:
                    rounds[name].append(measure(server, loader))
    figures = {
        f"{case}, {name}": {
            figure: round(statistics.median(each[case][figure] for each in measured), 3)
            for figure in measured[0][case]
        }
        for name, measured in rounds.items()
        for case in measured[0]
    }
    version = ".".join(map(str, comfyui.version()))
    method = (
        f"ComfyUI {version} on the CPU, random bf16 models 1024 wide with 8 blocks, a LoRA of rank "
        f"4 on each matrix, {STEPS} Euler steps at CFG 1; from execution_start to "
        "execution_success, and from the start of the first to the end of the last model call; "
        f"medians of {ROUNDS} servers, made in turns"
    )
    if before is not None:
        commit = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
        made = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
        method += f"; before: the pack at {made}"
    print(record("native-graph", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
