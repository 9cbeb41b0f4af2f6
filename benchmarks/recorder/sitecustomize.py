"""First in PYTHONPATH, this notes which lines of ours a process executes, in every thread from the start of each.

``WEIGHTSYNC_RECORDING`` names a folder. Its file ``now`` holds one byte, mapped by every process: the number of the
recording under way, 0 for none. Lines are added to a file named by the process: ``recording line function path``.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: Ends of the folders that hold our packages, in a checkout or where they are installed.
OURS = ("/common/weightsync/", "/site-packages/weightsync/", "/vllm_weightsync/", "/sglang_weightsync/")


class Recorder:
    """Notes the lines of this process, each once a recording."""

    def __init__(self, folder: Path):
        with (folder / "now").open("rb") as file:
            self._now = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._folder = folder
        self._is_ours: dict[str, bool] = {}
        self._seen: set[tuple[int, int, str]] = set()

    def entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A call: what follows is looked at where the code is ours, but not where a module is being imported."""
        path = frame.f_code.co_filename
        ours = self._is_ours.get(path)
        if ours is None:
            ours = self._is_ours[path] = any(folder in path for folder in OURS)
        return self._executed if ours and frame.f_code.co_name != "<module>" else None

    def _executed(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and (number := self._now[0]):
            line = (number, frame.f_lineno, frame.f_code.co_filename)
            if line not in self._seen:
                self._seen.add(line)
                with (self._folder / str(os.getpid())).open("a") as file:
                    file.write(f"{number} {line[1]} {_name(frame.f_code)} {line[2]}\n")
        return self._executed


def _name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")  # of Python 3.11 on


if folder := os.environ.get("WEIGHTSYNC_RECORDING"):
    recorder = Recorder(Path(folder))
    threading.settrace(recorder.entered)
    sys.settrace(recorder.entered)
