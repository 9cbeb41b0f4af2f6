"""Clients that read long streams, in their own process, where they do not slow down a trainer's threads.

``python -m tests.engines.clients ENGINE MODEL URL STREAMS TOKENS PROMPT...`` prints two lines of JSON for each stream:
null once its fifth token has arrived, and all tokens at its end. After a number on standard input, every stream reads
at most that many more tokens and ends.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

from tools import servers


def main():
    engine, model, url, streams, tokens, *prompt = sys.argv[1:]
    prompt = [int(token) for token in prompt]
    # Only code that ends the server would use the process.
    server = servers.Server(engine, Path(model), url, subprocess.Popen(["true"]), Path("log"))
    lock = threading.Lock()
    limit = []

    def say(what):
        with lock:
            print(json.dumps(what), flush=True)

    def read(number):
        found, left = [], None
        for token, _ in servers.stream(server, [*prompt, number], int(tokens)):
            found.append(token)
            if len(found) == 5:
                say(None)
            if limit:
                left = (limit[0] if left is None else left) - 1
                if left == 0:
                    break
        say(found)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(int(streams))]
    for thread in threads:
        thread.start()
    if told := sys.stdin.readline():
        limit.append(int(told))
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
