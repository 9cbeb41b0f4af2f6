"""The exchange of what two sets of weights hold: of every pair of tensors, the data."""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple

import torch

#: A tensor of this size may be a handle, by which something is found that torch does not see.
SMALL_BYTES: Final = 64


class Link(NamedTuple):
    """What a mapping of the served model held under a key."""

    held: Any
    key: Any
    value: Any


class Swap:
    """Pairs of tensors, the first of the served model, the second of the standby.

    They are exchanged by their data, so that whoever else refers to one of them sees it too.
    """

    #: Whether the standby holds the version before after an exchange.
    keeps_before: ClassVar[bool] = True

    def __init__(self) -> None:
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.links: list[Link] = []
        self.torn = False
        """Whether an exchange failed, and could not be taken back."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of one set."""
        return sum(one.nbytes for one, _ in self.tensors)

    def is_current(self) -> bool:
        """Whether everything that was reached through names of the served model is still there."""
        return all(held.get(key) is value for held, key, value in self.links)

    def put_back(self) -> bool:
        """Put everything that was reached through names of the served model back there; returns whether it was not."""
        gone = [link for link in self.links if link.held.get(link.key) is not link.value]
        for held, key, value in gone:
            held[key] = value
        return bool(gone)

    def exchange(self) -> None:
        """Exchange what is paired. If that fails, all is as before, and the error is raised; or it is `torn`."""
        both = [(one, one.data, other, other.data) for one, other in self.tensors]
        try:
            for one, data, other, mirror in both:
                _set_data(one, mirror, other, data)
        except BaseException:
            for one, data, other, mirror in both:
                try:
                    one.data, other.data = data, mirror
                except Exception:
                    self.torn = True
            raise

    def free(self) -> None:
        """Give back the memory of the standby's tensors, which nobody uses any more."""
        for _, other in self.tensors:
            if other.nbytes > SMALL_BYTES:  # the owner of a handle may free something by it
                other.data = other.data.new_empty(0)


def _set_data(one: torch.Tensor, data: torch.Tensor, other: torch.Tensor, mirror: torch.Tensor) -> None:
    one.data = data
    other.data = mirror
