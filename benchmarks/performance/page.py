"""The page: what is measured, what is simulated, and how both came about."""

from __future__ import annotations

from collections.abc import Mapping

from . import cpu_section
from .gpu_section import gpu_section
from .results import Result

HEAD = """# Performance

Made by `python benchmarks/performance_page.py` from the files in `benchmarks/results`; a change here is lost.
**Measured** is what a run took on the machine that is named beside it. **Simulated** is what WanStream's simulator says
(`wanstream plan` prints it for machines one does not own); it is called so wherever it stands. Ratios are between runs
of the same session, never between machines or days.
"""

TRAPS = """## What to watch for when comparing

* **An honest resident model.** `from_pretrained` maps files whose dtype is the wanted one: its weights are then in no
  RAM of their own, and pages can be dropped and read again at any time. The resident model here is loaded with
  `disable_mmap=True`; the mapped one is a row of its own.
* **A folder per expert.** diffusers' group offloading to disk names its files by module only and does not write over
  them: given one folder for both experts, the second runs with the weights of the first, silently. Here each has its
  own.
* **Alignment.** diffusers' block-level files put fp32 tensors at other addresses, where a matrix-vector
  product rounds differently in the last bit; with random weights that grows to 2 % of the latents. Its data are right.
* **The first use of a peer's own files.** Group offloading and `disk_offload` write the model once more (about 25 s for
  the CPU case); that is not in their times.
* **diffusers 0.39 asks for an accelerator also where it offloads on a CPU.** The benchmark answers "cpu" there; nothing
  else of any peer is changed.
* **Noise.** On a small virtual machine another process or its host can double a step. Processor time that went
  elsewhere is measured during each run; disturbed runs are made again and never enter a median where there are others.
* **What an allocator keeps.** A process that has loaded and freed large blocks keeps what its activations free; one
  that has not gives it back and takes it again page by page, some 5 % of a step here (one run of each). On a CPU
  WanStream asks glibc to keep up to 256 MB of it (`mallopt`, for the whole process); peers run with what their loading
  has left them. So that nothing of this counts as streaming, the resident model has a second row with the same setting.
* **Load times of large anonymous models** are partly the machine's own: a virtual machine that gives freed memory back
  to its host pays for touching it again. Compare steps first.
"""

SMALL = {
    "open-to-first-block": "from opening two 1 GB experts to the first block",
    "engine-overhead-cpu": "what the engine costs per visit",
    "file-reading": "reading blocks past the page cache and through it",
    "decode-on-arrival": "decoding fp8 and GGUF weights on arrival",
    "quantise-while-filling": "quantising to fp8 while RAM is filled",
    "chunked-forward": "a block with some tokens at a time",
    "lora-on-arrival-cpu": "adding a LoRA on arrival",
}


def page(results: Mapping[str, Result]) -> str:
    """docs/performance.md."""
    parts = [HEAD, *_cpu(results), gpu_section(results), TRAPS, _repeat(), _small(results)]
    return "\n".join(part for part in parts if part)


def figures(results: Mapping[str, Result]) -> dict[str, str]:
    """SVG files beside the page, by name."""
    titles = {
        "offload-cpu": "Two experts on a CPU, cold from disk",
        "offload-cpu3gb": "The same inside 3 GiB of RAM",
    }
    return {
        f"{case}.svg": cpu_section.figure(results[case], title) for case, title in titles.items() if case in results
    }


def _cpu(results: Mapping[str, Result]) -> list[str]:
    parts = []
    headings = {
        "offload-cpu": "## Two experts on a CPU, cold from disk (measured)",
        "offload-cpu3gb": "## The same inside 3 GiB of RAM (measured)",
    }
    for case, heading in headings.items():
        if case not in results:
            parts.append(
                f"{heading}\n\nNo result yet: `python benchmarks/offload.py {case.removeprefix('offload-')} WORK`.\n"
            )
            continue
        result = results[case]
        parts += [
            f"{heading}\n\n![{heading.strip('# ')}]({case}.svg)\n",
            cpu_section.run_table(result),
            f"Method: {result.method}\n\n{result.source}\n",
        ]
        if case == "offload-cpu":
            parts += ["### Weights moved in one step with guidance\n", cpu_section.bytes_table(result)]
        predicted = cpu_section.prediction_table(result)
        if predicted:
            parts += ["### Simulated before, measured after\n", predicted]
    return parts


def _repeat() -> str:
    return """## To repeat it

```
python benchmarks/offload.py quick WORK      # does everything work? about a minute
python benchmarks/offload.py cpu WORK        # 30 minutes; goes on where it was stopped
python benchmarks/offload.py cpu3gb WORK     # needs the right to make a memory control group
python benchmarks/offload.py gpu WORK smoke  # the parts of the GPU case are listed in offload_case/gpu_case.py
python benchmarks/performance_page.py
```
"""


def _small(results: Mapping[str, Result]) -> str:
    lines = [f"* {text}: `{results[case].file}`" for case, text in SMALL.items() if case in results]
    return "## Smaller measurements\n\n" + "\n".join(lines) + "\n" if lines else ""
