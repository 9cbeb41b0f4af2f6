"""The report of a run: a table, and every sample as JSON."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import weightsync
from benchmarks.trainer import CACHE, ROOT

RESULTS = ROOT / "benchmarks" / "results"
BUILT = "a Sender is built"
PUSHES = ("first push", "warm push")
UNVERIFIED = 'warm push, verify="off"'
SHARED = "warm push, parameters in shared memory"
SHARED_UNVERIFIED = 'warm push, parameters in shared memory, verify="off"'
PARTS_OF_TRANSFER = ("gather", "digest", "verify")
MEMCPY = "memcpy of the same bytes"

#: The aims of a push: at most so many memcpys; at most this share of another way; so many in-worker reloads of vLLM.
MEMCPY_AIMS = {SHARED_UNVERIFIED: 1.25, SHARED: 1.5, UNVERIFIED: 2.2, "warm push": 4.0}
PEER_AIMS = {"update_weights_from_tensor": 20.0, "update_weights_from_distributed": 15.0, "from_disk": 8.0}
RELOAD_AIM = 1.0
#: A first push takes at most so many warm ones.
FIRST_AIM = 2.0
#: The steps of a pause besides dropping caches; each engine has its own names.
STEPS = ("pause", "apply", "resume")
#: The share of a memcpy's speed that applying must reach; and the seconds by which a pause may exceed its steps.
APPLY_AIM, PAUSE_AIM_S = 0.8, 0.005

#: A list of numbers, which is written on one line of a result file.
_NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")

Record = dict[str, Any]


class Row(NamedTuple):
    """A line of the table; ``seconds`` has one value for each round."""

    name: str
    seconds: list[float]
    indent: int = 0


# ---- about the run ---------------------------------------------------------------------------------------------------


def about(engine: str) -> Record:
    """When, on which hardware and with which versions a run takes place."""
    probe = f"import importlib.metadata as m; print(m.version({engine!r}), m.version('torch'))"
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    answer = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    version, torch_version = answer.stdout.split()
    return {
        **here(),
        "versions": {
            "weightsync": weightsync.__version__,
            engine: version,
            "torch of the engine": torch_version,
            "torch of the trainer": torch.__version__,
            "python": platform.python_version(),
        },
        "threads_of_the_trainer": torch.get_num_threads(),
    }


def here() -> Record:
    """When and on which hardware a run takes place."""
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "hardware": hardware()}


def at_most(what: str, value: float, aim: float) -> str:
    """The line of an aim, and whether it was met."""
    return f"aim: {what}: at most {aim:g}: {value:.2f}: {'met' if value <= aim else 'MISSED'}"


def hardware() -> Record:
    """The hardware of this machine."""
    return {
        "cpu": _cpu(),
        "cores": len(psutil.Process().cpu_affinity() or []),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def _cpu() -> str:
    """The processor's name, family and model; on virtual machines the name alone says little."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def save(record: Record, *, kept: bool, name: str = "") -> Path:
    """Write the record; one to be ``kept`` goes to the results, any other beside the models. By default one a day."""
    folder = RESULTS if kept else CACHE
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ((name or f"{record['engine']}-{record['date'][:10]}") + ".json")
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(record, indent=1))
    path.write_text(text + "\n")
    return path


def pushes_served(record: Record) -> bool:
    """Whether the engine served everything that weightsync pushed."""
    return all(check["ok"] and check.get("same_bits", True) for check in record["checks"] if "push" in check["path"])


# ---- the table -------------------------------------------------------------------------------------------------------


def table(record: Record, floor: str) -> str:
    """The whole report; ``floor`` is the path that vLLM's pushes are compared with."""
    rounds = record["rounds"]
    memcpy = [statistics.median(found["memcpy"]) for found in rounds]
    floors = [found[floor]["seconds"] for found in rounds] if floor in rounds[0] else None
    rows = _rows(rounds, memcpy)
    width = max(len(row.name) + 2 * row.indent for row in rows)
    head = f"{'':{width}}  {'median':>8}  {'min - max':>15}  {'memcpys':>8}" + (f"  {'reloads':>8}" if floors else "")
    lines = [_title(record), head]
    for row in rows:
        low, high = min(row.seconds), max(row.seconds)
        line = (
            f"{'  ' * row.indent + row.name:{width}}  {statistics.median(row.seconds):8.3f}"
            f"  {f'{low:.3f} - {high:.3f}':>15}  {_ratio(row.seconds, memcpy):8.2f}"
        )
        lines.append(line + (f"  {_ratio(row.seconds, floors):8.2f}" if floors else ""))
    return "\n".join([*lines, *_verdicts(record, memcpy, floors), *_served(record)])


def machine(record: Record) -> str:
    """The hardware and time of the run, on one line."""
    hardware = record["hardware"]
    memory = f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    return f"{hardware['cpu']}, {hardware['cores']} cores, {memory}, {record['date']}"


def _title(record: Record) -> str:
    engine = record["engine"]
    return (
        f"{engine} {record['versions'][engine]}, {record['model']}, {record['nbytes'] / 1e9:.2f} GB, one server, "
        f"{len(record['rounds'])} rounds; seconds, ratios are medians of each round's\n{machine(record)}"
    )


def _rows(rounds: list[Record], memcpy: list[float]) -> list[Row]:
    rows = [Row(MEMCPY, memcpy)]
    for push in PUSHES:
        samples = [found[push] for found in rounds]
        rows.append(Row(push, _column(samples, "seconds")))
        for name in ("plan", "arena", "prepare", "transfer", *PARTS_OF_TRANSFER, "commit"):
            if name in samples[0]:
                rows.append(Row(name, _column(samples, name), 2 if name in PARTS_OF_TRANSFER else 1))
        steps = [name for name in samples[0] if name.startswith("commit: ")]
        rows += [Row(name.removeprefix("commit: "), _column(samples, name), 2) for name in steps]
        rows.append(Row("not generating (pause)", _column(samples, "pause"), 1))
    for push in (UNVERIFIED, SHARED, SHARED_UNVERIFIED):
        samples = [found[push] for found in rounds]
        rows.append(Row(push, _column(samples, "seconds")))
        rows += [Row(name, _column(samples, name), 1) for name in ("prepare", "transfer", "commit")]
    for name, value in rounds[0].items():
        if isinstance(value, dict) and "push" not in name:
            samples = [found[name] for found in rounds]
            rows.append(Row(name, _column(samples, "seconds")))
            rows += [Row(step, _column(samples, step), 1) for step in value if step != "seconds"]
    return rows


def _column(samples: Sequence[dict[str, float]], name: str) -> list[float]:
    return [sample[name] for sample in samples]


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def _verdicts(record: Record, memcpy: list[float], floors: list[float] | None) -> list[str]:
    """Every aim, and whether the run met it."""
    rounds = record["rounds"]

    def took(name: str, part: str = "seconds") -> list[float]:
        return _column([found[name] for found in rounds], part)

    def said(text: str, reached: float, met: bool) -> str:
        return f"aim: {text}: {reached:.2f}: {'met' if met else 'MISSED'}"

    found = _ratio(took("first push"), took("warm push"))
    lines = [said(f"first push, at most {FIRST_AIM:g} warm ones", found, found <= FIRST_AIM)]
    if floors is not None:
        found = _ratio(took("warm push"), floors)
        lines.append(said(f"warm push, at most {RELOAD_AIM:g} in-worker reloads", found, found <= RELOAD_AIM))
    else:
        for push, aim in MEMCPY_AIMS.items():
            found = _ratio(took(push), memcpy)
            lines.append(said(f"{push}, at most {aim:g} memcpys", found, found <= aim))
        for mark, aim in PEER_AIMS.items():
            for name in (name for name in rounds[0] if name.endswith(mark) or f"{mark}," in name):
                for push in ("warm push", SHARED_UNVERIFIED):
                    found = _ratio(took(name), took(push))
                    lines.append(said(f"{name} takes at least {aim:g} times as long as a {push}", found, found >= aim))
        found = _ratio(memcpy, took("warm push", "commit: apply"))
        lines.append(said(f"apply, at least {APPLY_AIM:g} of the speed of memcpy", found, found >= APPLY_AIM))
    pushes = [found["warm push"] for found in rounds]
    steps = [sum(sample.get(f"commit: {step}", 0.0) for step in STEPS) for sample in pushes]
    over = statistics.median(a - b for a, b in zip(took("warm push", "pause"), steps, strict=True))
    text = f"pause, at most {PAUSE_AIM_S * 1e3:g} ms longer than stopping, applying and resuming, in ms"
    lines.append(said(text, over * 1e3, over <= PAUSE_AIM_S))
    return lines


def _served(record: Record) -> list[str]:
    lines = [
        f"served after {check['path']}: {'yes' if check['ok'] else 'NO'}, log-probabilities off by {check['off']:.3f} "
        f"(from the other weights: {check['off_from_other_set']:.3f})"
        for check in record["checks"]
    ]
    same = record["checks"][-1]["same_bits"]
    lines[-1] += (
        f"; weights {'bit-identical with' if same else 'NOT THOSE OF'} the engine's own load of the same checkpoint"
    )
    if record["engine"] == "vllm" and not all(check["ok"] for check in record["checks"] if "push" not in check["path"]):
        lines.append(
            "(vLLM's own reload leaves an output layer that is tied to the embedding with its old packed weight)"
        )
    return lines
