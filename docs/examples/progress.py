"""One video, watched through the websocket: which node runs, how far it is, and what each step took.

python progress.py workflows/api/t2v.json

Needs aiohttp: ComfyUI's own Python has it, elsewhere `pip install aiohttp`.
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
    """Run a workflow and return the event with which it ended."""
    prompt, client_id = read_workflow(workflow), str(uuid.uuid4())
    # Connected before the job is queued, so that no event is missed. An event may be larger than aiohttp expects.
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{URL}/ws", params={"clientId": client_id}, max_msg_size=0) as socket,
    ):
        prompt_id = await asyncio.to_thread(queue, prompt, client_id=client_id)
        async for message in socket:
            # What is not text is a preview picture.
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            if event["data"].get("prompt_id") != prompt_id:
                continue
            if event["type"] in ENDS:
                return str(event["type"])
            if line := told(prompt, event["type"], event["data"]):
                print(line, flush=True)
    raise FailedError(f"the connection ended before the job did; ask {URL}/history/{prompt_id}")


def told(prompt: Prompt, kind: str, data: dict[str, Any]) -> str | None:
    """An event in words; None for one of which there is nothing to say."""
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
