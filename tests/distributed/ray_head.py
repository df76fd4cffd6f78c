"""A Ray on loopback that others join: prints its address, and ends with its standard input: `ray_head.py FOLDER`."""

from __future__ import annotations

import sys

from wanstream.distributed.ray_environment import import_ray, own_ray

ray = import_ray()
with own_ray():
    context = ray.init(
        address="local",
        num_cpus=1,
        num_gpus=0,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=sys.argv[1],
    )
sys.stdout.write(context.address_info["gcs_address"] + "\n")
sys.stdout.flush()
sys.stdin.read()
