"""What a Prometheus server would see of a process, read by prometheus_client's own parser."""

import math
from dataclasses import dataclass

import prometheus_client
import requests
from prometheus_client.parser import text_string_to_metric_families

from weightsync.engine import metrics as engine_metrics
from weightsync.protocol import states
from weightsync.trainer import metrics as trainer_metrics

PREFIX = "weightsync:"


@dataclass(frozen=True)
class Scraped:
    """All series of weightsync, with the prefix cut off: values by name and labels."""

    values: dict

    def __call__(self, name, **labels):
        return self.values[name, frozenset(labels.items())]

    @property
    def series(self):
        return set(self.values)

    def nonzero(self, name, *labels):
        """The values above 0 of a metric, by one or two labels."""
        found = {}
        for (which, of), value in self.values.items():
            if which == name and value:
                key = tuple(dict(of)[label] for label in labels)
                found[key if len(labels) > 1 else key[0]] = value
        return found

    def state(self):
        """The state that an engine is in."""
        (found,) = self.nonzero("state", "state").items()
        assert found[1] == 1
        return found[0]

    def since(self, before):
        """What was counted since ``before``; gauges are as they are now."""
        counted = ("_total", "_bucket", "_sum", "_count")
        return Scraped(
            {
                key: value - before.values.get(key, 0) if key[0].endswith(counted) else value
                for key, value in self.values.items()
            }
        )


def parse(text):
    """The series of weightsync in an exposition."""
    values = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(PREFIX):
            assert family.documentation
            for sample in family.samples:
                key = sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())
                assert key not in values, key
                if not key[0].endswith("_created"):
                    values[key] = sample.value
    return Scraped(values)


def scrape(url):
    """What an engine shows at its ``/metrics``."""
    reply = requests.get(f"{url}/metrics", timeout=30)
    reply.raise_for_status()
    return parse(reply.text)


def scrape_here():
    """What this trainer's default registry holds."""
    return parse(prometheus_client.generate_latest().decode())


def assert_equals_results(shown, results, urls=None):
    """Assert that an engine's metrics, or a trainer's if ``urls`` is None, say what the results of all pushes say."""
    trainer = urls is None
    prefix = "trainer_" if trainer else ""
    engines = [engine for r in results for url, engine in r.engines.items() if trainer or url in urls]
    assert shown(f"{prefix}pushed_bytes_total") == sum(result.nbytes for result in results)
    assert shown(f"{prefix}pause_seconds_count") == len(engines)
    assert_close(shown(f"{prefix}pause_seconds_sum"), sum(engine.pause_s for engine in engines))
    if trainer:
        for phase in trainer_metrics.PHASES:
            taken = [result.seconds[phase] for result in results if phase in result.seconds]
            assert shown("trainer_push_seconds_count", phase=phase) == len(taken)
            assert_close(shown("trainer_push_seconds_sum", phase=phase), sum(taken))
        return
    for step in engine_metrics.STEPS:
        taken = [engine.seconds[step] for engine in engines if step in engine.seconds]
        assert shown("commit_step_seconds_count", step=step) == len(taken)
        assert_close(shown("commit_step_seconds_sum", step=step), sum(taken))


def assert_close(one, other):
    assert math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9), (one, other)


def assert_bounded(shown):
    """Assert that every label has a value from a table of weightsync."""
    known = {
        "outcome": {*engine_metrics.OUTCOMES["push"], *trainer_metrics.OUTCOMES},
        "kind": {*engine_metrics.OUTCOMES, *trainer_metrics.KINDS},
        "phase": {*engine_metrics.PHASES, *trainer_metrics.PHASES},
        "step": set(engine_metrics.STEPS),
        "state": {*states.ENGINE, *states.PUSH},
    }
    for _, labels in shown.series:
        for name, value in labels:
            assert name == "le" or value in known[name], (name, value)
