"""Options of every command, as dataclasses from which the parsers are made."""

# ruff: noqa: RUF009 - option, optional and switch return a new field at every call

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

Options = TypeVar("Options")


def option(usage: str, help: str, *, default: Any = MISSING, **settings: Any) -> Any:
    """Return the dataclass field for an option like "--out DIR", or a positional argument "DIR".

    Without a `default`, an option is required. `settings` are passed to
    `ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"usage": usage, "help": help, **settings})


def optional(usage: str, help: str, **settings: Any) -> Any:
    """Return the dataclass field for an option that is None unless it is given."""
    return option(usage, help, default=None, **settings)


def switch(flag: str, help: str) -> Any:
    """Return the dataclass field for an option without a value: True if it is given."""
    return option(flag, help, default=False, action="store_true")


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the options in the dataclass `kind` to a parser.

    The dataclass keeps the defaults. A field without a flag holds another dataclass with options.
    """
    # `field.type` is a string here, because annotations are not evaluated.
    types = get_type_hints(kind)
    for each in fields(kind):
        settings = dict(each.metadata)
        if not settings:
            add_options(parser, types[each.name])
            continue
        flag, _, metavar = settings.pop("usage").partition(" ")
        if types[each.name] is not bool:
            # The type of one value: without None, or of an element.
            settings.setdefault("type", (get_args(types[each.name]) or (types[each.name],))[0])
        if metavar:
            settings["metavar"] = metavar
        if flag.startswith("--"):
            settings |= {"dest": each.name, "required": each.default is MISSING}
        else:
            settings["metavar"] = flag
            flag = each.name
        # Suppressed, so that `parsed_options` sees only given options.
        default: str | None = argparse.SUPPRESS
        if settings.get("nargs") == "?":
            default = None  # argparse would convert the other one as if it were given
        parser.add_argument(flag, default=default, **settings)


def parsed_options(kind: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the dataclass `kind` with the given values. Lists become tuples."""
    types = get_type_hints(kind)
    given: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if not each.metadata:
            given[each.name] = parsed_options(types[each.name], parsed)
        # `add_options` suppresses defaults, so the name is missing if the option was not given.
        elif each.name in parsed:
            value = getattr(parsed, each.name)
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too small: give 1 or more")
    return count


_FILES = (".csv", ".jsonl", ".ndjson", ".json")


def _cluster_entry(text: str) -> str:
    if text.lower().endswith(_FILES):  # otherwise the error is that JOBS is missing
        raise argparse.ArgumentTypeError(
            f"{text} is a file, and not an entry of clusters.json; JOBS comes before --ray: "
            "wanstream batch JOBS --ray"
        )
    return text


_DEVICES = "compute device: cpu, cuda, xpu or mps, or one of several such as cuda:1"


def _device(help: str) -> Any:
    return optional("--device NAME", help)


_STRICT = (
    "fail on suspicious inputs: experts or LoRAs that seem swapped, one file as both experts, a "
    "LoRA for another kind of model (default: a warning)"
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `wanstream run`."""

    workflow: Path = option(
        "workflow", "a file from workflows/api, or Workflow > Export (API) in ComfyUI"
    )
    output: Path = option("--out DIR", "folder for the output files")
    models: Path = option(
        "--models DIR",
        "folder with the layout of ComfyUI's models folder (default: models)",
        default=Path("models"),
    )
    input: Path = option(
        "--input DIR", "folder for LoadImage and LoadVideo (default: input)", default=Path("input")
    )
    overrides: tuple[str, ...] = option(
        "--set NODE.INPUT=VALUE",
        "override an input; NODE is a node's id, or its class if only one node has it; may be "
        "repeated",
        action="append",
        default=(),
    )
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    strict: bool = switch("--strict", _STRICT)


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Ray actors for a batch's rows."""

    ray: str | None = optional(
        "--ray ENTRY",
        "run rows at the same time, one on each GPU of this machine, or of the Ray cluster of "
        "an entry of clusters.json; JOBS comes before it",
        nargs="?",
        const="local",
        type=_cluster_entry,
    )
    workers: int | None = optional(
        "--workers N",
        "with --ray: use N GPUs (default: all); with --device cpu: N processes",
        type=_count,
    )


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Folders and device for rows without a server."""

    models: Path = option(
        "--models DIR", "without --server: as for `wanstream run`", default=Path("models")
    )
    input: Path = option(
        "--input DIR", "without --server: folder for LoadImage and LoadVideo", default=Path("input")
    )
    device: str | None = _device(f"without --server: {_DEVICES}")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of `wanstream batch`."""

    jobs: Path = option(
        "JOBS",
        'a .csv file with columns node.input, or JSON lines {"node.input": value}; the column '
        "`name` sets the names of the output files",
    )
    workflow: Path = option("--workflow FILE", "workflow in API format")
    output: Path = option("--out DIR", "output folder of this batch alone")
    servers: tuple[str, ...] = option(
        "--server URL",
        "address of a ComfyUI server, like http://127.0.0.1:8188; may be repeated: rows go to "
        "any server that is free (default: run here)",
        action="append",
        default=(),
    )
    actors: ActorOptions = field(default_factory=ActorOptions)
    local: LocalOptions = field(default_factory=LocalOptions)
    journal: Path | None = optional(
        "--journal FILE", "journal file (default: journal.sqlite in the folder of --out)"
    )
    max_failures: int | None = optional(
        "--max-failures N", "start no more rows after N failures", type=_count
    )
    timeout_s: float = option(
        "--timeout SECONDS",
        "give up when no server, or actor, has responded for this long (default: 600)",
        default=600.0,
    )
    share_weights: int = option(
        "--share-weights N",
        "run up to N rows together, so that weights are read once for all: same videos, more "
        "device memory",
        type=_count,
        default=1,
    )
    dry_run: bool = switch("--dry-run", "validate all rows; queue and write nothing")
    strict: bool = switch("--strict", _STRICT)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of `wanstream make-test-model`."""

    folder: Path = option("DIR", "the models folder to create")
    workflows: tuple[Path, ...] = option(
        "--workflow WORKFLOW",
        "write only the files that these API workflows name; if one is missing, those that "
        "DIR has are written again, too (default: all files)",
        nargs="+",
        default=(),
    )


@dataclass(frozen=True, kw_only=True)
class QuantiseOptions:
    """Options of `wanstream quantise`."""

    experts: tuple[Path, ...] = option(
        "EXPERT", "files or diffusers transformer folders, such as HIGH and LOW", nargs="+"
    )
    to: str = option(
        "--to", "format (default: int8_convrot)", default="int8_convrot", choices=["int8_convrot"]
    )
    out: Path | None = optional("--out DIR", "folder for the files (default: that of each)")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `wanstream probe`."""

    models: Path | None = optional(
        "--models DIR", "a file or a folder of weights on the disk to measure"
    )
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    size: str = option(
        "--size WxHxF",
        "video size for the measured block (default: 832x480x81); fewer tokens if that takes "
        "too long",
        default="832x480x81",
    )
    json: bool = switch("--json", "print JSON")


@dataclass(frozen=True, kw_only=True)
class SelftestOptions:
    """Options of `wanstream selftest`."""

    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    models: Path | None = optional(
        "--models DIR", "a file or a folder of weights on the disk to measure"
    )
    output: Path = option(
        "--out DIR", "folder for the JSON file (default: the current one)", default=Path()
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Machine in a plan.

    RAM is given in units of 2^30 bytes, as it is sold. All other GB are 10^9 bytes.
    """

    gpu: str = option(
        "--gpu NAME",
        'for example "RTX 4060 Ti 16GB"; "this" for this machine; or a .json file of '
        "`selftest` or `probe --json`",
    )
    ram_gb: float | None = optional("--ram GB", "total RAM of the machine")
    ssd_gb_s: float | None = optional(
        "--ssd GB/S", "sequential read speed of its disk for a large file"
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    """Measurement of this machine for a plan."""

    models: Path | None = optional("--models DIR", "with --gpu this: folder of the weights")
    device: str | None = _device(f"with --gpu this: {_DEVICES}")


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Workers in a plan, and their videos."""

    workers: int | None = optional("--workers N", "choose layouts for N of these GPUs")
    gpus_per_node: int = option(
        "--gpus-per-node N", "with --workers: GPUs per machine (default: 8)", default=8
    )
    videos: int = option(
        "--videos N", "with --workers: number of videos (default: 100)", default=100
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `wanstream plan`."""

    machine: MachineOptions
    size: str = option("--size WxHxF", "video size, for example 1280x720x81; of an image 1024x1024")
    file: Path | None = optional(
        "FILE",
        "any diffusion model in a safetensors or GGUF file, in place of --model",
        nargs="?",
    )
    tokens: int | None = optional(
        "--tokens N",
        "with FILE: tokens of a lane (default: one for each 16 x 16 pixels and 4 frames)",
        type=_count,
    )
    model: str = option(
        "--model", "Wan2.2 model (default: a14b)", choices=["a14b", "5b"], default="a14b"
    )
    steps: int = option("--steps", "steps of both experts together (default: 20)", default=20)
    switch_step: int | None = optional(
        "--switch-step STEP", "first step of the low-noise expert (default: half)"
    )
    cfg: str = option(
        "--cfg",
        "experts with guidance, which compute two lanes (default: both)",
        choices=["both", "high", "none"],
        default="both",
    )
    storage: str = option(
        "--storage",
        "format of the weights in RAM: fp8 and int8 ConvRot are quantised from a bf16 file, "
        "int8 is multiplied as it is; Q are GGUF files (default: bf16)",
        choices=["bf16", "fp8", "int8 ConvRot", "Q8_0", "Q5_K", "Q4_K"],
        default="bf16",
    )
    vram_gb: float | None = optional("--vram GB", "maximum device memory of the run")
    measured: MeasuredOptions = field(default_factory=MeasuredOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    compare: bool = switch(
        "--compare", "also predict fp8, int8 ConvRot, and several videos per run"
    )
    json: bool = switch("--json", "print JSON")


@dataclass(frozen=True, kw_only=True)
class BenchRunOptions:
    """Measured runs in a benchmark."""

    policies: str = option(
        "--policies WORDS", "layerwise, block_swap N, resident", default="layerwise"
    )
    steps: str = option("--steps N,N", "numbers of steps (default: 10,20)", default="10,20")
    size: str = option(
        "--size WxHxF",
        "video size (default: 832x480x81, 128x128x17 with random experts)",
        default="",
    )
    videos: int = option("--videos N", "videos per request (default: 1)", default=1)
    guidance: float = option(
        "--guidance", "CFG scale; 1: one lane per video (default: 4)", default=4.0
    )


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Repetitions of each benchmark run."""

    repeats: int = option("--repeats N", "measured runs (default: 3)", default=3)
    warmup: int = option("--warmup N", "warm-up runs before them (default: 1)", default=1)
    cooldown_s: float = option(
        "--cooldown SECONDS", "pause before each run (default: 0)", default=0.0
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `wanstream bench`."""

    distributed: bool = switch("--distributed", "use workers (needs Ray); default: this process")
    workers: str = option(
        "--workers N,N",
        "numbers of workers (default: 1,2,4,8 up to the number of GPUs)",
        default="",
    )
    layouts: str = option(
        "--layouts WORDS",
        'for example "cfg 2, data 2, cfg 2 x ulysses 2" (default: common layouts for each number)',
        default="",
    )
    runs: BenchRunOptions = field(default_factory=BenchRunOptions)
    trials: TrialOptions = field(default_factory=TrialOptions)
    experts: tuple[Path, ...] = option(
        "--experts PATH", "high-noise and low-noise, or one pipeline", nargs="+", default=()
    )
    cluster: str = option(
        "--cluster NAME", "local, or an entry of clusters.json (default: local)", default="local"
    )
    threads: int = option("--threads N", "CPU threads per worker (on a CPU: 1)", default=0)
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    output: Path = option("--out DIR", "folder of both files")
