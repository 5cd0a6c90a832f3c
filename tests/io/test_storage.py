"""What is written whole is there whole, or not at all; a full disk says so."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from lightning_rlhf.core.errors import CheckpointError, StorageError
from lightning_rlhf.io.storage import WRITTEN, Kind, read_text, storage_errors, written_whole


def test_a_folder_keeps_what_it_did_not_write(tmp_path: Path) -> None:
    """Of what is in it, only the names of its list are replaced or deleted."""
    target, files = tmp_path / "a", [WRITTEN, "model", "stale"]
    (target / "notes" / "inner").mkdir(parents=True)
    (target / "notes" / "inner" / "link").symlink_to("nowhere")
    (target / WRITTEN).write_text("\n".join(files))
    for name in ("stale", "model", "new"):
        (target / name).write_text("before")
    with written_whole(target, kind="folder") as temporary:
        for name in ("model", "new"):
            (temporary / name).write_text("written")
    assert {p.name: p.read_text() for p in target.iterdir() if p.is_file()} == {
        "model": "written", "new": "written", "new.orig": "before",
        WRITTEN: f"model\nnew\n{WRITTEN}",
    }  # fmt: skip
    assert os.readlink(target / "notes" / "inner" / "link") == "nowhere"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kills_at", [1, 2])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path: Path, kills_at: int) -> None:
    """Before the first and before the second of its renames; the next writing repairs it."""
    target, renames, replace = tmp_path / "a", [], os.replace
    target.mkdir()
    (target / WRITTEN).write_text(WRITTEN)
    (target / "notes").write_text("mine")

    def killed(*paths: Path) -> None:
        renames.append(paths)
        if len(renames) == kills_at:
            os._exit(9)
        replace(*paths)

    if (child := os.fork()) == 0:
        os.replace = killed
        with written_whole(target, kind="folder") as temporary:
            (temporary / "model").write_text("lost")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert target.exists() == (kills_at == 1)
    with written_whole(target, kind="folder") as temporary:
        (temporary / "model").write_text("new")
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "model": "new", "notes": "mine", WRITTEN: f"model\n{WRITTEN}",
    }  # fmt: skip


PAGE = '<!doctype html>\n<html lang="en">\n<meta name="generator" content="lightning-rlhf">'
STANDING: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None, "link": lambda path: path.symlink_to(path.parent / "other"),
    "file": lambda path: path.write_text("mine"), "own page": lambda path: path.write_text(PAGE),
    "folder": lambda path: (path.mkdir(), (path / "config.json").write_text('{"model": "gpt2"}')),
    "own folder": lambda path: (path.mkdir(), (path / WRITTEN).touch()), "pipe": os.mkfifo,
}  # fmt: skip
"""What may stand at a path -> a function that makes it."""


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("there", STANDING)
def test_what_is_written_over(tmp_path: Path, kind: Kind, there: str) -> None:
    """What is refused stays as it is."""
    replaced = {("file", "file"), ("file", "own page"), ("file", "link"), ("page", "own page"),
                ("folder", "own folder")}  # fmt: skip
    allowed = there == "nothing" or (kind, there) in replaced
    other, target = tmp_path / "other", tmp_path / "a"
    other.write_text("another's")
    STANDING[there](target)
    before = [(path, path.lstat().st_ino) for path in sorted(tmp_path.rglob("*"))]
    refused = pytest.raises(StorageError, match="stands there; allowed: ")
    with nullcontext() if allowed else refused, written_whole(target, kind=kind) as temporary:
        (temporary / "new" if kind == "folder" else temporary).write_text("new")
    assert other.read_text() == "another's"
    if allowed:
        assert not target.is_symlink()
        assert (target / "new" if kind == "folder" else target).read_text() == "new"
    else:
        assert [(path, path.lstat().st_ino) for path in sorted(tmp_path.rglob("*"))] == before


@pytest.mark.parametrize("path", ["/", "a/.."])
def test_what_no_file_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    for gone in ("shutil.rmtree", "os.replace", "pathlib.Path.unlink"):
        monkeypatch.setattr(gone, lambda *_: pytest.fail("it would be deleted"))
    refused = pytest.raises(StorageError, match="was not written")
    with refused, written_whole(Path(path)):
        pytest.fail("it begins to write")


def test_what_comes_while_it_is_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with pytest.raises(StorageError), written_whole(target) as temporary:  # noqa: PT012
        temporary.write_text("new")
        (target / "mine").mkdir(parents=True)
    assert list(tmp_path.iterdir()) == [target]
    assert list(target.iterdir()) == [target / "mine"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Also of a private file of safetensors, and of a copied private folder."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "page").touch(mode=0o600)
    umask, file, folder = 0o022, 0o644, 0o755
    before = os.umask(umask)
    try:
        with written_whole(tmp_path / "a", kind="folder") as temporary:
            shutil.copytree(private, temporary, dirs_exist_ok=True)
            save_file({"x": torch.zeros(1)}, temporary / "weights.safetensors")
        with written_whole(tmp_path / "b") as temporary:
            save_file({"x": torch.zeros(1)}, temporary)
        assert os.umask(umask) == umask, "it is as it was"
    finally:
        os.umask(before)
    with written_whole(tmp_path / "c", kind="folder") as temporary:
        temporary.chmod(0o2777)  # a folder whose new files belong to its group
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o2777
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a").iterdir()}
    assert modes == {"page": file, "weights.safetensors": file, WRITTEN: file}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == folder
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == file


def test_what_fails_leaves_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), written_whole(target) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_beside_a_file_is_deleted(tmp_path: Path) -> None:
    """Temporary names are our own."""
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "file").touch()
    with written_whole(tmp_path / "mine") as temporary:
        temporary.write_text("new")
    names = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert names == ["mine", "mine.tmp", "mine.tmp/file"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells the name of an open file")
def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of the files and of their folder, then the name, then fsync of the folder above."""
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        order.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with written_whole(tmp_path / "a", kind="folder") as temporary:
        (temporary / "file").touch()
    assert {*order[:2]} == {"file", WRITTEN}
    assert order[2:] == [temporary.name, "replace", tmp_path.name]


def test_a_full_disk_is_reported_of_any_file() -> None:
    """Of a row of metrics, say, whose file is written to its end and not anew."""
    with (
        pytest.raises(StorageError, match=r"^a file was not written: No space left on device; m"),
        storage_errors(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    named = r"^a.png was not written: Disk quota exceeded; [\d.]+ [MG]B are free now\. Make room"
    with pytest.raises(StorageError, match=named), storage_errors():
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "a.png")
    with pytest.raises(FileNotFoundError), storage_errors():
        raise FileNotFoundError(errno.ENOENT, "x")


def test_a_full_disk_names_the_folder_and_no_file_that_is_deleted_with_it(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=f"^{tmp_path}/final was not written: No space"),
        written_whole(tmp_path / "final", kind="folder") as temporary,
        written_whole(temporary / "figure.png"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    """As by --out of an export; where a file stands above it, nothing is written."""
    with written_whole(tmp_path / "a" / "b", kind="folder") as temporary:
        (temporary / "file").touch()
    assert (tmp_path / "a" / "b" / "file").is_file()
    above = tmp_path / "a" / "b" / "file" / "c" / "d"
    with pytest.raises(StorageError, match="Not a dir"), written_whole(above, kind="folder"):
        pytest.fail("it begins to write")


def test_a_pipe_is_not_read_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(CheckpointError, match="it is no file"):
        read_text(tmp_path / "a")
