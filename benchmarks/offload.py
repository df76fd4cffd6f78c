"""Compare all offloading strategies on two experts: separate processes with a cold page cache.

python benchmarks/offload.py prepare WORK   write the files of the case cpu, 23 GB;
                                            by default its runs write them
python benchmarks/offload.py cpu WORK       two experts of 2.8 GB, about 30 minutes
python benchmarks/offload.py cpu3gb WORK    the same inside 3 GB of RAM, about 15 minutes
python benchmarks/offload.py quick WORK     a small pair, about a minute, to check the programs
python benchmarks/offload.py gpu WORK PART  one part of the GPU case (see offload_case/gpu_case.py)
"""

from wanstream.benchmarks.offload_case.command import main

if __name__ == "__main__":
    main()
