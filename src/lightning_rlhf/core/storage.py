"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rlhf.core.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's numbers for a disk, a quota and a limit of a file's size that are used up."""
UNFINISHED = ".tmp"
"""Ending of the name under which a file or folder is written before it takes its place."""


@contextmanager
def written_whole(target: Path, needed: int | None = None) -> Iterator[Path]:
    """A path beside `target`: what is written there takes its place once it is on the disk.

    It may become a file or a folder. Where the block fails, `target` stays as it was and nothing
    is left beside it. Where `target` is a symbolic link, the link stays, and what it points to is
    written. Modes follow the umask, whatever library wrote the files.
    needed: bytes that are to be written, about; for the message of an error.

    Raises StorageError where the disk holds no more, or a file may have no more.
    """
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    beside = target.with_name(f"{target.name}{UNFINISHED}")
    delete(beside)
    try:
        yield beside
        apply_umask(beside)
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


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing, and flush the new names."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        flush_entry(folder.parent)


def apply_umask(path: Path) -> None:
    """Add the permissions that a new file or folder has under the umask, to all below `path` too.

    A library may write through a private temporary file of mode 0600 or folder of mode 0700.
    """
    mask = os.umask(0o077)  # which cannot be read without being set
    os.umask(mask)
    for each in (path, *path.rglob("*")):
        mode = stat.S_IMODE(each.stat().st_mode)
        wanted = mode | (0o777 if each.is_dir() else 0o666) & ~mask
        if wanted != mode:
            with suppress(PermissionError):  # a file system without modes
                each.chmod(wanted)


def delete(path: Path) -> None:
    """Delete a file, a folder, or a symbolic link itself, if it is there."""
    if path.is_dir() and not path.is_symlink():
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
