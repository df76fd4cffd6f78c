"""Two experts, the same inputs, every way to offload their weights: each run in a process of its own, cold from disk.

python benchmarks/offload.py prepare WORK   writes the files of the case cpu, 23 GB; otherwise its runs do
python benchmarks/offload.py cpu WORK       two experts of 2.8 GB, about 30 minutes
python benchmarks/offload.py cpu3gb WORK    the same inside 3 GB of RAM, about 15 minutes
python benchmarks/offload.py quick WORK     a small pair, about a minute: whether the programs work
python benchmarks/offload.py gpu WORK PART  one part of the GPU case (see offload_case/gpu_case.py)
"""

from __future__ import annotations

from wanstream.benchmarks.offload_case.command import main

if __name__ == "__main__":
    main()
