# The calls of ComfyUI's HTTP API that a job needs, with curl and jq. Source it, or copy what you need.
# COMFYUI_URL names the server; without it: http://127.0.0.1:8188.
COMFYUI_URL=${COMFYUI_URL:-http://127.0.0.1:8188}

# post ROUTE: POST the JSON of the standard input; prints the answer, that of a refusal too.
post() {
    curl --silent --show-error --header 'Content-Type: application/json' --data-binary @- "$COMFYUI_URL$1"
}

# get ROUTE [OPTION OF CURL ...]: prints the answer.
get() {
    curl --silent --show-error --fail "${@:2}" "$COMFYUI_URL$1"
}

# queue_job FILE: queue a workflow in API format; prints the id of the job, or on the standard error what is wrong.
queue_job() {
    local answer complaints
    # Without a client_id, the history would not name files that are there from an earlier job.
    answer=$(jq '{prompt: ., client_id: "comfy_http"}' "$1" | post /prompt) || return
    # Both are looked at: a workflow of which only some outputs are wrong is accepted, and those are left out.
    complaints=$(jq --raw-output '
        (.error // empty | .message? // .),
        (.node_errors // {} | to_entries[] | .key as $node | .value.errors[] | "\($node): \(.message): \(.details)")
    ' <<<"$answer") || return
    if [ -n "$complaints" ]; then
        printf '%s\n' "$complaints" >&2
        if jq --exit-status .prompt_id <<<"$answer" >/dev/null; then
            cancel_job "$(jq --raw-output .prompt_id <<<"$answer")"
        fi
        return 1
    fi
    jq --raw-output .prompt_id <<<"$answer"
}

# wait_for ID: return when the job has ended; fails, and says why, where it did not end well.
wait_for() {
    local queued entry
    while true; do
        # Asked first: a job that ends between the two calls is found in the history.
        queued=$(get /queue | jq --arg id "$1" '[.queue_running[], .queue_pending[]] | any(.[1] == $id)') || return
        entry=$(get "/history/$1" | jq --arg id "$1" '.[$id]') || return
        [ -n "$queued" ] && [ -n "$entry" ] || return
        [ "$entry" = null ] || break
        if [ "$queued" = false ]; then
            echo "the server does not know job $1: was it cancelled, or the server restarted?" >&2
            return 1
        fi
        sleep 0.5
    done
    jq --exit-status '.status.status_str == "success"' <<<"$entry" >/dev/null && return
    jq --raw-output '.status.messages[-1] | if .[0] == "execution_error"
        then "\(.[1].node_id) (\(.[1].node_type)): \(.[1].exception_message)" else "the job was cancelled" end' <<<"$entry" >&2
    return 1
}

# download ID FOLDER: fetch the files that a finished job left in the server's output folder; prints their paths.
download() {
    local files file filename subfolder
    mkdir -p "$2"
    files=$(get "/history/$1" | jq --raw-output '.[].outputs[][][] | objects | select(.type == "output")
        | "\(.filename)/\(.subfolder)"') || return
    while IFS= read -r file; do
        [ -n "$file" ] || continue
        filename=${file%%/*} subfolder=${file#*/}
        get /view --get --data-urlencode "filename=$filename" --data-urlencode "subfolder=$subfolder" \
            --data type=output --output "$2/$filename.part" || return
        mv "$2/$filename.part" "$2/$filename"
        echo "$2/$filename"
    done <<<"$files"
}

# upload IMAGE: put an image into the server's input folder; prints the name for LoadImage.
upload() {
    get /upload/image --form "image=@$1" | jq --raw-output '[.subfolder, .name] | map(select(. != "")) | join("/")'
}

# cancel_job ID: cancel a job, whether it waits or runs; nothing happens to the others.
cancel_job() {
    jq --null-input --arg id "$1" '{delete: [$id]}' | post /queue
    jq --null-input --arg id "$1" '{prompt_id: $id}' | post /interrupt
}
