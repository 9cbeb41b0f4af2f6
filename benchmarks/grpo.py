"""A tiny model learns a task by GRPO with TRL, sampled by a real engine: `make grpo`, `make grpo ARGS=compare`.

On this machine's CPU. The model is made on the spot: it learns to write letters, at random. Then it is rewarded for
writing the letter that it is asked for. Every step pushes its weights with weightsync, and the engine says of every
token which weights have sampled it: those of the step. ``compare`` runs the same with an engine that keeps the weights
of the start, and with one that reloads what the trainer saves. Exit code 0 if every token was sampled by the weights
that it should be, and the model has learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import report
from benchmarks.grpo_task import LENGTH, LETTERS, prompt_of
from tools import models, servers, versions
from tools.progress import alive

ROOT = servers.ROOT
TRAINER = Path(__file__).with_name("grpo_trainer.py")
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WARM_UP = 200
#: Each way to get the weights into the engine, and what is said of it.
WAYS = {"weightsync": "pushed every step", "stale": "weights of the start", "reload": "saved and reloaded"}
#: For vLLM: what samples by token, with its versions; the mode that TRL wants; the route that reloads.
ARGS = {"vllm": ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"], "sglang": []}
SHARE_AIM, PUSH_AIM_S, ERRORS_AIM = 0.05, 0.08, 3.0
Step = dict[str, Any]


def make_writer(folder: Path, seed: int) -> Path:
    """A model that writes letters at random, whatever it is asked for."""
    path = models.make_model(folder, "qwen3", seed=seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=1e-3), random.Random(seed)
    for _ in range(WARM_UP):
        rows = [prompt_of(chance.choice(LETTERS)) + "".join(chance.choices(LETTERS, k=LENGTH)) for _ in range(32)]
        tokens = torch.tensor(tokenizer(rows)["input_ids"])
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def train(server: servers.Server, model: Path, way: str, steps: int, seed: int) -> list[Step]:
    """Train, with a line that shows how it goes; returns what the trainer says of each step."""
    env = {
        **os.environ,
        **servers.environment_of("vllm", 1),
        "PYTHONPATH": os.pathsep.join((str(versions.trl_packages(list(versions.TRL)[-1])), str(ROOT))),
        "ACCELERATE_USE_CPU": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    told = []
    with tempfile.TemporaryDirectory() as output, (servers.LOGS / f"grpo-{way}.log").open("w") as log:
        command = [PYTHON, TRAINER, model, server.url, server.engine, way, str(steps), str(seed), output]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as trainer,
            tqdm(total=steps, desc=f"{way:10}", unit="step", file=sys.stdout, mininterval=0.5) as bar,
        ):
            assert trainer.stdout is not None
            for line in trainer.stdout:
                if line.startswith('{"step"'):
                    told.append(json.loads(line))
                    now = told[-1]
                    bar.set_postfix_str(f"reward {now['reward']:.2f}, sampled by version {' '.join(now['sampled'])}")
                    bar.update()
        if trainer.returncode:
            raise RuntimeError(f"the trainer ended with {trainer.returncode}: see {log.name}")
    return told


def as_it_should_be(way: str, told: list[Step]) -> bool:
    """Whether the weights that sampled each token were those of the step, or those of the start."""
    if way == "weightsync":
        return all(step["sampled"] == [step["pushed"]] for step in told)
    return all(step["sampled"] == told[0]["sampled"] for step in told)  # the engine's own reload changes no label


def learnt(told: list[Step]) -> tuple[float, float, float]:
    """The mean reward of the first and the last quarter, and their difference in standard errors."""
    rewards = [step["reward"] for step in told]
    quarter = len(rewards) // 4
    first, last = rewards[:quarter], rewards[-quarter:]
    error = (statistics.variance(first) / quarter + statistics.variance(last) / quarter) ** 0.5
    begin, end = statistics.mean(first), statistics.mean(last)
    return begin, end, (end - begin) / error if error else 0.0


def curve(told: list[Step], width: int = 60) -> str:
    """The reward from 0 to 1 over the steps, as bars."""
    bars = " ▁▂▃▄▅▆▇█"
    size = max(1, len(told) // width)
    means = [statistics.mean(s["reward"] for s in told[at : at + size]) for at in range(0, len(told), size)]
    return "".join(bars[round(max(0.0, min(mean, 1.0)) * (len(bars) - 1))] for mean in means)


def _median(steps: list[Step], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def table(record: report.Record) -> str:
    """What the runs have shown."""
    lines = [
        f"{record['engine']} {record['versions'][record['engine']]}, {record['steps']} steps; {report.machine(record)}"
    ]
    lines.append("  seed  way         reward: first quarter  last  standard errors   step ms  weights ms  share")
    for run in record["runs"]:
        first, last, errors = learnt(run["steps"])
        step, weights = (1e3 * _median(run["steps"], key) for key in ("seconds", "synchronise"))
        lines.append(
            f"  {run['seed']:4}  {run['way']:10}  {first:21.2f}  {last:4.2f}  {errors:15.1f}"
            f"  {step:8.0f}  {weights:10.0f}  {weights / step:5.1%}  {curve(run['steps'], 40)}"
        )
    pushed = [run for run in record["runs"] if run["way"] == "weightsync"]
    last = {(run["seed"], run["way"]): learnt(run["steps"])[1] for run in record["runs"]}
    errors = min(learnt(run["steps"])[2] for run in pushed)
    lines.append(f"aim: last quarter above the first by {ERRORS_AIM:g} standard errors: at least {errors:.1f}")
    if compared := [run["seed"] for run in pushed if (run["seed"], "stale") in last]:
        above = sum(last[seed, "weightsync"] > last[seed, "stale"] for seed in compared)
        lines.append(f"aim: above stale weights in at least 4 of 5 seeds: in {above} of {len(compared)}")
    worst = max(pushed, key=lambda run: _median(run["steps"], "synchronise"))["steps"]
    push, step = (_median(worst, key) for key in ("synchronise", "seconds"))
    met = push <= max(SHARE_AIM * step, PUSH_AIM_S)
    lines.append(
        f"aim: a push takes {SHARE_AIM:.0%} of a step or {1e3 * PUSH_AIM_S:g} ms: {1e3 * push:.0f} ms of "
        f"{1e3 * step:.0f}: {'met' if met else 'MISSED'}"
    )
    lines.append(f"sampled by the weights of its step, every token: {'yes' if record['as_it_should_be'] else 'NO'}")
    return "\n".join(lines)


def plot(record: report.Record, path: Path) -> None:
    """Draw the reward of every run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    colours = dict(zip(WAYS, ("tab:blue", "tab:red", "tab:green"), strict=True))
    for run in record["runs"]:
        label = f"{run['way']}: {WAYS[run['way']]}" if run["seed"] == record["runs"][0]["seed"] else None
        rewards = [step["reward"] for step in run["steps"]]
        panel.plot(range(1, len(rewards) + 1), rewards, color=colours[run["way"]], alpha=0.7, label=label)
    panel.set(xlabel="step", ylabel="mean reward of what was sampled", ylim=(0, 1), title=f"GRPO, {record['engine']}")
    panel.legend()
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    """Run the trainings; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compare", nargs="?", choices=("compare",), help="also with stale weights, and saved ones")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--seeds", type=int, default=1, help="how many models learn; the results of 5 are kept")
    parser.add_argument("--steps", type=int, default=70)
    args = parser.parse_args()
    ways = list(WAYS) if args.compare else ["weightsync"]
    record: report.Record = {**report.about(args.engine), "engine": args.engine, "steps": args.steps, "runs": []}
    with tempfile.TemporaryDirectory(prefix="weightsync-grpo-") as folder:
        made = [make_writer(Path(folder) / str(seed), seed) for seed in range(args.seeds)]
        with alive(f"starting {args.engine} on the CPU with a tiny Qwen3 (half a minute)"):
            server = servers.start(args.engine, made[0], args=ARGS[args.engine], env={"VLLM_SERVER_DEV_MODE": "1"})
        with server:
            for seed, model in enumerate(made):
                for way in ways:
                    begin = time.monotonic()
                    told = train(server, model, way, args.steps, seed)
                    record["runs"].append(
                        {"seed": seed, "way": way, "steps": told, "seconds": time.monotonic() - begin}
                    )
                    print(f"{'':12}{curve(told)}", flush=True)
    record["as_it_should_be"] = all(as_it_should_be(run["way"], run["steps"]) for run in record["runs"])
    path = report.save(record, kept=args.seeds >= 5 and bool(args.compare), name=f"grpo-{args.engine}")
    plot(record, path.with_suffix(".png"))
    print(f"{table(record)}\nraw samples and curve: {path.relative_to(ROOT)}, {path.with_suffix('.png').name}")
    rise = min(learnt(run["steps"])[2] for run in record["runs"] if run["way"] == "weightsync")
    return 0 if record["as_it_should_be"] and rise >= ERRORS_AIM else 1


if __name__ == "__main__":
    sys.exit(main())
