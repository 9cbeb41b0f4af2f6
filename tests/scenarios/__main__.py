"""``python -m tests.scenarios``: random scenarios, until so many steps are made or something is untrue."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from pathlib import Path

from tests.scenarios.run import run


def main() -> int:
    """Run; returns 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("--engine", default="reference", choices=["reference", "drafts", "vllm", "sglang"])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument(
        "--grace-s", type=float, help="by how much calls may outlast deadlines; default: 1, real engines: 2"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", action="append", default=[], help="a kind of violation to be counted, and no more")
    parser.add_argument("--no-shrink", action="store_true", help="tell the first sequence as it was found")
    parser.add_argument("--results", type=Path, help="folder for the figures as JSON")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of what goes wrong on purpose
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines end with whoever started them
    found = run(
        asked.engine,
        asked.seed,
        steps=asked.steps,
        limit_s=asked.limit_s,
        grace_s=asked.grace_s,
        known=tuple(asked.known),
        shrink=not asked.no_shrink,
    )
    told = found.as_json()
    if asked.results is not None:
        asked.results.mkdir(parents=True, exist_ok=True)
        (asked.results / f"scenarios-{asked.engine}.json").write_text(json.dumps(told, indent=1) + "\n")
    for violation in found.violations:
        print(f"{violation['kind']}: {violation['untrue']}", *violation["sequence"], "", sep="\n")
    print(f"outcomes: {told['outcomes']}")
    print(
        f"{told['steps']} steps with {asked.engine} in {told['seconds']} s, seed {asked.seed}: "
        f"{len(found.violations)} violations {told['first_seen_after_steps'] or ''}"
    )
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
