"""The trainer's side of the benchmark: a model with two sets of weights, a memcpy of them, a checkpoint."""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tools import models
from weightsync.memory import arenas

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".work" / "bench"
#: Memcpys in a round; the round is compared with their median.
MEMCPYS = 3


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, which is made by ``make`` if it is not there yet, and kept."""
    folder, partial = CACHE / name, CACHE / f"{name}.partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        make(partial)
        partial.rename(folder)
    return folder


def made_of(name: str, model: Callable[[], PreTrainedModel]) -> Path:
    """The folder of a random bfloat16 model with the tests' tokenizer, made once."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        model().to(torch.bfloat16).save_pretrained(folder)
        models.make_tokenizer().save_pretrained(folder)

    return made_once(name, make)


def model_folders(kind: models.Kind) -> list[Path]:
    """Two model folders of one shape with different random weights, made once and kept."""
    return [made_once(f"{kind}-{n}", functools.partial(models.make_model, kind=kind, seed=n)) for n in range(2)]


class Trainer:
    """One module in private memory and one in shared memory, and two sets of weights for them.

    `use` writes a set into the modules' parameters in place, as an optimiser step does; what is pushed is a module.
    """

    def __init__(self, folders: list[Path]):
        self.sets: list[dict[str, torch.Tensor]] = []
        for folder in folders:
            self.module = models.load_reference(folder)
            self.sets.append({name: value.detach().clone() for name, value in self.module.named_parameters()})
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()  # not a mapped file
        self.shared = models.load_reference(folders[0]).share_memory()
        self.nbytes = sum(value.nbytes for value in self.sets[0].values())
        self._buffers = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(2)]
        self._scratch = Path(tempfile.mkdtemp(prefix="weightsync-bench-", dir=arenas.SHM_DIRECTORY))
        self._saved = 0

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def use(self, index: int) -> None:
        """Make the modules hold set ``index``."""
        for module in (self.module, self.shared):
            for name, parameter in module.named_parameters():
                arenas.copy(parameter.data, self.sets[index][name])

    def memcpys(self) -> list[float]:
        """Seconds of copies of all the model's bytes from one warm private buffer to another, one call each.

        By the C library and in one thread: on a few cores faster than torch's `copy_` with any number of threads.
        """
        target, source = self._buffers
        seconds = []
        for _ in range(MEMCPYS):
            start = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self.nbytes)
            seconds.append(time.perf_counter() - start)
        return seconds

    def save(self, index: int) -> Path:
        """Write set ``index`` as a checkpoint to a new folder in shared memory, as one safetensors file."""
        self._saved += 1
        folder = self._scratch / str(self._saved)
        folder.mkdir()
        save_file(self.sets[index], folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def logprobs(self, index: int, prompt: list[int], tokens: list[int]) -> list[float]:
        """Natural log-probabilities that set ``index`` gives ``tokens`` after ``prompt``."""
        self.use(index)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several would wait for each other if an engine's idle loop takes a core
        try:
            return models.reference_logprobs(self.module, prompt + tokens, len(prompt))
        finally:
            torch.set_num_threads(threads)
