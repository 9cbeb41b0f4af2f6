"""`weightsync doctor` and `bench` between hosts, and in containers."""

import json
import subprocess
import sys

import pytest

from tests.hosts.programs import PORT
from tests.hosts.test_forwarded import forwarded  # noqa: F401 - a fixture

RUN = "import sys; from weightsync.cli import main; sys.exit(main(sys.argv[1:]))"


def examined(network, *arguments):
    """What the command says on the trainer's host, as lists of (level, check, text) by URL."""
    command = [sys.executable, "-c", RUN, "doctor", "--json", *("--timeout", "60"), *arguments]
    process = network.hosts["trainer"].popen(*command, stdout=subprocess.PIPE, text=True)
    lines = list(map(json.loads, process.communicate(timeout=120)[0].splitlines()))
    found = {line["url"]: [(f["level"], f["check"], f["text"]) for f in line["findings"]] for line in lines}
    assert process.returncode == int(any(level == "wrong" for findings in found.values() for level, *_ in findings))
    return found


def wrong(findings):
    return [(check, text) for level, check, text in findings if level == "wrong"]


def test_healthy_engines_here_and_on_other_hosts_raise_no_alarm(network, near, far):
    urls = [engine.url for engine in (near, *far)]
    found = examined(network, *urls)
    assert [wrong(found[url]) for url in (None, *urls)] == [[], [], [], []]
    for engine, name in zip(far, "ab", strict=True):
        ways = [text for _, check, text in found[engine.url] if check == "address"]
        assert f"rank 0: the trainer is reached at tcp://{network.hosts['trainer'].address}:" in ways[0]
        assert ways[0].endswith(f"from eth0 ({network.hosts[name].address})")
        assert ways[1] == f"rank 0: this host reaches it at {network.hosts[name].address}"


def test_bench_names_the_link_to_another_host_and_its_speed(network, far):
    run = [sys.executable, "-c", RUN, "bench", "--json", far[0].url]
    process = network.hosts["trainer"].popen(*run, stdout=subprocess.PIPE, text=True)
    found = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 0, found
    speed = found["link"]["bits_per_s"]
    assert found["link"]["interface"] == f"eth0 ({network.hosts['trainer'].address})"
    assert found["link_s"] == 8 * found["nbytes"] / speed
    assert "nixl" in found["engines"][far[0].url]


def test_a_firewall_that_passes_only_http_is_named(network, far):
    with network.firewall("a", PORT):
        ((check, text),) = wrong(examined(network, far[0].url)[far[0].url])
    assert check == "address"
    assert "rank 0 cannot reach the trainer's control socket" in text
    assert wrong(examined(network, far[0].url)[far[0].url]) == []


def test_a_host_that_is_cut_off_is_named(network, far):
    with network.cut("a"):
        found = examined(network, "--timeout", "20", far[0].url, far[1].url)  # as long as it takes on a busy machine
    ((check, text),) = wrong(found[far[0].url])
    assert (check, wrong(found[far[1].url])) == ("engine", [])
    assert text.startswith(far[0].url.removeprefix("http://"))


def test_a_forwarded_port_is_named_and_an_address_mends_it(network, far, forwarded):  # noqa: F811
    ((check, text),) = wrong(examined(network, forwarded.url)[forwarded.url])
    assert check == "address"
    assert "this host's loopback, but the engine runs in another network: a port is forwarded" in text
    address = network.hosts["trainer"].address
    assert wrong(examined(network, "--address", address, forwarded.url)[forwarded.url]) == []


def test_a_small_shared_memory_is_named():
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" -c "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, RUN, "doctor"]
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a mount namespace, run the tests as root: {tried.stderr.strip()}")
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("wrong")]
    assert "shared memory: 8 MiB of 8 MiB in /dev/shm can be used for an arena" in line
    assert line.endswith("-> df -h /dev/shm, or docker run --shm-size=8g")
