"""Fault campaign: seeded faults on separate stages, with files compared with an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from wanstream.batch.output_store import check_media
from wanstream.testing.model import write_tiny_model
from wanstream.tests.faults.cases import KINDS, Kind, Place, SkippedError
from wanstream.tests.faults.replaced import computing_replaced, named_models
from wanstream.tests.faults.stage import Findings, Stage
from wanstream.tests.support.batch.command import Prompt, shipped, videos
from wanstream.tools import comfyui as comfyui_tools

ROWS: tuple[dict[str, Any], ...] = tuple({"sampler.seed": seed} for seed in range(1, 5))
ROWS[1]["name"] = "shot"
REAL_ROWS = 3
_REAL = ("real", "run", "comfyui")
"""Worlds where videos are computed."""
_LIKE_REPLACED = ("lanes", "server")
"""Worlds with the files and crash points of the world "replaced"."""


def _chain() -> list[dict[str, Any]]:
    """Return ten shuffled rows, each continuing the one before, with a branch from the middle."""
    rows: list[dict[str, Any]] = [{"name": f"r{n}", "sampler.seed": n} for n in range(10)]
    for number, row in enumerate(rows[1:]):
        row["continues"] = f"r{number if number < 8 else 4}"
    random.Random(19).shuffle(rows)
    return rows


def _first_kind(world: str) -> Kind:
    return next(kind for kind in KINDS if kind.world == world)


def small_workflow() -> Prompt:
    """T2V, 32x32x5 in two steps, in fp32: half precision takes 100 times as long on some CPUs."""
    latent = {"width": 32, "height": 32, "frames": 5}
    # Only hosts validate, and would turn 0 into a float. All files shall have one prompt.
    given = {"frames": {"memory_gb": 0.0}, "experts": {"compute_dtype": "fp32"}}
    return shipped(latent=latent, sampler={"steps": 2}, save={"crf": 30}, **given)


class RealServer:
    """A ComfyUI server killed and restarted at the same port."""

    def __init__(self, comfyui: comfyui_tools.ComfyUI, base: Path, models: Path) -> None:
        self._comfyui = comfyui
        self._base = base
        self._port = comfyui_tools.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._opened = ExitStack()
        self._process_id = 0
        for folder in ("custom_nodes", "input", "output"):
            (base / folder).mkdir(parents=True)
        (base / "custom_nodes" / comfyui_tools.PACK).symlink_to(
            comfyui_tools.ROOT, target_is_directory=True
        )
        (base / "models").symlink_to(models, target_is_directory=True)

    def kill(self) -> None:
        os.kill(self._process_id, signal.SIGKILL)
        self._opened.close()

    def start(self) -> None:
        server = comfyui_tools.running_server(self._comfyui, self._base, port=self._port)
        self._process_id = self._opened.enter_context(server).process_id

    def close(self) -> None:
        self._opened.close()


class Campaign:
    """Stages below a folder, with everything they share made once."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self._made = 0
        self._points: dict[str, int] = {}
        self._files: dict[str, dict[str, list[bytes]]] = {}
        Image.new("RGB", (32, 32)).save(folder / "example.png")

    def sample(self, count: int) -> list[tuple[Kind, int]]:
        """Return seeded kinds and numbers of cases, with as many kinds as possible."""
        chance = random.Random(self.seed)
        kinds = [kind for kind in chance.sample(KINDS, len(KINDS)) if kind.world != "comfyui"]
        return [(kind, chance.randrange(self.count(kind))) for kind in kinds[:count]]

    def run(self, kind: Kind, number: int) -> Findings:
        """Inject one fault, a case of this kind, and classify the remaining files.

        Raise `SkippedError` if this machine cannot inject it.
        """
        chance = random.Random(f"{self.seed}/{kind.name}/{number}")
        real = kind.world in _REAL
        with ExitStack() as opened:
            expected = {} if kind.world == "run" else self._expected(kind)
            if not real:
                opened.enter_context(computing_replaced())
            stage = opened.enter_context(self._on_stage(kind))
            points = 0 if real else self._points_of(kind.world)
            place = Place(points=points, number=number, campaign=self)
            kind.harm(stage, chance, place)
            if kind.world != "server":
                stage.finish()
            if kind.world == "run":
                return stage.judge_run(self._run_file)
            return stage.judge(expected, frames_alone=kind.world == "lanes")

    def _expected(self, kind: Kind) -> Mapping[str, Sequence[bytes]]:
        if kind.world == "real" and "checkpoint" in kind.name:
            return self._swapped_files
        return self._files_of("replaced" if kind.world in _LIKE_REPLACED else kind.world)

    def _files_of(self, world: str) -> dict[str, list[bytes]]:
        """Return the files of an undisturbed run."""
        if world not in self._files:
            with nullcontext() if world in _REAL else computing_replaced():
                self._files[world] = self._undisturbed(world)
        return self._files[world]

    def _points_of(self, world: str) -> int:
        """Count the crash points in an undisturbed client."""
        world = "replaced" if world in _LIKE_REPLACED else world
        if world not in self._points:
            with computing_replaced(), self._on_stage(_first_kind(world)) as stage:
                self._points[world] = stage.count_points()
        return self._points[world]

    @cached_property
    def comfyui(self) -> RealServer:
        """A ComfyUI with this pack and the test model. Raises SkippedError where there is none."""
        try:
            server = RealServer(comfyui_tools.find_comfyui(), self.folder / "base", self.models)
        except comfyui_tools.NoComfyUIError as err:
            raise SkippedError(str(err)) from err
        server.start()
        return server

    def close(self) -> None:
        """End the server, if there is one."""
        if "comfyui" in vars(self):
            self.comfyui.close()

    @cached_property
    def named_models(self) -> Path:
        named_models(self.folder / "named", small_workflow())
        return named_models(self.folder / "named", shipped("continue_video"))

    @cached_property
    def models(self) -> Path:
        """The test model."""
        return write_tiny_model(self.folder / "models", layers=4).folder

    @cached_property
    def other_models(self) -> Path:
        """A valid copy of the test model with exchanged expert weights, for other results."""
        folder = self.folder / "other"
        shutil.copytree(self.models, folder)
        first, second = sorted((folder / "diffusion_models").glob("*t2v*fp8*"))
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        return folder

    @cached_property
    def _swapped_files(self) -> dict[str, list[bytes]]:
        """Files from undisturbed runs, some with other weights in one expert file."""
        found = {name: list(contents) for name, contents in self._files_of("real").items()}
        others = self.other_models  # copied now, before a file is renamed in the original folder
        for file in sorted((self.models / "diffusion_models").glob("*t2v*fp8*")):
            kept = file.with_name(f"{file.name}.kept")
            file.rename(kept)
            shutil.copyfile(others / "diffusion_models" / file.name, file)
            for name, contents in self._undisturbed("real").items():
                found[name] += contents
            kept.replace(file)
        return found

    @cached_property
    def _run_file(self) -> bytes:
        with self._on_stage(_first_kind("run")) as stage:
            assert stage.run() == 0, stage.stderr()
            (made,) = stage.out.rglob("*.mp4")
            return made.read_bytes()

    def _undisturbed(self, world: str) -> dict[str, list[bytes]]:
        with self._on_stage(_first_kind(world)) as stage:
            assert stage.run() == 0, stage.stderr()
            made = {name: [content] for name, content in stage.made().items()}
            assert len(videos(stage.out)) == len(self._rows(world)), made.keys()
            for name in made:
                check_media(stage.out / name)
            return made

    @contextmanager
    def _on_stage(self, kind: Kind) -> Iterator[Stage]:
        models = self.models if kind.world in _REAL else self.named_models
        self._made += 1
        rows = [*self._rows(kind.world), *kind.rows]
        by_world = {"lanes": ["--share-weights", "3"], "server": ["--timeout", "60"]}
        by_world["continued"] = ["--input", str(self.folder)]
        more = by_world.get(kind.world, [])
        workflow = shipped("continue_video") if kind.world == "continued" else small_workflow()
        where = ["--models", str(models)]
        if kind.world == "comfyui":
            where = ["--server", self.comfyui.url, "--timeout", "300"]
        elif kind.world == "server":
            where = []  # added once the server is there
        stage = Stage(self.folder / f"stage{self._made}", workflow, rows, [*where, *more])
        if kind.world == "run":
            workflow = str(stage.folder / "workflow.json")
            stage.command = ["run", workflow, "--out", str(stage.out), *where]
        stage.done_code = kind.done_code
        try:
            yield stage
        finally:
            stage.clear()

    @staticmethod
    def _rows(world: str) -> Sequence[dict[str, Any]]:
        if world == "continued":
            return _chain()
        return ROWS[:REAL_ROWS] if world in {"real", "comfyui"} else ROWS

    def count(self, kind: Kind) -> int:
        """Return the case count."""
        return self._points_of(kind.world) if kind.cases is None else kind.cases
