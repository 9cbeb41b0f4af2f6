"""Agreement of vLLM engines in lockstep, whose replicas take every step together (`protocol.lockstep`).

`install` adds a method to the engine core: a yes-or-no question that the cores of all servers answer in the store that
they share. `compat_waves` checks the names that are used here, which it uses too.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from vllm_weightsync import compat_waves

AGREE: Final = "weightsync_agree"
_YES, _NO = b"yes", b"no"


def _agree(self: Any, question: str, yes: bool, timeout_s: float) -> Future[bool]:
    """Whether all replicas have said yes; no if one has said no, or says nothing for ``timeout_s`` seconds.

    Every replica that asks gets the same answer.
    """
    answer: Future[bool] = Future()
    threading.Thread(
        target=_await_answer, args=(self, question, yes, timeout_s, answer), name="weightsync-agree", daemon=True
    ).start()
    return answer


def _await_answer(core: Any, question: str, yes: bool, timeout_s: float, answer: Future[bool]) -> None:
    try:
        store = core.dp_store.clone()  # whoever waits for a store blocks its other users in this process
        if not yes:
            compat_waves.decide(store, question, _NO)
        elif store.add(compat_waves.key(question, "yes"), 1) == core.dp_size:
            compat_waves.decide(store, question, _YES)
        answer.set_result(_decided(store, question, timeout_s) == _YES)
    except Exception as error:
        answer.set_exception(error)


def _decided(store: Any, question: str, timeout_s: float) -> bytes:
    key = compat_waves.key(question, "decided")
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:  # a dead store also fails below
        return compat_waves.decide(store, question, _NO)
    answer: bytes = store.get(key)
    return answer


def install() -> None:
    """Add the method to the engine core; called in every process of vLLM, maybe more than once."""
    from vllm.v1.engine.core import DPEngineCoreProc

    setattr(DPEngineCoreProc, AGREE, _agree)
