"""Atomic writing of files and folders, the lock of a folder, and readers of its files."""

import errno
import glob
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeGuard

from filelock import FileLock

from lightning_rlhf.core.errors import CheckpointError, StorageError
from lightning_rlhf.core.validation import LARGEST

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota and an exceeded limit of a file's size."""
UNFINISHED = ".lightning-rlhf.tmp"
"""End of the temporary name of a file or folder until it is complete; random digits precede it."""
OLD = ".lightning-rlhf.old"
"""End of the name of a folder while another one takes its place."""
WRITTEN = ".lightning-rlhf.files"
"""Name of the list, in a folder written whole, of the names that were written with it."""
NOBODYS = (".DS_Store", ".nfs*", "Thumbs.db", "desktop.ini", f"*{UNFINISHED}")
"""Patterns of the names that file managers, file systems and killed runs leave in any folder."""
MARK = b'<meta name="generator" content="lightning-rlhf">'
"""Text in the first bytes of each HTML page of this program."""
Kind = Literal["file", "new file", "page", "folder"]
REPLACED: dict[Kind, str] = {
    "file": "a file or a link, of which what it points to stays",
    "new file": "nothing",
    "page": "a page of this program",
    "folder": "a folder that this program wrote",
}
"""Kind of what is to be written -> what it replaces."""


def foreign_names(folder: Path, ours: Collection[str] | None = None) -> list[str]:
    """Return the names in a folder that this program did not write, as a user's notes.

    NOBODYS are left out.
    ours: names that it wrote; None for those of the folder's list, where all are foreign if it is
        missing or cannot be read.
    """
    if ours is None:
        ours = ()
        with suppress(OSError, ValueError):
            ours = (folder / WRITTEN).read_text(encoding="utf-8").splitlines()
    others = sorted({*os.listdir(folder)} - {*ours})
    return [name for name in others if not any(fnmatch(name, pattern) for pattern in NOBODYS)]


def replace_folder(temporary: Path, target: Path) -> None:
    """Put a complete folder in the place of `target`, with copies of that one's foreign names.

    Two renames part the old state from the new one: after a kill between them, `restore` takes the
    old folder back. A foreign name that the new folder has too is copied as NAME.orig.
    """
    for name in foreign_names(target):
        copy = temporary / (f"{name}.orig" if os.path.lexists(temporary / name) else name)
        if (target / name).is_dir() and not (target / name).is_symlink():
            shutil.copytree(target / name, copy, symlinks=True)
        else:
            shutil.copy2(target / name, copy, follow_symlinks=False)
        flush(copy)
    old = target.with_name(f".{target.name}.{secrets.token_hex(8)}{OLD}")
    os.replace(target, old)
    os.replace(temporary, target)
    shutil.rmtree(old)


def restore(target: Path) -> None:
    """Rename a replaced folder back where a kill has left none in its place, else delete it."""
    for old in target.parent.glob(f".{glob.escape(target.name)}.*{OLD}"):
        if os.path.lexists(target):
            delete(old)
        else:
            os.replace(old, target)


def refuse_foreign(target: Path, kind: Kind) -> None:
    """Raise StorageError where something stands at `target` that a `kind` does not replace.

    A link is not followed. Nothing is ever written to a path without a name, as "/" and ".".
    """
    found = "link" if target.is_symlink() else "folder" if target.is_dir() else "file"
    match kind, found:
        case ("folder", "folder"):
            is_replaced = (target / WRITTEN).is_file()
        case ("page", "file") if os.access(target, os.R_OK):
            is_replaced = target.is_file() and MARK in target.read_bytes()[:500]
        case _:
            is_replaced = kind == "file" and (found == "link" or target.is_file())
    if target.name in ("", "..") or not (is_replaced or not os.path.lexists(target)):
        allowed = f"no path, or {REPLACED[kind]}"
        raise StorageError(f"{target} was not written: a {found} stands there; allowed: {allowed}")


@contextmanager
def written_whole(target: Path, needed: int | None = None, kind: Kind = "file") -> Iterator[Path]:
    """Yield the path of a new file or folder, which replaces `target` once it is on the disk.

    Where the block fails, `target` is unchanged and the temporary path is deleted. Modes follow the
    umask, whatever library wrote the files.
    needed: approximate number of bytes to be written, for the message of an error.
    kind: what is written; REPLACED tells what it may replace.
    Raises StorageError where `target` cannot be written or replaced, the disk is full, or a file
    would exceed its limit.
    """
    restore(target)
    refuse_foreign(target, kind)
    temporary = target.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    try:
        if kind == "folder":
            make_folder(target.parent)
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        yield temporary
        if kind == "folder":
            (temporary / WRITTEN).write_text("\n".join([*sorted(os.listdir(temporary)), WRITTEN]))
        apply_umask(temporary)
        flush(temporary)
        refuse_foreign(target, kind)  # what came while it was written
        if kind == "folder" and target.is_dir():
            replace_folder(temporary, target)
        else:
            os.replace(temporary, target)
        flush_entry(target.parent)
    except BaseException as error:
        files = [temporary, *temporary.rglob("*")]
        size = sum(file.stat().st_size for file in files if file.is_file())
        if os.path.lexists(temporary):
            delete(temporary)
        if isinstance(error, StorageError) and str(temporary) not in str(error):
            raise  # it names another file
        needs = f"{readable(max(needed or 0, size))}{'' if needed else ' or more'}"
        with storage_errors(target, f". It needs {needs}, and"):
            ours = map(str, (temporary, *temporary.parents))
            if isinstance(error, OSError) and not full_disk(error) and str(error.filename) in ours:
                raise StorageError(f"{target} was not written: {error.strerror}") from error
            raise


@contextmanager
def storage_errors(path: Path | None = None, needs: str = ";") -> Iterator[None]:
    """Raise StorageError in place of a system error about missing space for a file of the block.

    path: what the block writes, where it is a single one; the system's error may name a part of it.
    needs: text between what happened and how to continue, on the size of the file.
    """
    try:
        yield
    except Exception as error:
        is_named = path is None and isinstance(error, StorageError)
        if is_named or (number := full_disk(error)) is None:
            raise
        file = path or getattr(error, "filename", None)
        room, limit = "make room", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if number == errno.EFBIG and limit != resource.RLIM_INFINITY:
            room = f"a file of this process may have {readable(limit)} (ulimit -f). Raise it"
        elif number == errno.EFBIG:
            room = "the file system takes no larger file. Write to another one"
        elif file is not None:
            free = shutil.disk_usage(Path(file).parent).free
            room = f"{readable(free)} are free now. Make room there"
        message = f"{file or 'a file'} was not written: {os.strerror(number)}{needs} {room}"
        raise StorageError(message) from error


def full_disk(error: BaseException | None) -> int | None:
    """Return the error number of a full disk, quota or file size; None for other errors.

    torch and safetensors raise errors of their own: that of torch has the system's error as its
    context, that of safetensors ends its message with the error number.
    """
    while error is not None:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number in FULL:
            return number
        error = error.__cause__ or error.__context__
    return None


def flush(path: Path) -> None:
    """Flush a file, or a folder with everything below it, to survive a loss of power."""
    if path.is_symlink():
        return
    if path.is_dir():
        for inside in path.iterdir():
            flush(inside)
    flush_entry(path)


def flush_entry(path: Path) -> None:
    """Write a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush the new names."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        flush_entry(folder.parent)


def apply_umask(path: Path) -> None:
    """Add the permissions of a new file or folder under the umask to `path` and all below it.

    A library may write through a private temporary file of mode 0600 or folder of mode 0700.
    """
    mask = os.umask(0o077)  # the umask cannot be read without being set
    os.umask(mask)
    for each in (path, *path.rglob("*")):
        mode = stat.S_IMODE(each.stat().st_mode)
        with suppress(PermissionError):  # a file system without modes
            each.chmod(mode | (0o777 if each.is_dir() else 0o666) & ~mask)


def delete(path: Path) -> None:
    """Delete a file, a folder, or a symbolic link itself, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def relative(path: Path, folder: Path) -> str:
    """Return the path from a folder to a file, with .. for folders above, as for a link."""
    return os.path.relpath(path.resolve(), folder.resolve())


def readable(size: int) -> str:
    """Return a number of bytes as text: 1234 -> 1.2 kB, 1234567 -> 1.2 MB, 1234567890 -> 1.2 GB."""
    unit, name = (1e3, "kB") if size < 1e6 else (1e6, "MB") if size < 1e9 else (1e9, "GB")
    return f"{size / unit:.1f} {name}"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock `file` inside; the system frees it when this process ends.

    Only a killed process leaves the file behind, unlocked.
    Raises filelock.Timeout at once where another process holds it.
    """
    with FileLock(file, timeout=0):
        try:
            yield
        finally:
            # Removed before the release, by the holder alone: another process finds it gone.
            file.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file with its line ends unchanged.

    Raises CheckpointError where it cannot be read or is not UTF-8.
    """
    if path.exists() and not path.is_file():  # a pipe without a writer would be read for ever
        raise CheckpointError(f"{path} cannot be read: it is no file")
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: byte {error.start + 1} is no UTF-8") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of a JSONL file and the object in it.

    A last line without a line end is ignored: the process that wrote it was interrupted.
    Raises CheckpointError, with the line number, where a complete line is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged_line(path, number, str(error)) from error
        if not isinstance(found, dict):
            raise damaged_line(path, number, f"it holds no object, but a {type(found).__name__}")
        yield line, found


def is_number(found: object) -> TypeGuard[int | float]:
    """Return whether a value of JSON is a number exact as a float, or NaN or infinite."""
    if isinstance(found, int) and not isinstance(found, bool):
        return abs(found) <= LARGEST
    return isinstance(found, float)


def damaged_line(path: Path, number: int, reason: str) -> CheckpointError:
    """Return the error about line `number`, counted from 1."""
    return CheckpointError(
        f"{path}, line {number}, is damaged: {reason}. Delete that line, or correct it"
    )
