"""Load plans: where an engine's own loader puts every slice of a checkpoint, repeated as a few grouped copies.

A plan is recorded at the first push of a manifest. That push still goes through the loader, and then every copy of the
plan must find its source at its target, bit by bit: any processing or new layout after loading shows there.

Later pushes are replayed in one pass over the bytes: neighbours are joined, contiguous runs are copied by the C
library, the rest by `TensorCopies`. The lists of copies are made once for each arena, so the cost hardly
depends on the number of tensors. Steps that the engine needs around a load still run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy as shallow
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from weightsync.engine.adapter import LoaderHooks
from weightsync.engine.loading.comparing import PIECE_BYTES, alike, memcmp, rows_of, same, sample, share_of
from weightsync.engine.loading.fake_tensor import Unrecordable
from weightsync.engine.loading.model_memory import Memory, overlap
from weightsync.engine.loading.recorded import Copy, Recording, is_contiguous
from weightsync.engine.loading.recording import record
from weightsync.tensors.boxes import Box, hull, whole
from weightsync.tensors.gpu_copy import TensorCopies
from weightsync.tensors.layout import Entry, Layout, listed
from weightsync.tensors.native_copy import Copies, Run
from weightsync.tensors.scattered import Stream, key, pieces
from weightsync.tensors.subset import Subset, run_cost, widened

#: After every replay about 4 MiB of the model are compared, in pieces, others each time; that takes a millisecond at
#: most. Fewer strided copies are compared, since each takes a step of Python.
_SAMPLE_BYTES: Final = 4 << 20
_SAMPLES: Final = 512
_STRIDED_SAMPLES: Final = 8


class _Bound(NamedTuple):
    """A plan's copies out of one stage. Host memory is addressed, not referenced: the stage's owner keeps it alive.

    ``ends`` counts the pieces of `PIECE_BYTES` up to the end of each run; ``samples`` of them are compared after a
    replay. If every run is one piece, ``columns`` has the sources, targets and sizes of all, to compare them in C.
    ``gathered`` are copies of tensors that lie in several memory domains, and that are first made whole every time.
    """

    copies: Copies
    runs: list[Run]
    ends: list[int]
    columns: list[Sequence[int]]
    samples: int
    strided: TensorCopies
    gathered: list[tuple[Copy, Entry]]


@dataclass
class _Common:
    """What a plan and those that were made of it by `LoadPlan.moved` have in common.

    ``subset`` is what is read of the checkpoint, by the plan and by the loader; ``fitted``: to a link. ``compared`` and
    ``recorded`` count the samples that were compared: of the model, and of what the loader does.
    """

    subset: Subset
    fitted: bool = False
    compared: int = 0
    recorded: int = 0


class LoadPlan:
    """Loads checkpoints of one layout into one model, as its loader would.

    ``loader`` has the names of the tensors that only the loader itself can load, into the parameters in ``fallen``,
    each with its reason; `replay` does the rest. Construction raises `Unrecordable`, or what the loader raises, and
    changes no weight; ``memory`` is as for `record`.
    """

    def __init__(self, loader_hooks: LoaderHooks, layout: Layout, device: torch.device, memory: Memory | None = None):
        self.layout, self._device = layout, device
        self.recording = found = record(loader_hooks, layout.specs, device, memory)
        _refuse_conflicts(found)
        self.fallen = {owner.name: why for owner, why in found.fallen.items()}
        self.loader = frozenset(found.unfollowed).union(*(found.touched[owner] for owner in found.fallen))
        if any(not found.touched[owner] for owner in found.fallen):
            owner = next(owner for owner in found.fallen if not found.touched[owner])
            raise Unrecordable(
                f"{owner.name}: {found.fallen[owner]}, and it is unknown which tensors it is loaded from"
            )
        self._check_loader_alone(loader_hooks)
        self._lay(layout)

    def _lay(self, layout: Layout) -> None:
        self.layout = layout
        self._place()
        self._followed = [entry.spec for entry in layout.entries if entry.spec.name not in self.loader]
        self._common = _Common(Subset(layout, dict(self._read(run_cost(math.inf)))))

    def relaid(self, layout: Layout) -> LoadPlan:
        """The plan for a layout that has the same tensors in another order."""
        other = shallow(self)
        other._lay(layout)
        return other

    def _place(self) -> None:
        """Determine what follows from where the recording says that the weights lie."""
        found, memory = self.recording, self.recording.memory
        self.memory = memory
        groups = found.by_owner().items()
        self.copies = [copy for owner, copies in groups if owner not in found.fallen for copy in copies]
        self.constants = [each for each in found.constants if memory.owner(each.target) not in found.fallen]
        self.runs, self.strided = self._compile()
        self._bound: dict[int, _Bound] = {}
        #: Parameters that are not loaded, or not as a whole, and buffers that are loaded in part.
        self._incomplete = [
            owner
            for owner in memory.owners
            if (owner.parameter or owner in found.written) and memory.gaps(owner, found.written.get(owner, ()))
        ]

    @property
    def subset(self) -> Subset:
        """What is read of the checkpoint, by the plan and by the loader."""
        return self._common.subset

    def moved(self, place: Callable[[torch.Tensor], torch.Tensor]) -> LoadPlan:
        """The same plan for weights that lie where ``place`` says; both take turns with their samples."""
        other = shallow(self)
        other.recording = self.recording.moved(place)
        other._place()
        return other

    def written(self) -> list[torch.Tensor]:
        """What is loaded, in parts. Raises `Unrecordable` unless these are whole parameters and buffers."""
        if self.loader or self.fallen:
            raise Unrecordable(f"only the loader itself can load {listed(self.fallen or self.loader)}")
        if broken := [owner.name for owner in self._incomplete if owner in self.recording.written]:
            raise Unrecordable(f"only a part of {listed(broken)} is loaded")
        found = [part for parts in self.recording.written.values() for part in parts]
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, found)}
        for owner in self.memory.owners:
            if owner not in self.recording.written and any(0 <= owner.start - at < n for at, n in storages.items()):
                raise Unrecordable(f"{owner.name} is not loaded, and shares memory with what is")
        return found

    def _check_loader_alone(self, loader_hooks: LoaderHooks) -> None:
        """Raise `Unrecordable` unless the loader does the same with ``loader`` alone as with the whole checkpoint."""
        if not self.loader:
            return
        specs = [entry.spec for entry in self.layout.entries if entry.spec.name in self.loader]
        specs = [spec for spec in specs if spec.name not in self.recording.unfollowed]
        alone = record(loader_hooks, specs, self._device, self.recording.memory)
        for owner in self.recording.fallen:
            if alone.places(owner) != self.recording.places(owner):
                raise Unrecordable(f"{owner.name} cannot be loaded without the rest of the checkpoint")

    def fit(self, bytes_per_s: float) -> None:
        """Read no more than pays off over a link of this speed. Only the first call has an effect: another subset takes
        new transfers."""
        if not self._common.fitted:
            subset = Subset(self.layout, dict(self._read(run_cost(bytes_per_s))))
            self._common.fitted, self._common.subset = True, subset

    def _read(self, run_bytes: int) -> Iterator[tuple[int, Box]]:
        """For every tensor that is not read as a whole, its number and the box that is read; see `widened`."""
        entries = {entry.spec.name: entry for entry in self.layout.entries}
        read = {name: Box(none, none) for name, entry in entries.items() for none in [(0,) * len(entry.spec.shape)]}
        for copy in self.copies:
            entry = entries[copy.name]
            cut = copy.cut(entry)
            read[copy.name] = hull(read[copy.name], cut.box if cut is not None else whole(entry.spec))
        for name in self.loader:
            read[name] = whole(entries[name].spec)
        for entry in self.layout.entries:
            box = widened(entry, read[entry.spec.name], run_bytes)
            if box is not None:
                yield entry.number, box

    def unread(self) -> list[str]:
        """Names of the tensors that this rank does not load from."""
        read = self.recording.read()
        return [entry.spec.name for entry in self.layout.entries if entry.spec.name not in read]

    def unwritten(self) -> list[str]:
        """Names of parameters that are not loaded, or not as a whole, and of buffers that are loaded in part."""
        scalars = bool(self.recording.unfollowed)
        return sorted(
            owner.name
            for owner in self._incomplete
            if owner in self.recording.written or not (scalars and owner.end - owner.start <= _SCALAR)
        )

    def loads(self, tensor: torch.Tensor) -> bool:
        """Whether every push writes to this parameter or buffer."""
        return self.memory.owner(tensor) in self.recording.written

    def unfilled(self) -> dict[str, set[int]]:
        """Parameters that are not loaded as a whole, with the numbers of dimensions of the tensors loaded into them.

        Scalars are left out: they are scales, which a checkpoint need not have.
        """
        found = self.recording
        dimensions = {entry.spec.name: len(entry.spec.shape) for entry in self.layout.entries}
        return {
            owner.name: {dimensions[name] for name in found.touched.get(owner, ())}
            for owner in self._incomplete
            if owner.parameter and owner not in found.fallen and owner.end - owner.start > _SCALAR
        }

    def lost(self, other: Recording) -> list[str]:
        """Names of parameters that ``other`` loads as a whole, and this plan does not."""
        mine, theirs = self.recording.written, other.written
        return [
            owner.name
            for owner in self.memory.owners
            if owner in theirs
            and not self.memory.gaps(owner, theirs[owner])
            and self.memory.gaps(owner, mine.get(owner, ()))
        ]

    # --- replay

    def _compile(self) -> tuple[list[Run], list[tuple[Copy, Entry]]]:
        """The copies that are runs of bytes, with sources relative to the stage's first byte; and all other copies."""
        entries = {entry.spec.name: entry for entry in self.layout.entries}
        runs: list[Run] = []
        strided: list[tuple[Copy, Entry]] = []
        for copy in self.copies:
            entry, target = entries[copy.name], copy.target
            whole = target.is_contiguous() and is_contiguous(target.shape, copy.strides)
            if self._device.type == "cpu" and whole and copy.dtype == target.dtype:
                runs.append(Run(entry.offset + copy.offset_bytes, target.data_ptr(), target.nbytes))
            else:
                strided.append((copy, entry))
        return sorted(runs), strided

    def runs_from(self, stage: Stream, runs: Iterable[Run] | None = None) -> list[Run]:
        """`runs`, or some of them, with the addresses of this stage, neighbours joined."""
        joined: list[Run] = []
        for at, target, nbytes in self.runs if runs is None else runs:
            for piece in pieces(stage, at, nbytes):
                run = Run(piece.data_ptr(), target, piece.numel())
                target += run.nbytes  # noqa: PLW2901 - where the next piece goes
                last = joined[-1] if joined else Run(0, 0, 0)
                if joined and last.source + last.nbytes == run.source and last.target + last.nbytes == run.target:
                    joined[-1] = Run(last.source, last.target, last.nbytes + run.nbytes)
                else:
                    joined.append(run)
        return joined

    def bind(self, stage: Stream) -> None:
        """Prepare to `replay` out of ``stage``, which holds the stream; a second call does nothing."""
        if key(stage) in self._bound:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._bound[key(stage)] = self._bind(stage)

    def _bind(self, stage: Stream) -> _Bound:
        constants = [(each.target, each.value.expand(each.target.shape)) for each in self.constants]
        pairs, gathered = [*constants], []
        for copy, entry in self.strided:
            found = copy.parts(stage, entry)
            if found is None:
                gathered.append((copy, entry))
            else:
                pairs += found
        runs = self.runs_from(stage)
        ends = list(itertools.accumulate(-(-run.nbytes // PIECE_BYTES) for run in runs))
        nbytes = sum(run.nbytes for run in runs)
        return _Bound(
            Copies(runs),
            runs,
            ends,
            list(zip(*runs, strict=True)) if ends and ends[-1] == len(runs) else [],
            min(_SAMPLES, _SAMPLE_BYTES * ends[-1] // nbytes) if nbytes else 0,
            TensorCopies([target for target, _ in pairs], [source for _, source in pairs]),
            gathered,
        )

    def keep(self, stages: Iterable[Stream]) -> None:
        """Drop what was prepared for any other memory than these stages."""
        keys = set(map(key, stages))
        self._bound = {which: bound for which, bound in self._bound.items() if which in keys}

    def replay(self, stage: Stream) -> None:
        """Copy every slice to where the loader would put it. The number of tensors hardly matters to the time."""
        self.bind(stage)
        bound = self._bound[key(stage)]
        bound.copies.make()
        bound.strided.make()
        self._gather(stage, bound)

    def steps(self, stage: Stream) -> Iterator[None]:
        """As `replay`, some milliseconds of it between two yields."""
        self.bind(stage)
        bound = self._bound[key(stage)]
        yield
        yield from bound.copies.steps()
        yield from bound.strided.steps()
        self._gather(stage, bound)

    def rest(self, stage: Stream) -> None:
        """Make those copies that take more than the part of the stage where a tensor lies."""
        self.bind(stage)
        with torch.no_grad():
            for each in self.constants:
                each.target.copy_(each.value.expand(each.target.shape))
        self._gather(stage, self._bound[key(stage)])

    @staticmethod
    def _gather(stage: Stream, bound: _Bound) -> None:
        with torch.no_grad():
            for copy, entry in bound.gathered:
                copy.target.copy_(copy.part(stage, entry))

    def differs(self, stage: Stream, between: Callable[[], None] = lambda: None) -> str:
        """Name of a tensor that is not, bit by bit, where `replay` would have put it; empty if there is none."""
        entries = {entry.spec.name: entry for entry in self.layout.entries}
        with torch.inference_mode(False), torch.no_grad():
            for copy in [copy for copy, _ in self.strided] if alike(self.runs_from(stage), between) else self.copies:
                between()
                source = copy.part(stage, entries[copy.name])
                if not same(source, copy.target):
                    return copy.name
            for constant in self.constants:
                if not same(constant.value.expand(constant.target.shape), constant.target):
                    return self._name_of(constant.target)
        return ""

    def _name_of(self, target: torch.Tensor) -> str:
        """The name of the parameter that a tensor is part of."""
        owner = self.memory.owner(target)
        return owner.name if owner is not None else ""

    def strays(self, stage: Stream) -> str:
        """Name of a parameter that is not, in a sample, what `replay` put there; another sample each time."""
        self.bind(stage)
        bound, turn = self._bound[key(stage)], self._common.compared
        self._common.compared += 1
        pieces = sample(bound.ends[-1] if bound.ends else 0, turn, bound.samples)
        columns = [column[pieces.start :: pieces.step] for column in bound.columns]
        for piece in pieces if not columns or any(map(memcmp, *columns)) else ():
            at = bisect.bisect_right(bound.ends, piece)
            source, target, nbytes = bound.runs[at]
            into = (piece - (bound.ends[at - 1] if at else 0)) * PIECE_BYTES
            if memcmp(source + into, target + into, min(PIECE_BYTES, nbytes - into)):
                owner = self.memory.owner_at(target + into)
                return owner.name if owner is not None else ""
        with torch.inference_mode(False), torch.no_grad():
            sources, targets = bound.strided.sources, bound.strided.targets
            pairs = [(sources[at], targets[at]) for at in sample(len(targets), turn, _STRIDED_SAMPLES)]
            gathered = [bound.gathered[at] for at in sample(len(bound.gathered), turn, 1)]
            pairs += [(copy.part(stage, entry), copy.target) for copy, entry in gathered]
            for pushed, held in pairs:
                if not same(rows_of(pushed, turn), rows_of(held, turn)):
                    return self._name_of(held)
        return ""

    def changed(self, loader_hooks: LoaderHooks, samples: int = 0) -> str:
        """Record the loader again; returns the name of something that it now does differently, empty if nothing.

        With a number of ``samples``, only with some of the tensors, others in each. Raises as `record`.
        """
        if not samples:
            specs = [entry.spec for entry in self.layout.entries]
            return self.recording.differs(record(loader_hooks, specs, self._device, self.memory))
        count = len(self._followed)
        turns = range(self._common.recorded, self._common.recorded + samples)
        sampled = {at for turn in turns for at in sample(count, turn, share_of(count))}
        specs = [self._followed[at] for at in sorted(sampled)]
        names = frozenset(spec.name for spec in specs)
        self._common.recorded += samples
        if not names:
            return ""
        return self.recording.differs(record(loader_hooks, specs, self._device, self.memory), names)


#: The largest parameter of one element, in bytes.
_SCALAR: Final = 8


def _refuse_conflicts(found: Recording) -> None:
    """Leave parameters of which a part is written twice to the loader: grouped copies have no order."""
    for owner, copies in found.by_owner().items():
        if owner in found.fallen:
            continue
        targets = [copy.target for copy in copies]
        targets += [each.target for each in found.constants if found.memory.owner(each.target) == owner]
        try:
            if overlap(targets):
                found.fallen[owner] = "a part of it is written twice"
        except ValueError as error:
            found.fallen[owner] = str(error)
