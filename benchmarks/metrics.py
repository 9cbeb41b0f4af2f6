"""What it costs to tell of a push, as a share of the push: `make bench-metrics`.

One trainer, which is this process, and a reference engine, on this machine's CPU. Each round has a warm push, and then
everything that the engine and the trainer tell of one: metrics, lines of the log, and the look whether the process
traces. What is told is made again here, many times, by the same code; that it is as much as a push tells is checked by
what is counted. With several processes the metrics are in files (``PROMETHEUS_MULTIPROC_DIR``), which takes longer. The
share is largest for a model that has next to no bytes. Exit code 0 if the aim is met for all models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import report
from benchmarks.blocks import Blocks, engine
from benchmarks.trainer import ROOT
from tests.scraping import Scraped, parse, scrape, scrape_here
from weightsync import PushResult, Sender, observe
from weightsync.engine.metrics import Report, of_server
from weightsync.protocol import http
from weightsync.tensors.layout import spec_of
from weightsync.trainer import metrics

COUNT = 300
#: Bytes of each tensor.
NOTHING, SMALL = 16, (16 << 20) // COUNT // 512 * 512
ROUNDS, AGAIN = 15, 100
#: The share of a warm push that may be spent on telling of it.
AIM = 0.01
#: Requests of a warm push that can carry a trace, and calls that are made in other threads.
REQUESTS = 2


def tell(report: Report, asked: http.UpdateRequest, result: PushResult) -> None:
    """Tell of one push what an engine and a trainer tell of it."""
    reply = next(iter(result.engines.values()))
    commit = http.CommitRequest(push=asked.push, version=result.version, pause="retract", timeout_s=60.0)
    with metrics.counted("push") as done:
        observe.describe(push=asked.push, version=result.version, bytes=result.nbytes, engines=1)
        states = ("idle", "preparing", "transferring", "committing", "idle")
        for before, after in itertools.pairwise(states):
            metrics.moved(before, after)
        for _ in range(REQUESTS):
            observe.carried(observe.trace_headers)()
            with observe.joined({}):
                report.lease_taken(1.0)
        for phase in ("prepare", "transfer", "commit"):
            with observe.span(f"weightsync.{phase}"):
                pass
        with report.prepare(asked):
            report.moved("serving", "receiving")
        with report.commit(commit) as committed:
            report.moved("receiving", "prepared")
            report.moved("prepared", "applying")
            report.moved("applying", "serving")
            committed(http.CommitReply(result.version, reply.pause_s, reply.seconds))
        for who in ("engine.receiver", "trainer.push"):
            log = logging.getLogger(f"weightsync.{who}")
            log.info("push %s: as long a line as the one about version %r, %.3f s", asked.push, result.version, 0.1)
        metrics.committed()
        done(result.seconds, result.engines.values(), result.nbytes)


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of pushes of tensors of ``nbytes``, of telling of one, and of that without the log."""
    module = Blocks(COUNT, nbytes, seed=1)
    own = Report(of_server())
    found: dict[str, list[float]] = {"push": [], "told": [], "metrics": []}
    manifest = tuple(spec_of(name, tensor) for name, tensor in module.state_dict().items())
    first, warm = (http.UpdateRequest("0" * 16, "", "", 512, 60.0, specs, known="known") for specs in (manifest, ()))
    with engine(COUNT, nbytes) as server, Sender([server.url]) as sender:
        for _ in range(3):
            result = sender.push(module)
        tell(own, first, result)
        before, before_here = scrape(server.url), _here()
        sender.push(module)
        between = _here()
        counted = {**_counts(scrape(server.url).since(before)), **_counts(between.since(before_here))}
        tell(own, warm, result)
        again = _counts(_here().since(between))
        if counted != again:
            raise RuntimeError(f"a push counts {counted}, and {again} were told of it")
        for _ in range(rounds):
            start = time.perf_counter()
            sender.push(module)
            found["push"].append(time.perf_counter() - start)
            for what, disabled in (("told", logging.NOTSET), ("metrics", logging.CRITICAL)):
                logging.disable(disabled)
                start = time.perf_counter()
                for _ in range(AGAIN):
                    tell(own, warm, result)
                found[what].append((time.perf_counter() - start) / AGAIN)
                logging.disable(logging.NOTSET)
    return found


def _here() -> Scraped:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return scrape_here()
    import prometheus_client
    from prometheus_client import multiprocess

    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return parse(prometheus_client.generate_latest(registry).decode())


def _counts(shown: Scraped) -> dict[Any, float]:
    """What was counted, without the seconds, and without buckets, which differ by the seconds."""
    return {key: value for key, value in shown.values.items() if key[0].endswith(("_total", "_count")) and value}


def _verdict(found: dict[str, Any]) -> bool:
    push_s, told_s, metrics_s = (statistics.median(found[what]) for what in ("push", "told", "metrics"))
    where = "several processes" if found["several"] else "one process"
    met = told_s <= AIM * push_s
    print(
        f"  {COUNT * found['nbytes'] / 1e6:6.2f} MB, {where:17}: a push takes {1e3 * push_s:.2f} ms, to tell of it "
        f"{1e6 * told_s:.0f} us ({1e6 * metrics_s:.0f} without the log): {100 * told_s / push_s:.2f} % "
        f"({100 * metrics_s / push_s:.2f} %); aim: at most {100 * AIM:g} %: {'met' if met else 'MISSED'}"
    )
    return met


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"{ROUNDS} by default; fewer are not kept")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        print(json.dumps(measure(args.inside, args.rounds)))
        return 0
    samples = []
    for nbytes, several in itertools.product((NOTHING, SMALL), (False, True)):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
            env = {**os.environ, **({"PROMETHEUS_MULTIPROC_DIR": folder} if several else {})}
            command = [
                sys.executable,
                "-m",
                "benchmarks.metrics",
                "--inside",
                str(nbytes),
                "--rounds",
                str(args.rounds),
            ]
            done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, check=True)
        samples.append({"nbytes": nbytes, "several": several, **json.loads(done.stdout)})
    record = {
        **report.here(),
        "rounds": args.rounds,
        "samples": samples,
    }
    path = report.save(record, kept=args.rounds >= ROUNDS, name="metrics")
    print(f"{COUNT} tensors, medians of {args.rounds} rounds; {report.machine(record)}")
    met = [_verdict(found) for found in samples]
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
