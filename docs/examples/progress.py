"""Make one video and print its progress from the websocket.

The progress is the running node, how far it is, and the time of each step.

python progress.py workflows/api/t2v.json

Needs aiohttp: included in ComfyUI's Python environment, otherwise `pip install aiohttp`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from typing import Any

import aiohttp
from comfy_http import URL, FailedError, Prompt, queue, read_workflow

ENDS = {"execution_success", "execution_error", "execution_interrupted"}


async def main(workflow: str) -> str:
    """Run a workflow and return the type of its last event."""
    prompt = read_workflow(workflow)
    client_id = str(uuid.uuid4())
    # Connect before the job is queued, so that no event is missed. Events can exceed aiohttp's
    # default size limit.
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{URL}/ws", params={"clientId": client_id}, max_msg_size=0) as socket,
    ):
        prompt_id = await asyncio.to_thread(queue, prompt, client_id=client_id)
        async for message in socket:
            # Binary messages are preview images.
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            if event["data"].get("prompt_id") != prompt_id:
                continue
            if event["type"] in ENDS:
                return str(event["type"])
            if line := event_text(prompt, event["type"], event["data"]):
                print(line, flush=True)
    raise FailedError(f"the connection ended before the job did; ask {URL}/history/{prompt_id}")


def event_text(prompt: Prompt, kind: str, data: dict[str, Any]) -> str | None:
    """Return a line of text for an event; None for other types of events."""
    if kind == "execution_cached" and data["nodes"]:
        return f"as before: {', '.join(data['nodes'])}"
    if kind == "executing" and data["node"] in prompt:
        return f"{data['node']} ({prompt[data['node']]['class_type']})"
    if kind == "wanstream.step":
        step = data["record"]
        return f"step {data['done']} of {data['total']} ({step['expert']}): {step['wall_s']:.2f} s"
    if kind == "progress":
        return f"{data['node']}: {data['value']} of {data['max']}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(asyncio.run(main(sys.argv[1])))
    except (OSError, ValueError, aiohttp.ClientError) as err:
        sys.exit(f"progress: {err}")
