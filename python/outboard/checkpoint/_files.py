"""Files that are whole or not there: written under another name, synced, renamed; and files that count bytes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from outboard.checkpoint._progress import Progress

Buffer = bytes | bytearray | memoryview

#: One piece of a long write, so that progress is seen within a large tensor.
_PIECE = 16 << 20


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that takes `path`'s place once the block has ended without an exception.

    Until then, and for good if the process is killed, `path` is what it was. A link is followed.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(target.parent)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk; some file systems cannot, and need not."""
    with suppress(OSError):
        sync_file(folder)


class CountingFile:
    """A binary file that tells what has been written to it, or read from it.

    It has what torch's readers and writers of files call, and nothing else.
    """

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file, self._progress = file, progress

    def write(self, data: Buffer) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._file.write(piece)
            self._progress.advance(len(piece))
        return len(view)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self._progress.advance(len(data))
        return data

    def readline(self, size: int = -1) -> bytes:
        """Read a line."""
        data = self._file.readline(size)
        self._progress.advance(len(data))
        return data

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer until it is full or the file ends."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + _PIECE])  # type: ignore[attr-defined]
            if not count:
                break
            done += count
            self._progress.advance(count)
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in the file."""
        return self._file.tell()
