"""A second set of the weights of one rank: loaded while the engine serves, exchanged with what is served in the pause.

Both are made by the engine's own code, so it does not matter what that does to weights after loading. After an exchange
the standby holds the version before, until the next push is loaded there. Where weights must stay at their addresses,
those of the standby are copied there instead, and the version before is gone.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, StandbyHooks
from weightsync.engine.exchange import slices
from weightsync.engine.exchange.pairs import Rules, Unlike, lacks_memory
from weightsync.engine.exchange.slices import Sliced, Steps, Unfinished
from weightsync.engine.exchange.swap import Swap
from weightsync.engine.exchange.together import Together
from weightsync.engine.loading.complete import Complete
from weightsync.engine.loading.fake_tensor import Unrecordable
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.planned import Arriving, Planned, nbytes_of
from weightsync.engine.loading.works import Made, filled, loaded, proving
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed, WeightSyncError
from weightsync.memory import arenas
from weightsync.tensors.layout import Layout, listed
from weightsync.tensors.scattered import Stream

logger = logging.getLogger(__name__)

#: How often in turn an engine may fail to make a standby, or one that is like its model, before that is given up: a
#: load of its own way in between may mend what someone else did to the model.
_TRIES: Final = 2
#: Of the memory that the standby takes, how much must be free before it is made.
_ROOM: Final = 1.1


class Standby:
    """The second set of weights of one rank. All methods belong to the engine's loop.

    It is either another model, which the engine's loader loads (`load`), or memory that a load plan fills (`fill`).
    """

    def __init__(self, adapter: Adapter, complete: Complete):
        self._adapter, self._complete = adapter, complete
        self.together = Together()
        """What the engine's loader asks of all ranks."""
        #: Of all tensors that were ever loaded.
        self._names: set[str] = set()
        self._noted: Layout | None = None
        self._hooks: StandbyHooks | None = None
        self._model: torch.nn.Module | None = None
        self._set: Swap | None = None
        #: Context in which it is exchanged.
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._began = 0.0
        self._work: Sliced[Made] | Steps[Made] | None = None
        #: The push that is being loaded, or that was; whether all of it has been; whether it is what is served. The
        #: standby holds the version before then.
        self._push, self._loaded, self._served = "", False, False
        #: What fills it with a push while that arrives.
        self._arriving: Arriving | None = None
        #: Of the last rollback: its identity, and the push before.
        self._back: tuple[str, str] | None = None
        #: Whether any push was loaded into a standby.
        self._used, self._way = False, "exchanged"
        #: The push that is loaded the engine's own way.
        self._passed = ""
        self.why = ""
        """Why the last push was not loaded into a standby; empty if it was, or none was tried."""
        #: How often it is tried to make one.
        self._tries = _TRIES
        self.seconds = 0.0
        """In which the engine stood still for slices since this was last set."""
        self.longest_call = ""
        """See `http.RankStatus`."""

    @property
    def push(self) -> str:
        """The push that is being loaded, or is loaded; empty if none is."""
        return self._push

    @property
    def used(self) -> bool:
        """Whether the last push was loaded through the standby."""
        return self._used and not self.why

    @property
    def way(self) -> str:
        """How what is loaded here gets served, for people."""
        return self._way

    @property
    def without(self) -> str:
        """Why not, for people who read how pushes are loaded; empty if they were, or there never is a standby."""
        return f"; no standby: {self.why}" if self.why else ""

    def load(
        self,
        push: str,
        layout: Layout,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        check: Callable[[torch.nn.Module], None],
        timeout_s: float = math.inf,
    ) -> None:
        """Load ``weights`` by the engine's own loader for the time of a slice; ``check`` may refuse the loaded model.

        Raises `Unfinished` until they are loaded, or why they cannot be. Returns at once if the engine is to load them
        in the pause, see `why`; that is so if half of ``timeout_s`` has passed.
        """
        self._advance(push, lambda: self.begin_to_load(push, layout, weights, check), timeout_s)

    def fill(self, push: str, plan: LoadPlan, hooks: LoaderHooks, staged: Staged, timeout_s: float = math.inf) -> None:
        """As `load`, by ``plan``, which fits the served model."""
        arrived = self._arriving if self._arriving is not None and self._arriving.push == push else None

        def begin(made: Planned | None, rules: Rules) -> Steps[Made]:
            return Steps(filled(plan, rules, made, staged, arrived))

        self._advance(push, lambda: self.begin_to_fill(plan, hooks, begin), timeout_s)

    def prove(
        self,
        push: str,
        plan: LoadPlan,
        hooks: LoaderHooks,
        staged: Staged,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        check: Callable[[torch.nn.Module], None],
        timeout_s: float = math.inf,
    ) -> None:
        """As `load`, into the memory that ``plan`` is to fill, to compare what the loader and the plan do."""

        def begin(made: Planned | None, rules: Rules) -> Sliced[Made]:
            return proving(plan, rules, made, hooks.load, weights, staged, check)

        self._advance(push, lambda: self.begin_to_fill(plan, hooks, begin), timeout_s)

    def make(self, name: str, begin: Callable[[], str | None], timeout_s: float) -> None:
        """Make the standby before any push is there, as `load` does; ``name`` stands for that of a push.

        It then holds no version. A failure is not counted: the next push may have more luck.
        """
        if self._work is None and (self._set is not None or self._model is not None):
            return
        before = self._used, self._tries, self.why
        try:
            self._advance(name, begin, timeout_s)
        finally:
            self._used, self._tries, self.why = before
        self.forget()

    def follow(self, plan: LoadPlan) -> None:
        """See `Planned.follow`."""
        if isinstance(self._set, Planned):
            self._set.follow(plan)

    def arriving(self, push: str, plan: LoadPlan, bucket_bytes: int) -> Arriving | None:
        """What fills the standby while ``push`` arrives; None if it is to be filled by `fill` alone.

        What it held is no version any more.
        """
        self.forget()
        found = self._set
        if isinstance(found, Planned) and found.plans[0] is plan and not found.torn and found.is_current():
            self._arriving = found.arriving(push, bucket_bytes)
        return self._arriving

    def _advance(self, push: str, begin: Callable[[], str | None], timeout_s: float) -> None:
        if (push == self._push and self._loaded) or (push and push == self._passed):
            return
        if push != self._push or self._work is None:
            self.stop()
            found = begin() if self._tries else self.why
            self.why = found or ""
            if found is not None:
                self._passed = push
                return
            self._push, self._loaded, self._served = push, False, False
            self._began, self.seconds = time.monotonic(), 0.0
        assert self._work is not None
        if time.monotonic() - self._began > timeout_s / 2:
            self.stop()
            self._passed, self.why = push, f"it was not loaded within {timeout_s / 2:g} s, half of the time of the push"
            return
        made, start = self._set is None and self._model is None, time.perf_counter()
        try:
            ended = self._work.advance(slices.SLICE_S)
        except WeightSyncError:
            self._drop()
            raise
        except Exception as error:
            self._failed(error, made)
            return
        finally:
            self.seconds += time.perf_counter() - start
        if not ended:
            raise Unfinished(f"rank {self._adapter.rank} is still loading push {push} into its standby")
        self.longest_call = self._work.stood_still
        self._model, self._set = self._work.result()
        self._work, self._loaded, self._used, self._tries = None, True, True, _TRIES
        self._way = "exchanged" if self._set.keeps_before else "copied"

    def _lacks(self, layout: Layout) -> set[str]:
        """Tensors that the served model may hold, and a push leaves as they are."""
        known = self._complete.known()
        expected = {spec.name for spec in known.specs} - known.optional if isinstance(known, Expected) else set()
        return (expected | self._names) - {spec.name for spec in layout.specs}

    def _note_names(self, layout: Layout) -> None:
        if layout is not self._noted:  # of many tensors the names take longer than an exchange
            self._names.update(spec.name for spec in layout.specs)
            self._noted = layout

    def pass_by(self, layout: Layout) -> None:
        """A push is about to be loaded the engine's own way: what the standby holds is not the version before."""
        self.forget()
        self._used = False
        self._note_names(layout)

    def begin_to_load(
        self,
        name: str,
        layout: Layout,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        check: Callable[[torch.nn.Module], None],
    ) -> str | None:
        """Begin to `load` the push ``name``, or to `make` a model by that name; why not, or an empty text, if the
        engine is to load its own way."""
        sealed = self._adapter.loader_hooks()
        hooks = "" if isinstance(sealed, str) else sealed.standby()
        if isinstance(hooks, str):
            return hooks
        if lacks := self._lacks(layout):
            return f"the push lacks {listed(lacks)}, which the standby may hold of another version"
        if self._model is None:
            self.release()
        model = self._model
        if model is None and (lack := self._too_little_free(hooks.nbytes, hooks.ranks)):
            return lack

        def work() -> Made:
            return loaded(hooks, model, weights, check, self._adapter.device, self.together.loads(name))

        self._hooks, self._set, self._around = hooks, None, nullcontext
        # Also if the push is called off: its tensors may be in the standby by then.
        self._note_names(layout)
        self._work = Sliced(work, hooks.settings)
        return None

    def begin_to_fill(
        self, plan: LoadPlan, hooks: LoaderHooks, begin: Callable[[Planned | None, Rules], Sliced[Made] | Steps[Made]]
    ) -> str | None:
        """``begin`` to do something with the memory for ``plan``; why not, or an empty text, if there can be none.

        ``begin`` is passed what was made for the plan, if it was.
        """
        movable = hooks.movable
        if isinstance(movable, str):
            return movable
        found = self._set if isinstance(self._set, Planned) else None
        if found is None or found.plans[0] is not plan or not found.is_current():
            self.release()
            found = None
            try:
                nbytes = nbytes_of(plan)
            except Unrecordable as error:
                return str(error)
            if lack := movable.lacks() or self._too_little_free(nbytes, movable.ranks):
                return lack
        self._around, self._work = hooks.around, begin(found, movable.rules)
        self._note_names(plan.layout)
        return None

    def _too_little_free(self, nbytes: int, ranks: int) -> str:
        free = arenas.free_bytes(self._adapter.device)
        each = f" in each of {ranks} ranks" if ranks > 1 else ""
        return f"it takes {nbytes} bytes{each}, and {free} are free" if free < _ROOM * nbytes * ranks else ""

    def plan(self, plan: LoadPlan | None) -> LoadPlan | None:
        """``plan``, or its counterpart, whichever is for what is served now."""
        found = self._set
        return found.plans[0] if isinstance(found, Planned) and any(plan is each for each in found.plans) else plan

    def keep(self, stages: Sequence[Stream]) -> None:
        """As `LoadPlan.keep`, for the plan that fills the standby. Another thread may call this."""
        if isinstance(found := self._set, Planned):
            found.keep(stages)
        if self._arriving is not None and not self._arriving.lies_in(stages):
            self._arriving = None

    def _failed(self, error: Exception, made: bool) -> None:
        """After an error in the work: where there can be no standby, go the engine's own way, else raise."""
        if self._work is not None:
            self._work.cancel()  # if it has not ended: what failed was to go on with it, or to stop it
        rank, text = self._adapter.rank, f"{type(error).__name__}: {error}"
        if made or isinstance(error, Unlike):
            self._tries -= not lacks_memory(error)
            self._passed, self.why = self._push, text
            self._drop()
            logger.warning("rank %d has no standby, and loads in the pause: %s", rank, text)
            return
        self._drop()  # it may be in no state to be loaded again
        raise TransferFailed(
            f"rank {rank} failed while loading into its standby, and nothing was changed: {text}"
        ) from error

    def _drop(self) -> None:
        made, modules = not isinstance(self._set, Planned), None
        if self._model is not None and self._hooks is not None:
            modules = [weakref.ref(module) for module in self._model.modules()]
            self._hooks.discard(self._model)
        if self._set is not None:
            self._set.free()
        self._work = self._model = self._set = self._hooks = None
        self._push, self._loaded, self._served, self._back = "", False, False, None
        # Layers and their weight loaders refer to each other: if the engine has not parted them, only the garbage
        # collector frees what they packed. It reads every object of the process.
        if made and (modules is None or any(module() is not None for module in modules)):
            gc.collect()
        arenas.trim(self._adapter.device)

    def stop(self) -> None:
        """Stop to load; what has been loaded and is not served is no version any more."""
        if not self._served:
            self.forget()

    def forget(self) -> None:
        """What the standby holds is no version any more, or not the one before."""
        if self._work is not None:
            self._work.cancel()
        self._work = self._arriving = None
        self._push, self._loaded, self._served, self._back = "", False, False, None

    def release(self) -> None:
        """Give back the memory of the standby; the next push makes another."""
        self.stop()
        if self._set is not None or self._model is not None:
            self._drop()

    def loads(self, push: str) -> bool:
        """Whether a part of a push is loaded."""
        return self._work is not None and push == self._push

    def holds(self, push: str) -> bool:
        """Whether all of a push is loaded, and not served yet."""
        torn = self._set is not None and self._set.torn
        return bool(push) and push == self._push and self._loaded and not self._served and not torn

    def holds_before(self) -> bool:
        """Whether it holds the version that was served before the one that is."""
        return self._served and self._set is not None and self._set.keeps_before and not self._set.torn

    def is_current(self) -> bool:
        """Whether what is served is still what the standby was compared with."""
        return self._set is not None and self._set.is_current()

    def exchange(self) -> None:
        """Serve what is loaded here. Raises what that raises; if this then `holds` the push, all is as before."""
        self._swap(self._push, served=True)

    def _swap(self, push: str, *, served: bool) -> None:
        assert self._set is not None
        with self._around():
            self._set.exchange()
            self._push, self._served = push, served
        if self._hooks is not None:
            self._hooks.served()

    def go_back(self, rollback: str) -> None:
        """Serve the version before, as `exchange` does."""
        self._back = rollback, self._push
        self._swap(rollback, served=True)

    def undo(self, push: str) -> bool:
        """Serve the version before ``push``, or a rollback, again or still; returns whether it is served."""
        if self.holds(push):
            return True
        back, before = self._back or ("", "")
        if push and push == back and self._push == before:
            return self.holds_before()  # it has not gone back
        if not (push and push == self._push and self.holds_before()):
            return False
        try:
            self._swap(before if push == back else push, served=push == back)
        except Exception:
            logger.exception("rank %d could not go back to the version before", self._adapter.rank)
            return False
        return True
