"""An agent that does what goes wrong with agents; what it does follows from the number in its prompt.

It needs nothing but a bare interpreter, as a thousand of them are started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

CUT_AFTER = 40
HOST, PORT, BASE = re.match(r"http://([^:/]+):(\d+)(/.*)", os.environ["OPENAI_BASE_URL"]).groups()


def send(path, body, num_bytes=-1):
    """Posts JSON; returns status and answer, or None after closing the connection before all of the answer is read."""
    raw = json.dumps(body).encode()
    with socket.create_connection((HOST, int(PORT))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        if num_bytes >= 0:
            connection.recv(num_bytes)
            # A reset, as of a process that is killed: the rest is never read.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return None
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text)


def ask(messages, num_bytes=-1):
    answer = send(f"{BASE}/chat/completions", {"messages": messages}, num_bytes)
    return answer and answer[1]["choices"][0]["message"]


def talk(messages, num_turns, cut=()):
    """Goes on with a conversation; the requests of the turns in `cut` lose their answer, and are sent again."""
    for turn in range(num_turns):
        if turn in cut:
            ask(messages, CUT_AFTER)
            time.sleep(0.05)  # the server sees the reset
        messages += [ask(messages), {"role": "user", "content": f"next {turn}"}]
    return messages


def fork(starts, num_turns, cut=()):
    """Goes on with several conversations at once."""
    threads = [threading.Thread(target=talk, args=(start, num_turns, cut)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def equal_requests(messages):
    """Asks twice at once, and goes on with the reply whose text is the lesser one."""
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(ask(messages))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*messages, min(replies, key=lambda reply: reply["content"]), {"role": "user", "content": "the lesser"}]


def play(number):
    kind, turn = number % 10, number // 10 % 3
    messages = talk([{"role": "user", "content": f"play {number}"}], turn + 1, cut=(turn,) if kind == 4 else ())
    if kind == 1:
        sys.exit(3)
    if kind == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 3 and number % 20 == 3:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
        signal.pause()
    if kind in (5, 6):
        starts = [[*messages, {"role": "user", "content": f"task {index}"}] for index in range(2)]
        starts += [[{"role": "user", "content": f"play {number} as {index}"}] for index in range(2)]
        fork(starts, 2, cut=(1,) if kind == 6 else ())
    if kind == 7:
        messages = talk(equal_requests(messages), 1)
    if kind == 8:
        messages[1] = {"role": "assistant", "content": "an edited reply"}
    talk(messages, 1)
    if kind == 9:
        root = BASE.removesuffix("/v1")
        assert send(f"{root}/finish", {})[0] == 200
        assert send(f"{root}/finish", {})[0] == 200
        assert send(f"{BASE}/chat/completions", {"messages": messages})[0] == 410


play(int(re.search(r"\d+", sys.argv[1])[0]))
