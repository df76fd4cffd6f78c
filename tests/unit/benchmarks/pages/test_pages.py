"""Table rows and sentences in pages have the rounded figures from the results."""

from pathlib import Path

import pytest

from wanstream.benchmarks.record import newest_results

ROOT = Path(__file__).parents[4]
RESULTS = newest_results(ROOT / "benchmarks" / "results")
ENCODERS = (
    "checkpoint with UMT5 and VAE", "umt5", "qwen3-vl, 36 layers", "gemma3, 48 layers",
)  # fmt: skip
VIDEOS = ("480p17", "480p33", "480p81")


def cells(figure: str, digits: int, keys: tuple[str, ...] = VIDEOS) -> str:
    """Return a template for one cell per key, at `%s` in the path to a figure."""
    return " | ".join(f"{{0{figure % key}:.{digits}f}}" for key in keys)


def decoded(name: str) -> str:
    figures = f"{{0[{name}][torch_ms]:.2f}} | {{0[{name}][kernel_ms]:.3f}}"
    return f"| {name} | {figures} | {{0[{name}][kernel_gb_per_s]:,.0f}} |"


def errors(row: str, name: str, multiplied: str = "") -> str:
    other = f"{{0[{multiplied}][latent_percent]:.1f}} %" if multiplied else ""
    return f"| {row} | {{0[{name}][latent_percent]:.1f}} % | {other}".rstrip() + " |"


def quantised(name: str, last: str = "{0[480p81][%s][resident][median_step_s]:.3f}") -> str:
    times = cells(f"[480p17][{name}][%s][median_step_s]", 3, ("resident", "streamed"))
    whole = last.replace("%s", name)
    peak = f"{{0[480p17][{name}][resident][device_peak_gb]:.1f}} GB"
    return f"| {name} | {times} | {whole} | {peak} |".replace("|  |", "| |")


def beside(place: str, *names: str) -> str:
    """Return a template for the step time and the memory peak of each of these runs."""
    run = f"{{0[{place}][%s][median_step_s]:.2f}} s, {{0[{place}][%s][device_peak_gb]:.1f}} GB"
    return " | ".join(run.replace("%s", name) for name in names)


def step_s(name: str) -> str:
    return f"{{0[sets][{name}][median_step_s]:.3f}}"


def distance(name: str, digits: int = 2) -> str:
    return f"{{0[sets][{name}][distance_to_exact]:.{digits}%}}"


def visit(kind: str) -> str:
    return f"{{0[visit][{kind}_ms]}} | {{0[visit][at_the_limits][{kind}_ms]}} |"


LOADER = "{0[queue_items][%d][between_progress_events_s][k1][1]:.2f}"
LOADER_GB = "{0[queue_items][%d][device_used_gb]:.1f} GB"

QUOTED: dict[tuple[str, str], list[str]] = {
    ("README", "kernels-gpu"): [
        f"| {beside(f'runs][480p{frames}', 'resident', 'streamed')} | H100, {frames}"
        for frames in (81, 17)
    ],
    ("README", "offload-gpu"): [
        f"| {beside('parts][480p17][variants', 'group-block-record', 'pinned')} | H100, 17"
    ],
    ("README", "native-gpu"): [
        f"| {LOADER % 0} s, {LOADER_GB % 0} | {LOADER % 1} s, {LOADER_GB % 1} | H100, 17"
    ],
    ("performance", "native-gpu"): [
        f"| about {LOADER % 0} | {LOADER_GB % 0} |",
        f"layerwise from RAM | {LOADER % 1} | {LOADER_GB % 1} |",
    ],
    ("performance", "kernels-gpu"): [
        f"| resident, s/step | {cells('[runs][%s][resident][median_step_s]', 3)} |",
        f"| streamed from RAM, s/step | {cells('[runs][%s][streamed][median_step_s]', 3)} |",
        f"| streamed / resident | {cells('[runs][%s][streamed][to_resident]', 3)} |",
        f"| device peak, streamed, GB | {cells('[runs][%s][streamed][device_peak_gb]', 2)} |",
        "Filling {0[runs][480p17][streamed][pinned_gb]:.1f} GB of page-locked RAM from tmpfs took "
        "{0[runs][480p17][streamed][warm_up_s]:.1f} s",
    ],
    ("performance", "offload-gpu"): [
        "| resident before, s/step | "
        f"{cells('[parts][%s][variants][wanstream-resident][median_step_s]', 3)} |",
        f"| streamed before, s/step | {cells('[parts][%s][variants][pinned][median_step_s]', 3)} |",
        f"| device peak before, GB | {cells('[parts][%s][variants][pinned][device_peak_gb]', 2)} |",
    ],
    ("performance-diffusers", "offload-gpu"): [
        "{0[parts][480p17][variants][pinned][pinned_gb]:.1f} GB, took "
        "{0[parts][480p17][variants][pinned][warm_s]:.1f} s with the first two steps"
    ],
    ("performance-kernels", "offload-gpu"): [
        "| {0[limits][host_to_device_gb_per_s]}, {0[limits][device_to_host_gb_per_s]} GB/s |",
        "| {0[limits][pageable_to_device_gb_per_s]} GB/s |",
        "| {0[limits][device_copy_read_and_written_gb_per_s]:,} GB/s |",
        "| {0[limits][bf16_product_tflops][0]}, {0[limits][bf16_product_tflops][1]} TFLOP/s |",
        "| {0[limits][int8_product_tops][0]}, {0[limits][int8_product_tops][1]} TOP/s |",
        "| {0[limits][page_locking_gb_per_s]} GB/s |",
        f"| matrix products (10) | {visit('products')}",
        f"| attention (2) | {visit('attention')}",
        f"({{0[visit][rest_launches]}} launches, nearly all in fp32) | {visit('rest')}",
        f"| sum | {visit('sum')}",
        "take {0[visit][fp8_products_ms]:.1f} ms per visit in place of "
        "{0[visit][products_ms]:.1f}, but quantising the tokens in separate passes takes "
        "{0[visit][fp8_quantising_ms]} ms.",
    ],
    ("performance-kernels", "kernels-gpu"): [
        f"| bf16, `kernels` `exact` | {step_s('exact 17')} | {step_s('exact 81')} | |",
        f"| `torch` | {step_s('torch 17')} | | {distance('torch 17')} |",
        f"| `comfy-kitchen` 0.2.40 | {step_s('comfy-kitchen 17')} | | "
        f"{distance('comfy-kitchen 17')} |",
        f"| `triton` | {step_s('triton 17')} | {step_s('triton 81')} | {distance('triton 17')} |",
        f"| `triton`, streamed | {step_s('triton 17 streamed')} |",
        f"| fp8 in RAM, decoded, streamed | {step_s('fp8 decoded 17 streamed')} | "
        f"{step_s('fp8 decoded 81 streamed')} | {distance('fp8 decoded 17 streamed', 1)} |",
        f"| fp8, multiplied as stored | {step_s('fp8 multiplied triton 17')} | "
        f"{step_s('fp8 multiplied triton 81')} | {distance('fp8 multiplied triton 17', 1)} |",
        f"| int8 ConvRot, multiplied by comfy-kitchen | {step_s('int8 multiplied triton 17')} | | "
        f"{distance('int8 multiplied triton 17', 1)} |",
        "{0[attention][0][TF]:.0f} TFLOP/s at 7,800 tokens. flash reaches "
        "{0[attention][2][TF]:.0f}, comfy-kitchen's int8 {0[attention][3][TF]:.0f}.",
        "{0[fp8_accumulation][3][error_of_sums]:.2%} from fp32 sums instead of "
        "{0[fp8_accumulation][2][error_of_sums]:.2%}.",
    ],
    ("performance-kernels", "arithmetic-gpu"): [
        quantised("bf16"),
        quantised("fp8, decoded", last=""),
        quantised("fp8, multiplied as stored"),
        quantised("int8 ConvRot, multiplied as stored, without comfy-kitchen"),
    ],
    ("number-formats", "decode-gpu"): [
        *map(decoded, ("fp8 cast", "fp8 rows", "mxfp8", "nvfp4", "int8")),
        *map(decoded, ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K")),
    ],
    ("number-formats", "number-formats"): [
        errors("bf16", "bf16"),
        errors("int8, a scale for each row", "int8 rows", "int8 rows, in int8"),
        errors("int8 ConvRot", "int8 ConvRot", "int8 ConvRot, in int8"),
        errors("int8 ConvRot, quantised while a bf16 file is read", "int8 ConvRot in RAM"),
        errors("fp8_scaled", "fp8_scaled", "fp8_scaled, in fp8"),
        errors("fp8, quantised while a bf16 file is read", "fp8 in RAM"),
        errors("mxfp8", "mxfp8"),
        errors("nvfp4", "nvfp4"),
    ],
    ("native-models", "native-visit"): [
        "{0[microseconds_per_block][resident visit][median]:.0f} us for a resident block and "
        "{0[microseconds_per_block][streamed visit][median]:.0f} us for a block from RAM, and a "
        "plain call {0[microseconds_per_block][plain call][median]:.1f} us"
    ],
    ("native-text-encoders", "checkpoint-memory"): [
        "a {0[file_mb][checkpoint]} MB checkpoint and two steps | "
        "{0[anonymous_mib][checkpoint: streamed][peak]} MiB | "
        "{0[anonymous_mib][checkpoint: ComfyUI's loader and Stream Model][peak]} MiB with",
        *(
            f"{{0[anonymous_mib][{name}: streamed][peak]}} MiB, afterwards "
            f"{{0[anonymous_mib][{name}: streamed][afterwards]}} MiB | "
            f"{{0[anonymous_mib][{name}: ComfyUI's loader][peak]}} MiB, afterwards "
            f"{{0[anonymous_mib][{name}: ComfyUI's loader][afterwards]}} MiB with"
            for name in ENCODERS
        ),
    ],
    ("native-experts", "joined-experts"): [
        "{0[one sampler][switch_step_of_median]:.2f} times the median step",
        "with two samplers {0[two samplers][switch_step_of_median]:.2f}",
    ],
    ("batch-servers", "fleet"): [
        "made {0[real][two_servers_to_one]} times the rows per minute of one",
        "busy for {0[simulated][4][share_of_ideal]:.0%} of the time, at "
        "{0[simulated][4][client_cpu_ms_per_row]:.0f} ms of CPU per row, and 4 servers for "
        "{0[simulated][0][share_of_ideal]:.0%}.",
    ],
    ("workers-measured", "fleet-actors"): [
        "made {0[real][two_actors_to_one]} times as many rows",
        "idle for {0[queue][shared folder, window 1][idle_s_per_row]:.1f} s",
        "idle for {0[queue][shared folder, window 2][idle_s_per_row]:.1f} s",
    ],
    ("workers-measured", "cancel"): [
        *(
            f"| {workers} | {{0[layouts][{number}][seconds][median]:.2f}} |"
            for number, workers in enumerate(("one", "two, `cfg`", "two, `ulysses`", "four"))
        ),
        "took {0[layouts][3][seconds][max]:.2f} s, at a load average from "
        "{0[layouts][0][load_average][0]} to {0[layouts][3][load_average][1]}.",
    ],
    ("workers-measured", "driver-bytes"): [
        "{0[counted][before][bytes_per_step]:,} bytes a step",
        "and {0[counted][after][bytes_per_step]:,} (a ninth)",
    ],
    ("workers-measured", "worker-network"): [
        "{0[runs][0][before][exchanges_s]:.1f} s and {0[runs][0][after][exchanges_s]:.1f} s | "
        "{0[runs][0][before][wall_s]:.1f} s, of them {0[runs][0][before][votes_s]:.1f} s for "
        "{0[runs][0][before][votes]} votes | {0[runs][0][after][wall_s]:.1f} s, of them "
        "{0[runs][0][after][votes_s]:.1f} s for {0[runs][0][after][votes]} votes"
    ],
    ("performance-steps", "ram-filling"): [
        "| {0[now][gb_per_s]:.1f} GB/s, {0[ratio, median of the pairs]:.1f} times one block at",
        "{0[now][read_and_lock_at_once_s]:.3f} of {0[now][lock_s]:.3f} s of locking behind reads",
    ],
    ("performance-steps", "open-to-first-block"): [
        "cold page cache | {0[cache_dropped][total_s]:.2f} s"
    ],
    ("performance-steps", "engine-overhead-cpu"): [
        "| {0[microseconds_per_visit][median]:.0f} us |"
    ],
    ("timeline", "measuring-cost-cpu"): [
        "took {0[through the page cache][measuring_percent_of_wall][median]:.2f} %,\n"
        "at most {0[through the page cache][measuring_percent_of_wall][max]:.2f} %"
    ],
}


@pytest.mark.parametrize(("page", "case"), QUOTED)
def test_page_has_the_figures_of_the_result(page, case):
    folder = ROOT if page == "README" else ROOT / "docs"
    text = " ".join((folder / f"{page}.md").read_text(encoding="utf-8").split())
    figures = RESULTS[case].figures
    for template in QUOTED[page, case]:
        expected = template.format(figures).replace("%", " %").replace("  %", " %")
        assert " ".join(expected.split()) in text
