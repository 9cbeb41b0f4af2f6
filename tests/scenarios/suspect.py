"""Processes of scenarios for which faults can be ordered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

#: Seconds for calls that are not part of a scenario.
PATIENCE_S = 30.0


class Fault(NamedTuple):
    """A fault at a point of a process; see `tests/faults/site`.

    A process that is held or stopped continues ``steps`` steps later.
    """

    point: str
    action: str
    where: tuple[tuple[str, Any], ...] = ()
    steps: int = 1


class Suspect:
    """A process for which faults can be ordered."""

    def __init__(self, fault_file: Path):
        self.fault_file, self._fired = fault_file, Path(f"{fault_file}.fired")
        self._goes_on = 0

    def order(self, fault: Fault) -> None:
        """Order a fault for the next time that the process reaches its point."""
        draft = self.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps({"point": fault.point, "action": fault.action, "where": dict(fault.where)}))
        draft.rename(self.fault_file)

    def happened(self) -> bool:
        """Whether the ordered fault has happened."""
        return self._fired.exists()

    def withdraw(self) -> bool:
        """Withdraw the order; whether the fault had not happened yet."""
        try:
            self.fault_file.unlink()
        except FileNotFoundError:
            return False
        return True

    def cancel(self) -> None:
        """Withdraw the order, and release a process that is held."""
        self.fault_file.unlink(missing_ok=True)
        self._fired.unlink(missing_ok=True)
