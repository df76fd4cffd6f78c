#!/usr/bin/env bash
# One video: queue a workflow, wait for it, fetch its file, and say what each step took.
#   one_job.sh workflows/api/t2v.json videos
set -euo pipefail
. "$(dirname "$0")/comfy_http.sh"
workflow=${1:?a workflow} folder=${2:?a folder}

prompt='.sampler.inputs.seed = 7 | .text.inputs.positive = "A lighthouse in a storm, waves break against the rocks"'
id=$(queue_job <(jq "$prompt" "$workflow"))
wait_for "$id"
download "$id" "$folder"
# A server that knew the result from before may have none.
get "/history/$id" | jq --raw-output '.[].outputs.sampler.wanstream_timeline[]?.steps[]
    | "step \(.index) (\(.expert)): \(.wall_s) s, \(.stall_s) s of it stall"'
