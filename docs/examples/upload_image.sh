#!/usr/bin/env bash
# A video from an image of yours: upload the image, name it in the workflow, run that.
#   upload_image.sh workflows/api/i2v.json portrait.png videos
set -euo pipefail
. "$(dirname "$0")/comfy_http.sh"
workflow=${1:?a workflow} image=${2:?an image} folder=${3:?a folder}

name=$(upload "$image")
id=$(queue_job <(jq --arg name "$name" '.image.inputs.image = $name' "$workflow"))
wait_for "$id"
download "$id" "$folder"
