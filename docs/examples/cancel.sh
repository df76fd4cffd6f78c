#!/usr/bin/env bash
# Cancel jobs by their ids, those that wait and the one that runs. Other jobs go on.
#   cancel.sh ID ...
set -euo pipefail
. "$(dirname "$0")/comfy_http.sh"

for id in "$@"; do cancel_job "$id"; done
