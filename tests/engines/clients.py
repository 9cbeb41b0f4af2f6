"""Clients that read long streams, in a process of their own: beside a trainer's threads they keep it from running.

``python -m tests.engines.clients ENGINE MODEL URL STREAMS TOKENS PROMPT...`` prints lines of JSON for each stream: null
once its fifth token is here, and at its end all tokens. Told a number on its standard input, every stream reads that
many more, if there are, and ends.
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
    # Whose process it is matters to those alone who end it.
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
