"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rlhf.core.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's numbers for a disk, a quota and a limit of a file's size that are used up."""


@contextmanager
def written_whole(target: Path, needed: int | None = None) -> Iterator[Path]:
    """A path beside `target`: what is written there takes its place once it is on the disk.

    It may become a file or a folder. Where the block fails, `target` stays as it was and nothing
    is left beside it.
    needed: bytes that are to be written, about; for the message of an error.

    Raises StorageError where the disk holds no more, or a file may have no more.
    """
    beside = target.with_name(f"{target.name}.tmp")
    delete(beside)
    try:
        yield beside
        flush(beside)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(beside, target)
        flush_entry(target.parent)
    except BaseException as error:
        begun = size_of(beside)
        delete(beside)
        if (number := full_disk(error)) is None:
            raise
        size = f"{readable(max(needed or 0, begun))}{'' if needed else ' or more'}"
        raise StorageError(
            f"{target} was not written: {os.strerror(number)}. It needs {size}, and "
            f"{room(number, target.parent)}"
        ) from error


@contextmanager
def full_disk_told(path: Path | None = None) -> Iterator[None]:
    """StorageError in place of a system's error that a file of the block found no room.

    path: the file, where the block writes one alone; the system's error often does not name it.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if (number := full_disk(error)) is None:
            raise
        name = path or getattr(error, "filename", None)
        where = Path(name).parent if name else None
        raise StorageError(
            f"{name or 'a file'} was not written: {os.strerror(number)}; {room(number, where)}"
        ) from error


def room(number: int, folder: Path | None) -> str:
    """How much there is of what the system's error `number` found used up, and the way on."""
    if number == errno.EFBIG:
        limit = largest_file()
        if limit is None:
            return "the file system takes no larger file. Write to another one"
        return f"a file of this process may have {readable(limit)} (ulimit -f). Raise that limit"
    if folder is None:
        return "make room"
    return f"{readable(shutil.disk_usage(folder).free)} are free now. Make room there"


def largest_file() -> int | None:
    """Bytes that the system allows to a file of this process; None where it sets no limit."""
    import resource  # not there on Windows, which has no such limit either

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def full_disk(error: BaseException | None) -> int | None:
    """The system's number for a disk, quota or file size that is used up; None of other errors.

    torch and safetensors raise errors of their own: the first has the system's as its context, the
    second ends its message with the system's number.
    """
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
        if number in FULL:
            return number
        error = error.__cause__ or error.__context__
    return None


def flush(path: Path) -> None:
    """Until a file, or a folder with everything below it, would survive a loss of power."""
    if path.is_dir():
        for inside in path.iterdir():
            flush(inside)
    flush_entry(path)


def flush_entry(path: Path) -> None:
    """A file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes in a file, or in all files of a folder; 0 where there is nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def readable(size: int) -> str:
    """1234 -> 1.2 kB, 1234567 -> 1.2 MB, 1234567890 -> 1.2 GB"""
    if size < 1e6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
