"""The programs on the simulated hosts, controlled from outside."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time

import psutil

from tests.faults.harness import SITE
from tools import servers

PORT = 8000
#: Where the ranks of an engine on several hosts find each other.
STORE = 5000
START_S = 120.0
ASK_S = 30.0
AGAIN_S = 1.0
#: Sends a request to an engine from a host that can reach it.
ASK = """
import http.client, os, sys
host, port, route, body = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=20)
headers = {"Authorization": f"Bearer {os.environ['WEIGHTSYNC_TOKEN']}", "Content-Type": "application/json"}
connection.request("POST", route, body, headers)
reply = connection.getresponse()
print(reply.read().decode())
sys.exit(reply.status != 200)
"""


class Engine:
    """A reference engine on a host."""

    start_s = START_S

    def __init__(self, host, folder):
        self._host, self._folder = host, folder
        self.url = f"http://{host.address}:{PORT}"
        self.start()

    def start(self):
        """Start the process; `wait` waits until it answers."""
        where = ("--host", self._host.address, "--port", str(PORT))
        self._process = self._host.popen(sys.executable, "-m", "weightsync.testing", str(self._folder), *where)

    @property
    def pid(self):
        """The process."""
        return self._process.pid

    def wait(self):
        """Return once it answers."""
        end = time.monotonic() + self.start_s
        while True:
            try:
                return self.status()
            except subprocess.CalledProcessError:
                assert self._process.poll() is None, f"{self.url} ended"
                assert time.monotonic() < end, f"{self.url} does not come up"
                time.sleep(AGAIN_S)  # each question is a process, and the engine needs the processor

    def _ask(self, route, **body):
        command = [sys.executable, "-c", ASK, self._host.address, str(PORT), route, json.dumps(body)]
        asking = self._host.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said, wrong = asking.communicate(timeout=ASK_S)
        if asking.returncode:
            raise subprocess.CalledProcessError(asking.returncode, route, said, wrong)
        return json.loads(said)

    def status(self):
        """The status of the engine, with digests."""
        return self._ask("/weightsync/status", digest=True)

    def answer(self, prompt, tokens):
        """Greedy continuation and the logprob of each of its tokens."""
        reply = self._ask("/generate", prompt=prompt, tokens=tokens)
        return reply["tokens"], reply["logprobs"]

    def kill(self):
        """Kill the process; idempotent."""
        self._process.kill()
        self._process.wait(ASK_S)


class Nodes(Engine):
    """SGLang over several hosts; the first has its front end."""

    start_s = 300.0

    def __init__(self, hosts, folder, work):
        self._hosts, self._work, self.orders = hosts, work, work / "order"
        super().__init__(hosts[0], folder)

    def start(self):
        path = os.pathsep.join([str(SITE), str(servers.ROOT)])
        common = {**servers.environment_of("sglang", tp=1), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = servers.command_of("sglang", self._folder, len(self._hosts), PORT)
        several = ("--nnodes", str(len(self._hosts)), "--dist-init-addr", f"{self._hosts[0].address}:{STORE}")
        self._processes = []
        for rank, host in enumerate(self._hosts):
            own = {
                "SGLANG_CPU_OMP_THREADS_BIND": str(rank),
                "SGLANG_HOST_IP": host.address,
                "GLOO_SOCKET_IFNAME": "eth0",
                "FAULT_FILE": str(self.orders),
            }
            with (self._work / f"node-{rank}.log").open("wb") as log:
                self._processes.append(
                    host.popen(
                        *(*command, *several, "--host", host.address, "--node-rank", str(rank)),
                        environment=common | own,
                        cwd=self._work,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        self._process = self._processes[0]

    def answer(self, prompt, tokens):
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self._ask("/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True)
        pairs = reply["meta_info"]["output_token_logprobs"]
        return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]

    def order(self, action, rank):
        """Order a fault in the next load of a rank."""
        where = {"tensor": 5, "rank": rank}
        self.orders.write_text(json.dumps({"point": "rank loads", "where": where, "action": action}))

    @contextlib.contextmanager
    def frozen(self, node):
        """For the duration of the block, stop the processes of a node."""
        root = psutil.Process(self._processes[node].pid)
        stopped = [root, *root.children(recursive=True)]
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    def kill(self):
        for process in self._processes:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait(ASK_S)


class Trainer:
    """A `tests.hosts.trainer` process on a host."""

    def __init__(self, host):
        self._process = host.popen(
            sys.executable, "-m", "tests.hosts.trainer", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _write(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def begin(self, engines, folder, version=None, halts=False, changes=None, **options):
        """Start a push."""
        how = {"options": options, "folder": str(folder), "version": version, "halts": halts, "changes": changes}
        self._write({"urls": [engine.url for engine in engines], **how})

    def outcome(self):
        """The trainer's next report. Raises `queue.Empty` if there is none in time."""
        said = self._lines.get(timeout=START_S)
        assert said is not None, "the trainer ended"
        return said

    def push(self, engines, folder, **more):
        """Push and return the outcome."""
        self.begin(engines, folder, **more)
        return self.outcome()

    def go_on(self):
        """Continue a push that has halted."""
        self._write({})

    def let_go(self):
        """Close the trainer's sender."""
        self._write({})
        return self.outcome()

    def close(self):
        """End it."""
        self._process.kill()
        self._process.wait(ASK_S)
        self._reader.join(ASK_S)
        self._process.stdin.close()
        self._process.stdout.close()


def served(engine):
    """The digest of what an engine computes with."""
    (rank,) = engine.status()["ranks"]
    return rank["digest"]
