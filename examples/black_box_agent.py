"""An agent that knows nothing of agentgym: it speaks OpenAI's chat completions, and plays what is served.

agentgym serve --env TextGame-v0 -n 20              # or, to train the model behind it:
agentgym train --env TextGame-v0 --serve 8000       # every episode of training is then played by such agents
python examples/black_box_agent.py --parallel 16    # in another terminal
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ModuleNotFoundError:
    sys.exit("this example uses the official client, which is not installed: pip install openai")

OVER = 410  # the episode, or the whole run


def play(client: OpenAI, game: dict[str, Any]) -> float:
    """Plays one episode to its end; returns the sum of its rewards."""
    agent = client.with_options(base_url=game["base_url"])
    tools = {"tools": game["tools"]} if game["tools"] else {}
    messages, total = game["messages"], 0.0
    while True:
        try:
            reply = agent.chat.completions.create(model="policy", messages=messages, **tools).choices[0].message
            answer: Any = client.post(f"/episodes/{game['episode']}/step", cast_to=object)
        except APIStatusError as error:
            if error.status_code == OVER:
                return total
            raise
        messages += [reply.model_dump(exclude_none=True), *answer["messages"]]
        total += answer["reward"]
        if answer["terminated"] or answer["truncated"]:
            return total


def games(client: OpenAI, wait_s: float) -> Iterator[dict[str, Any]]:
    """Claims one episode after the other, until the run is over; waits up to `wait_s` for the server to come up."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            game: Any = client.post("/episodes", cast_to=object)
        except APIConnectionError:
            if time.monotonic() > give_up:
                return
            time.sleep(0.5)
            continue
        except APIStatusError as error:
            if error.status_code == OVER:
                return
            raise
        give_up = 0.0
        if game:  # else there is none yet
            yield game


def main() -> None:
    """Plays on several threads, each an episode at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the episodes are served")
    parser.add_argument("--token", default=os.environ.get("AGENTGYM_TOKEN", "none"), help="the server's token, if any")
    parser.add_argument("--parallel", type=int, default=8, help="episodes at once")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the server")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key=options.token, max_retries=2)

    def agent(_: int) -> list[float]:
        return [play(client, game) for game in games(client, options.wait)]

    with ThreadPoolExecutor(options.parallel) as threads:
        rewards = [reward for played in threads.map(agent, range(options.parallel)) for reward in played]
    client.close()
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    print(f"played {len(rewards)} episodes, mean reward {mean:.3f}")


if __name__ == "__main__":
    main()
