#!/usr/bin/env bash
# Many videos: queue them all, then fetch each as it ends. One that fails does not stop the others.
#   many_jobs.sh workflows/api/t2v.json videos "a red fox in snow" "a kite over dunes"
set -euo pipefail
. "$(dirname "$0")/comfy_http.sh"
workflow=${1:?a workflow} folder=${2:?a folder}
shift 2

ids=() number=0 missing=0
for text in "$@"; do
    changed=$(jq --arg text "$text" --argjson number "$number" '.text.inputs.positive = $text
        | .sampler.inputs.seed = $number | .save.inputs.filename_prefix = "video/job_\($number)"' "$workflow")
    if id=$(queue_job <(printf '%s' "$changed")); then ids+=("$id"); else missing=1; fi
    number=$((number + 1))
done
# They run one after the other in the order in which they were queued; the experts stay open in between.
for id in "${ids[@]}"; do
    if wait_for "$id"; then download "$id" "$folder"; else missing=1; fi
done
exit "$missing"
