"""A Ray on loopback that others join, with the environment's token: `ray_head.py FOLDER`.

Prints the address, and ends with standard input.
"""

import sys

from wanstream.distributed.ray.environment import import_ray, on_loopback, temporary_environment

ray = import_ray()
with temporary_environment({"RAY_USAGE_STATS_ENABLED": "0"}), on_loopback():
    size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
    off = dict.fromkeys(("include_dashboard", "log_to_driver", "configure_logging"), False)
    place = {"address": "local", "_node_ip_address": "127.0.0.1", "_temp_dir": sys.argv[1]}
    config = {"prestart_worker_first_driver": False}
    context = ray.init(**size, **off, **place, _system_config=config)
sys.stdout.write(context.address_info["gcs_address"] + "\n")
sys.stdout.flush()
sys.stdin.read()
