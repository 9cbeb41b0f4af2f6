"""Hugging Face: a callback that pushes while a ``Trainer`` trains, in one line::

    Trainer(..., callbacks=[PushCallback(["http://127.0.0.1:8000"])])

A loop of Accelerate calls `PushCallback.push` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from weightsync.errors import UnsupportedOption
from weightsync.trainer.results import PushResult
from weightsync.trainer.sender import Sender

try:
    from transformers import TrainerCallback
except ImportError as error:
    needed = "weightsync.integrations.huggingface needs transformers: pip install transformers accelerate"
    raise ImportError(f"{needed} ({error})") from error


class PushCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types where this is checked
    """Pushes the model when training begins, every ``steps`` steps, and when training ends.

    With ``on_evaluate`` it also pushes after each evaluation. ``options`` are those of `Sender`, which is built when
    training begins: then the processes of a distributed trainer have met, and all of them push together. A version is
    labelled with its step, such as ``"step 100"``. A push that fails ends the training with its `WeightSyncError`.
    """

    def __init__(self, engines: Sequence[object], *, steps: int = 1, on_evaluate: bool = False, **options: Any):
        if steps < 0:
            raise UnsupportedOption("steps: give the number of steps between two pushes, or 0 for none")
        self._engines, self._steps, self._evaluates, self._options = engines, steps, on_evaluate, options
        self._sender: Sender | None = None
        #: The result of the last push.
        self.pushed: PushResult | None = None

    def push(self, model: nn.Module, step: int) -> PushResult:
        """Push ``model`` as version ``"step {step}"``, unless that was pushed last; every process calls this.

        Raises `WeightSyncError`.
        """
        label = f"step {step}"
        if self._sender is None:
            self._sender = Sender(self._engines, **self._options)
        if self.pushed is None or self.pushed.version != label:
            self.pushed = self._sender.push(model, version=label)
        return self.pushed

    def close(self) -> None:
        """Close the sender; the next push builds another one. Idempotent."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push what training starts from, so that engines and model are known to fit."""
        self.push(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push after every ``steps`` steps."""
        if self._steps and state.global_step % self._steps == 0:
            self.push(kwargs["model"], state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push what was evaluated."""
        if self._evaluates:
            self.push(kwargs["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push what was trained."""
        self.push(kwargs["model"], state.global_step)
        self.close()
