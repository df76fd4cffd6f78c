"""Fault campaign: seeded faults on separate stages, with files compared with an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from wanstream.batch.output_store import check_media
from wanstream.testing.model import write_tiny_model
from wanstream.tests.faults.cases import KINDS, Kind, Place, SkippedError
from wanstream.tests.faults.replaced import computing_replaced, named_models
from wanstream.tests.faults.stage import Findings, Stage
from wanstream.tests.support.batch.command import Prompt, shipped, videos, write_rows
from wanstream.tools import comfyui as comfyui_tools

ROWS: tuple[dict[str, Any], ...] = tuple({"sampler.seed": seed} for seed in range(1, 5))
ROWS[1]["name"] = "shot"
REAL_ROWS = 3
_REAL = ("real", "run", "comfyui")
"""Worlds where videos are computed."""


def _first_kind(world: str) -> Kind:
    return next(kind for kind in KINDS if kind.world == world)


@dataclass(frozen=True)
class Case:
    """One fault: a kind, and a number within the kind."""

    kind: Kind
    number: int


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
        self._opened, self._process_id = ExitStack(), 0
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
        # A child forked from a process with a thread pool would wait for threads it lacks.
        torch.set_num_threads(1)
        self.folder, self.seed = folder, seed
        self.workflow = small_workflow()
        self._made = 0

    def cases(self, kinds: Sequence[Kind] = KINDS) -> list[Case]:
        """Return all cases by kind."""
        return [Case(kind, number) for kind in kinds for number in range(self._count(kind))]

    def sample(self, count: int) -> list[Case]:
        """Return seeded cases with as many kinds as possible."""
        chance = random.Random(self.seed)
        kinds = [kind for kind in chance.sample(KINDS, len(KINDS)) if kind.world != "comfyui"]
        chosen = [Case(kind, chance.randrange(self._count(kind))) for kind in kinds]
        return chosen[:count]

    def run(self, case: Case) -> Findings:
        """Inject one fault and classify the remaining files.

        Raise `SkippedError` if this machine cannot inject it.
        """
        chance = random.Random(f"{self.seed}/{case.kind.name}/{case.number}")
        kind, real = case.kind, case.kind.world in _REAL
        with ExitStack() as opened:
            expected = {} if kind.world == "run" else self._expected(kind)
            if not real:
                opened.enter_context(computing_replaced())
            stage = opened.enter_context(self._on_stage(kind))
            place = Place(
                points=0 if real else self.points,
                number=case.number,
                models=self.models if real else self.named_models,
                other_models=self.other_models if real else None,
                comfyui=self.comfyui if kind.world == "comfyui" else None,
                half_done=self.half_done if kind.world == "replaced" else None,
            )
            kind.harm(stage, chance, place)
            if kind.world != "server":
                stage.finish()
            if kind.world == "run":
                return stage.judge_run(self._run_file)
            return stage.judge(expected, frames_alone=kind.world == "lanes")

    def _expected(self, kind: Kind) -> Mapping[str, Sequence[bytes]]:
        if kind.world == "real" and "checkpoint" in kind.name:
            return self._swapped_files
        by_world = {"comfyui": "_comfyui_files", "real": "_real_files"}
        return getattr(self, by_world.get(kind.world, "_replaced_files"))

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
    def _comfyui_files(self) -> dict[str, list[bytes]]:
        return self._undisturbed("comfyui", self.models)

    @cached_property
    def named_models(self) -> Path:
        return named_models(self.folder / "named", self.workflow)

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
    def points(self) -> int:
        """Number of crash points in an undisturbed client."""
        with computing_replaced(), self._on_stage(KINDS[0]) as stage:
            return stage.count_points()

    @cached_property
    def _replaced_files(self) -> dict[str, list[bytes]]:
        with computing_replaced():
            return self._undisturbed("replaced", self.named_models)

    @cached_property
    def half_done(self) -> Path:
        """A batch's output folder without the last row."""
        with computing_replaced(), self._on_stage(_first_kind("replaced")) as stage:
            write_rows(stage.folder, *ROWS[:-1])
            assert stage.run() == 0, stage.stderr()
            return Path(shutil.copytree(stage.out, self.folder / "half_done"))

    @cached_property
    def _real_files(self) -> dict[str, list[bytes]]:
        return self._undisturbed("real", self.models)

    @cached_property
    def _swapped_files(self) -> dict[str, list[bytes]]:
        """Files from undisturbed runs, some with other weights in one expert file."""
        found = {name: list(contents) for name, contents in self._real_files.items()}
        others = self.other_models  # copied now, before a file is renamed in the original folder
        for file in sorted((self.models / "diffusion_models").glob("*t2v*fp8*")):
            kept = file.with_name(f"{file.name}.kept")
            file.rename(kept)
            shutil.copyfile(others / "diffusion_models" / file.name, file)
            for name, contents in self._undisturbed("real", self.models).items():
                found[name] += contents
            kept.replace(file)
        return found

    @cached_property
    def _run_file(self) -> bytes:
        with self._on_stage(_first_kind("run")) as stage:
            assert stage.run() == 0, stage.stderr()
            (made,) = stage.out.rglob("*.mp4")
            return made.read_bytes()

    def _undisturbed(self, world: str, models: Path) -> dict[str, list[bytes]]:
        with self._on_stage(_first_kind(world), models) as stage:
            assert stage.run() == 0, stage.stderr()
            made = {name: [content] for name, content in videos(stage.out).items()}
            assert len(made) == len(self._rows(world)), made.keys()
            for name in made:
                check_media(stage.out / name)
            return made

    @contextmanager
    def _on_stage(self, kind: Kind, models: Path | None = None) -> Iterator[Stage]:
        real = kind.world in _REAL
        models = models or (self.models if real else self.named_models)
        self._made += 1
        rows = [*self._rows(kind.world), *kind.rows]
        by_world = {"lanes": ["--share-weights", "3"], "server": ["--timeout", "60"]}
        more = by_world.get(kind.world, [])
        where = ["--models", str(models)]
        if kind.world == "comfyui":
            where = ["--server", self.comfyui.url, "--timeout", "300"]
        elif kind.world == "server":
            where = []  # added once the server is there
        stage = Stage(self.folder / f"stage{self._made}", self.workflow, rows, [*where, *more])
        if kind.world == "run":
            workflow = str(stage.folder / "workflow.json")
            stage.command = ["run", workflow, "--out", str(stage.out), *where]
        stage.done_code = kind.done_code
        try:
            yield stage
        finally:
            stage.clear()

    @staticmethod
    def _rows(world: str) -> tuple[dict[str, Any], ...]:
        return ROWS[:REAL_ROWS] if world in {"real", "comfyui"} else ROWS

    def _count(self, kind: Kind) -> int:
        return self.points if kind.cases is None else kind.cases
