"""Options of every command, as dataclasses from which the parsers are made."""

# ruff: noqa: RUF009 - option and switch return a new field at every call

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

Options = TypeVar("Options")


def option(flag: str, *, default: Any = MISSING, **settings: Any) -> Any:
    """Return the dataclass field of an option, required without a `default`, or of a positional argument.

    `settings` are those of `ArgumentParser.add_argument`.
    """
    if flag.startswith("--"):
        settings["required"] = default is MISSING
    return field(default=default, metadata={"flag": flag, **settings})


def switch(flag: str, *, help: str) -> Any:
    """Return the dataclass field of an option without a value: True if it is given."""
    return field(default=False, metadata={"flag": flag, "action": "store_true", "help": help})


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the options of the dataclass `kind` to a parser; the defaults stay those of the dataclass."""
    types = get_type_hints(kind)
    for each in fields(kind):
        settings = dict(each.metadata)
        flag = settings.pop("flag")
        if flag.startswith("--"):
            settings["dest"] = each.name
        if types[each.name] is not bool:
            settings.setdefault("type", (get_args(types[each.name]) or (types[each.name],))[0])
        parser.add_argument(flag, default=argparse.SUPPRESS, **settings)


def parsed_options(kind: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the dataclass `kind` with the values that were given; lists become tuples."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(parsed).items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too small: give 1 or more")
    return count


_FILES = (".csv", ".jsonl", ".ndjson", ".json")


def _cluster_entry(text: str) -> str:
    if text.lower().endswith(_FILES):  # otherwise the error is that JOBS is missing
        raise argparse.ArgumentTypeError(
            f"{text} is a file, and not an entry of clusters.json; JOBS comes before --ray: wanstream batch JOBS --ray"
        )
    return text


_DEVICES = "compute device: cpu, cuda, xpu or mps, or one of several such as cuda:1"


def _device(help: str) -> Any:
    return option("--device", metavar="NAME", default=None, help=help)


_STRICT = (
    "fail on suspicious inputs: experts or LoRAs that seem swapped, one file as both experts, a LoRA for another kind "
    "of model (default: a warning)"
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `wanstream run`."""

    workflow: Path = option("workflow", help="a file from workflows/api, or Workflow > Export (API) in ComfyUI")
    output: Path = option("--out", metavar="DIR", help="folder for the output files")
    models: Path = option(
        "--models",
        default=Path("models"),
        metavar="DIR",
        help="folder with the layout of ComfyUI's models folder (default: models)",
    )
    input: Path = option(
        "--input", default=Path("input"), metavar="DIR", help="folder for LoadImage and LoadVideo (default: input)"
    )
    overrides: tuple[str, ...] = option(
        "--set",
        action="append",
        default=(),
        metavar="NODE.INPUT=VALUE",
        help="override an input; NODE is a node's id, or its class if only one node has it; may be repeated",
    )
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    strict: bool = switch("--strict", help=_STRICT)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of `wanstream batch`."""

    jobs: Path = option(
        "jobs",
        metavar="JOBS",
        help='a .csv file with columns node.input, or JSON lines {"node.input": value}; the column `name` sets the '
        "names of the output files",
    )
    workflow: Path = option("--workflow", metavar="FILE", help="workflow in API format")
    output: Path = option("--out", metavar="DIR", help="output folder of this batch alone")
    servers: tuple[str, ...] = option(
        "--server",
        action="append",
        default=(),
        metavar="URL",
        help="address of a ComfyUI server, like http://127.0.0.1:8188; may be repeated: rows go to any server that is "
        "free (default: run here)",
    )
    ray: str | None = option(
        "--ray",
        nargs="?",
        const="local",
        type=_cluster_entry,
        default=None,
        metavar="ENTRY",
        help="run rows at the same time, one on each GPU of this machine, or of the Ray cluster of an entry of "
        "clusters.json; JOBS comes before it",
    )
    workers: int | None = option(
        "--workers",
        type=_count,
        default=None,
        metavar="N",
        help="with --ray: use N GPUs (default: all); with --device cpu: N processes",
    )
    models: Path = option(
        "--models", default=Path("models"), metavar="DIR", help="without --server: as for `wanstream run`"
    )
    input: Path = option(
        "--input", default=Path("input"), metavar="DIR", help="without --server: folder for LoadImage and LoadVideo"
    )
    device: str | None = _device(f"without --server: {_DEVICES}")
    journal: Path | None = option(
        "--journal", default=None, metavar="FILE", help="journal file (default: journal.sqlite in the folder of --out)"
    )
    max_failures: int | None = option(
        "--max-failures", type=_count, default=None, metavar="N", help="start no more rows after N failures"
    )
    timeout_s: float = option(
        "--timeout",
        default=600.0,
        metavar="SECONDS",
        help="give up when no server, or actor, has responded for this long (default: 600)",
    )
    share_weights: int = option(
        "--share-weights",
        type=_count,
        default=1,
        metavar="N",
        help="run up to N rows together, so that weights are read once for all: same videos, more device memory",
    )
    dry_run: bool = switch("--dry-run", help="validate all rows; queue and write nothing")
    strict: bool = switch("--strict", help=_STRICT)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of `wanstream make-test-model`."""

    folder: Path = option("folder", metavar="DIR", help="the models folder to create")
    workflows: tuple[Path, ...] = option(
        "--workflow",
        nargs="+",
        default=(),
        metavar="WORKFLOW",
        help="write only the files that these API workflows name; if one is missing, those that DIR has are written "
        "again, too (default: all files)",
    )


@dataclass(frozen=True, kw_only=True)
class QuantiseOptions:
    """Options of `wanstream quantise`."""

    experts: tuple[Path, ...] = option(
        "experts", nargs="+", metavar="EXPERT", help="files or diffusers transformer folders, such as HIGH and LOW"
    )
    to: str = option("--to", default="int8_convrot", choices=["int8_convrot"], help="format (default: int8_convrot)")
    out: Path | None = option("--out", default=None, metavar="DIR", help="folder for the files (default: that of each)")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `wanstream probe`."""

    models: Path | None = option(
        "--models", default=None, metavar="DIR", help="a file or a folder of weights on the disk to measure"
    )
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    size: str = option(
        "--size",
        default="832x480x81",
        metavar="WxHxF",
        help="video size for the measured block (default: 832x480x81); fewer tokens if that takes too long",
    )
    json: bool = switch("--json", help="print JSON")


@dataclass(frozen=True, kw_only=True)
class SelftestOptions:
    """Options of `wanstream selftest`."""

    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    models: Path | None = option(
        "--models", default=None, metavar="DIR", help="a file or a folder of weights on the disk to measure"
    )
    output: Path = option(
        "--out", default=Path(), metavar="DIR", help="folder for the JSON file (default: the current one)"
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `wanstream plan`. RAM is given in units of 2^30 bytes, as it is sold; all other GB are 10^9 bytes."""

    gpu: str = option(
        "--gpu",
        metavar="NAME",
        help='for example "RTX 4060 Ti 16GB"; "this" for this machine; or a .json file of `selftest` or `probe --json`',
    )
    ram_gb: float | None = option("--ram", default=None, metavar="GB", help="total RAM of the machine")
    ssd_gb_s: float | None = option(
        "--ssd", default=None, metavar="GB/S", help="sequential read speed of its disk for a large file"
    )
    size: str = option("--size", metavar="WxHxF", help="video size, for example 1280x720x81")
    model: str = option("--model", choices=["a14b", "5b"], default="a14b", help="Wan2.2 model (default: a14b)")
    steps: int = option("--steps", default=20, help="steps of both experts together (default: 20)")
    switch_step: int | None = option(
        "--switch-step", default=None, metavar="STEP", help="first step of the low-noise expert (default: half)"
    )
    cfg: str = option(
        "--cfg",
        choices=["both", "high", "none"],
        default="both",
        help="experts with guidance, which compute two lanes (default: both)",
    )
    storage: str = option(
        "--storage",
        choices=["bf16", "fp8", "int8 ConvRot", "Q8_0", "Q5_K", "Q4_K"],
        default="bf16",
        help="format of the weights in RAM: fp8 and int8 ConvRot are quantised from a bf16 file, int8 is multiplied "
        "as it is; Q are GGUF files (default: bf16)",
    )
    vram_gb: float | None = option("--vram", default=None, metavar="GB", help="maximum device memory of the run")
    models: Path | None = option("--models", default=None, metavar="DIR", help="with --gpu this: folder of the weights")
    device: str | None = _device(f"with --gpu this: {_DEVICES}")
    workers: int | None = option("--workers", default=None, metavar="N", help="choose layouts for N of these GPUs")
    gpus_per_node: int = option(
        "--gpus-per-node", default=8, metavar="N", help="with --workers: GPUs per machine (default: 8)"
    )
    videos: int = option("--videos", default=100, metavar="N", help="with --workers: number of videos (default: 100)")
    compare: bool = switch("--compare", help="also predict fp8, int8 ConvRot, and several videos per run")
    json: bool = switch("--json", help="print JSON")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `wanstream bench`."""

    distributed: bool = switch("--distributed", help="use workers (needs Ray); default: this process")
    workers: str = option(
        "--workers", default="", metavar="N,N", help="numbers of workers (default: 1,2,4,8 up to the number of GPUs)"
    )
    layouts: str = option(
        "--layouts",
        default="",
        metavar="WORDS",
        help='for example "cfg 2, data 2, cfg 2 x ulysses 2" (default: common layouts for each number)',
    )
    policies: str = option("--policies", default="layerwise", metavar="WORDS", help="layerwise, block_swap N, resident")
    steps: str = option("--steps", default="10,20", metavar="N,N", help="numbers of steps (default: 10,20)")
    size: str = option(
        "--size", default="", metavar="WxHxF", help="video size (default: 832x480x81, 128x128x17 with random experts)"
    )
    videos: int = option("--videos", default=1, metavar="N", help="videos per request (default: 1)")
    guidance: float = option("--guidance", default=4.0, help="CFG scale; 1: one lane per video (default: 4)")
    repeats: int = option("--repeats", default=3, metavar="N", help="measured runs (default: 3)")
    warmup: int = option("--warmup", default=1, metavar="N", help="warm-up runs before them (default: 1)")
    cooldown_s: float = option("--cooldown", default=0.0, metavar="SECONDS", help="pause before each run (default: 0)")
    experts: tuple[Path, ...] = option(
        "--experts", nargs="+", default=(), metavar="PATH", help="high-noise and low-noise, or one pipeline"
    )
    cluster: str = option(
        "--cluster", default="local", metavar="NAME", help="local, or an entry of clusters.json (default: local)"
    )
    threads: int = option("--threads", default=0, metavar="N", help="CPU threads per worker (on a CPU: 1)")
    device: str | None = _device(f"{_DEVICES} (default: a GPU if there is one)")
    output: Path = option("--out", metavar="DIR", help="folder of both files")
