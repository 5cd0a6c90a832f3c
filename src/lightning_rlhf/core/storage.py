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


@contextmanager
def written_whole(target: Path, needed: int | None = None) -> Iterator[Path]:
    """A path beside `target`: what is written there takes its place once it is on the disk.

    It may become a file or a folder. Where the block fails, `target` stays as it was and nothing
    is left beside it.
    needed: bytes that are to be written, about; for the message of an error.

    Raises StorageError where the disk holds no more.
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
        if (reason := full_disk(error)) is None:
            raise
        size = f"{readable(max(needed or 0, begun))}{'' if needed else ' or more'}"
        free = readable(shutil.disk_usage(target.parent).free)
        raise StorageError(
            f"{target} was not written: {reason}. It needs {size}, and {free} are free now. Make "
            "room there"
        ) from error


@contextmanager
def full_disk_told() -> Iterator[None]:
    """StorageError in place of a system's error that a file of the block found no room."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        name = getattr(error, "filename", None) or "a file"
        raise StorageError(f"{name} was not written: {reason}. Make room") from error


def full_disk(error: BaseException | None) -> str | None:
    """What the system said of a disk, quota or file size that is used up; None of other errors.

    torch and safetensors raise errors of their own: the first has the system's as its context, the
    second ends its message with the system's number.
    """
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
        if number in FULL:
            return os.strerror(number)
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
    """1234567 -> 1.2 MB, 1234567890 -> 1.2 GB"""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
