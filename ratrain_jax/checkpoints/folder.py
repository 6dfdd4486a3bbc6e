"""The folder of a run's checkpoints: who writes in it, and which steps are there.

What is removed gets another name first, one that the next writer clears away; so a checkpoint is there whole or not at
all whenever the process ends.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import shutil
import socket
from pathlib import Path

from ratrain_jax.checkpoints.storage import UNFINISHED
from ratrain_jax.errors import CheckpointError

LOCK = "lock"


class Folder:
    """A folder held by one writer; the kernel frees it when the process ends, however that happens.

    Args:
        path: made if it is not there.

    Attributes:
        path: the same.

    Raises:
        CheckpointError: another process, or other code in this one, holds it; or it cannot be written in.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot hold checkpoints: {error}.") from error
        try:
            self._take()
        except BaseException:
            self._lock.close()
            raise
        self.clear()

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read(200).strip() or "another process"
            raise CheckpointError(
                f"{self.path} is being written in by {holder}. A folder takes one run at a time: end that one, or use"
                " another folder."
            ) from None
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {now}\n")
        self._lock.flush()

    def at(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were written to their end, ascending."""
        names = (entry.name for entry in self.path.iterdir() if entry.is_dir())
        # Another spelling of a number is not ours.
        return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))

    def remove(self, step: int) -> None:
        """Removes a checkpoint, if it is there."""
        path = self.at(step)
        if path.exists():
            doomed = path.with_name(f"{step}{UNFINISHED}-removed")
            path.rename(doomed)
            shutil.rmtree(doomed)

    def clear(self) -> None:
        """Removes what was not written, or not removed, to its end."""
        for path in self.path.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path)

    def close(self) -> None:
        """Lets others write."""
        self._lock.close()
