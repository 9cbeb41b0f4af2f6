"""Simulates several hosts on one machine: network, mount, IPC and UTS namespaces, joined by a bridge.

The machine's own interfaces are never changed: the bridge and the cables are created inside the namespaces.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
NETWORK = ipaddress.ip_network("10.77.0.0/24")
PREFIX = "weightsync-"
REFUSALS = ("not permitted", "denied", "not supported", "Unknown device type")
#: Ends when its standard input closes, so that nothing outlives the tests.
HOLD = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && echo ready && exec cat'
NAMESPACES = ("--mount", "--ipc", "--uts")


def run(*command):
    """Run a command that must succeed; its output is in the error."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)


def sweep():
    """Remove the namespaces of tests that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        if not Path("/proc", path.name.removeprefix(PREFIX).partition("-")[0]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another process was faster
                run("ip", "netns", "delete", path.name)


def refusal(error):
    """Why namespaces cannot be created here; empty if the error has another cause."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing"
    said = f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return said if any(word in said for word in REFUSALS) else ""


class Host:
    """One host with its own address, /dev/shm and name."""

    def __init__(self, name, namespace, address, token):
        self.name, self.namespace, self.address = name, namespace, address
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._env = {**os.environ, "WEIGHTSYNC_TOKEN": token, "PYTHONPATH": path, "UCX_TLS": "tcp,self"}
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", *NAMESPACES, "sh", "-c", HOLD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self):
        """Wait until it can be entered."""
        if self._holder.stdout.readline() != "ready\n":
            said = self._holder.communicate(timeout=DEADLINE_S)[1]
            raise subprocess.CalledProcessError(self._holder.returncode, self._holder.args, stderr=said)

    @property
    def entering(self):
        """The prefix of a command that runs on this host and ends with its parent process."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", *NAMESPACES, "setpriv", "--pdeathsig", "KILL"]

    def popen(self, *command, environment=(), **options):
        """Start a program on this host; its process ends with this one."""
        env = {**self._env, **dict(environment)}
        return subprocess.Popen([*self.entering, *command], env=env, **options)

    def sent(self):
        """The bytes that its link has carried away from it."""
        said, _ = self.popen("cat", "/proc/net/dev", stdout=subprocess.PIPE, text=True).communicate(timeout=DEADLINE_S)
        (counted,) = (line.split()[1:] for line in said.splitlines() if line.strip().startswith("eth0:"))
        return int(counted[8])

    def close(self):
        """End the host and free its memory."""
        self._holder.kill()
        self._holder.communicate(timeout=DEADLINE_S)


class Network:
    """Hosts by name, each connected to one bridge. `refusal` explains its errors if namespaces are not permitted."""

    def __init__(self, *names):
        sweep()
        self._prefix = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self._bridge = f"{self._prefix}-bridge"
        self.hosts = {}
        token = secrets.token_urlsafe(16)
        with contextlib.ExitStack() as made:
            self._namespace(self._bridge, made)
            run("ip", "-n", self._bridge, "link", "add", "name", "bridge", "type", "bridge")
            run("ip", "-n", self._bridge, "link", "set", "dev", "bridge", "up")
            for number, name in enumerate(names, start=1):
                namespace, address = f"{self._prefix}-{name}", str(NETWORK[number])
                self._namespace(namespace, made)
                self._cable(name, namespace, address)
                host = self.hosts[name] = Host(name, namespace, address, token)
                made.callback(host.close)
                host.ready()
            self._made = made.pop_all()

    def _namespace(self, name, made):
        run("ip", "netns", "add", name)
        made.callback(run, "ip", "netns", "delete", name)
        run("ip", "-n", name, "link", "set", "dev", "lo", "up")

    def _cable(self, name, namespace, address):
        there = ["peer", "name", "eth0", "netns", namespace]
        run("ip", "-n", self._bridge, "link", "add", "name", name, "type", "veth", *there)
        run("ip", "-n", self._bridge, "link", "set", "dev", name, "master", "bridge", "up")
        run("ip", "-n", namespace, "address", "add", f"{address}/{NETWORK.prefixlen}", "dev", "eth0")
        run("ip", "-n", namespace, "link", "set", "dev", "eth0", "up")

    @contextlib.contextmanager
    def cut(self, name):
        """Disconnect a host for the duration of the block."""
        cable = ["ip", "-n", self._bridge, "link", "set", "dev", name]
        run(*cable, "down")
        try:
            yield
        finally:
            run(*cable, "up")

    @contextlib.contextmanager
    def firewall(self, name, port):
        """For the duration of the block, silently drop a host's outgoing TCP except from this port."""
        rules = {
            "10": ["ipproto", "tcp", "sport", str(port), "lookup", "main"],
            "20": ["ipproto", "tcp", "to", str(NETWORK), "blackhole"],
        }
        with contextlib.ExitStack() as up:
            for preference, rule in rules.items():
                command = ["ip", "-n", f"{self._prefix}-{name}", "rule"]
                run(*command, "add", "pref", preference, *rule)
                up.callback(run, *command, "delete", "pref", preference)
            yield

    @contextlib.contextmanager
    def apart(self, one, other):
        """For the duration of the block, silently drop what two hosts send each other."""
        with contextlib.ExitStack() as up:
            for name, to in ((one, other), (other, one)):
                command, address = ["ip", "-n", f"{self._prefix}-{name}", "route"], f"{self.hosts[to].address}/32"
                run(*command, "add", "blackhole", address)
                up.callback(run, *command, "delete", "blackhole", address)
            yield

    @contextlib.contextmanager
    def limited(self, name, mbit):
        """For the duration of the block, limit a host's link to ``mbit`` Mbit/s each way."""
        with contextlib.ExitStack() as up:
            for namespace, device in ((self._bridge, name), (f"{self._prefix}-{name}", "eth0")):
                command = ["tc", "-n", namespace, "qdisc"]
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms"]
                run(*command, "add", "dev", device, "root", *limit)
                up.callback(run, *command, "delete", "dev", device, "root")
            yield

    def close(self):
        """Remove all hosts and namespaces."""
        self._made.close()


@contextlib.contextmanager
def network_for_tests(*names):
    """A `Network` for the duration of the block; skips the tests if namespaces are not permitted."""
    try:
        network = Network(*names)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        if why := refusal(error):
            pytest.skip(f"needs network namespaces, run the tests as root: {why}")
        raise
    with contextlib.closing(network):
        yield network
