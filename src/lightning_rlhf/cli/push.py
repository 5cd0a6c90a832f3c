"""lightning-rlhf push: a `final/` folder as a repository on the hub."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.core.errors import CheckpointError, RLHFError
from lightning_rlhf.io.nearest_path import nearest_path
from lightning_rlhf.io.storage import readable
from lightning_rlhf.stages.console import print_error


def push(arguments: Sequence[str]) -> None:
    """Upload a folder, or list what would be uploaded; exit with status 1 after an error."""
    given = parser().parse_args(arguments)
    try:
        push_final(given.final, given.name, private=given.private, dry_run=given.dry_run)
    except RLHFError as error:
        print_error(without_secrets(str(error)))
        sys.exit(1)


def push_final(final: str, name: str, *, private: bool, dry_run: bool) -> None:
    """Upload the folder `final` as the repository `name`, and print its address.

    dry_run: True prints the files with their sizes and uploads nothing.

    Raises an RLHFError where the folder or the name does not fit, or the hub cannot be reached.
    """
    from lightning_rlhf.models.checkpoint import find
    from lightning_rlhf.models.weights import is_folder

    if not is_folder(final):
        raise CheckpointError(
            f"{final}: no such folder{nearest_path(final)}; allowed: the final/ folder of a run"
        )
    found = find(final, "FINAL")

    from huggingface_hub import HfApi

    from lightning_rlhf.stages.upload import files_of, upload

    files = files_of(found, name)
    if not dry_run:
        print(upload(files, name, private=private, api=HfApi()))
        return
    sizes = [len(x) if isinstance(x, bytes) else x.stat().st_size for _, x in files]
    for (path, _), size in zip(files, sizes, strict=True):
        print(f"{readable(size):>10}  {path}")
    kind = "a private repository" if private else "a public repository"
    print(f"{readable(sum(sizes))} in {len(files)} files would be uploaded to {name}, {kind}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf push",
        description="Upload a final/ folder to the Hugging Face hub, with its model card. The "
        "token is that of `hf auth login`, or HF_TOKEN.",
    )
    parser.add_argument("final", metavar="FINAL", help="final/ folder, or a merged one")
    parser.add_argument("name", metavar="org/name", help="repository, created if needed")
    parser.add_argument(
        "--private", action="store_true", help="create the repository as a private one"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the files and upload nothing")
    return parser
