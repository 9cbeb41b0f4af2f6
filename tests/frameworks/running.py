"""Programs of other frameworks, run beside vLLM's packages, and what a server serves after them."""

import os
import subprocess

from tools import models, servers, versions
from weightsync import Sender

PYTHON = servers.ROOT / ".venv-vllm" / "bin" / "python"
PATIENCE_S = 300
#: The newest TRL; what it needs, Hugging Face's Trainer needs too.
NEWEST = list(versions.TRL)[-1]
PROMPT = list(b"count 7: ")
#: Mean difference of logprobs; engine and trainer round bfloat16 in different orders.
ROUNDING = 0.1


def label(url):
    with Sender([url]) as sender:
        return sender.status()[url].version


def apart(server, model):
    """How far the server's logprobs are from the model's."""
    tokens, logprobs = servers.greedy(server, PROMPT, 16)
    own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
    return sum(abs(x - y) for x, y in zip(logprobs, own, strict=True)) / len(own)


def run(*command, trl="", vllm=versions.VERSIONS["vllm"][-1], processes=1, check=True):
    """Run ``python COMMAND``, or as many processes by torchrun, with a version of TRL or of vLLM; return what ended."""
    paths = [versions.trl_packages(trl)] if trl else []
    beside = versions.environment("vllm", versions.TRL[trl] if trl else vllm).get("PYTHONPATH")
    launcher = [PYTHON]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {
        **os.environ,
        **servers.environment_of("vllm", 1),
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, *([beside] if beside else []), servers.ROOT))),
        "ACCELERATE_USE_CPU": "1",
    }
    done = subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False
    )
    if check:
        assert done.returncode == 0, done.stderr[-5000:]
    return done
