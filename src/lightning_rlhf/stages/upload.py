"""Upload of a `final/` folder to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from httpx import HTTPError  # of huggingface_hub, which raises its errors
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from lightning_rlhf.core.errors import ConfigError, HubError, first_line, require
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.manifest import MANIFEST
from lightning_rlhf.models.weights import ADAPTER, check_weights, json_object
from lightning_rlhf.stages.model_card import CARD, hub_id, with_name


def files_of(final: Final, repo_id: str) -> Sequence[tuple[str, Path | bytes]]:
    """Return the files to upload as (path in the repository, file or content).

    The code in the model card names `repo_id`.

    Raises:
        ConfigError: `repo_id` is no name, or the folder is an adapter on weights of this machine.
        CheckpointError: the folder lacks its weights.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id} is no name on the hub: {first_line(error)}") from error
    require("/" in repo_id, "the name on the hub", repo_id, "organisation/name or user/name")
    check_weights(final.path)
    if final.manifest is None:
        raise ConfigError(f"{final.path} has no {MANIFEST}; allowed: the final/ of a run")
    if final.is_adapter:
        base = json_object(final.path / ADAPTER)["base_model_name_or_path"]
        if not base or hub_id(base) is None:
            raise ConfigError(
                f"{final.path} is an adapter on {base}, which is not on the hub; allowed: whole "
                f"weights, from lightning-rlhf export {final.path} --merge"
            )
    found: list[tuple[str, Path | bytes]] = []
    for file in sorted(path for path in final.path.rglob("*") if path.is_file()):
        name = file.relative_to(final.path).as_posix()
        is_card = name == CARD
        card = with_name(file.read_text(encoding="utf-8"), repo_id).encode() if is_card else file
        found.append((name, card))
    return found


def upload(
    files: Sequence[tuple[str, Path | bytes]], repo_id: str, *, private: bool, api: HfApi
) -> str:
    """Upload the files in one commit, to a repository that is created if needed; return its URL.

    private: True creates a private repository; one that exists stays as it is.

    Raises HubError without a token, without a network, or where the hub refuses.
    """
    if get_token() is None:
        raise HubError(
            "there is no token for the hub; hf auth login stores one, or set HF_TOKEN (with write "
            "access)"
        )
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files
    ]
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.create_commit(repo_id, operations, commit_message="Upload from lightning-rlhf")
    except (HTTPError, OSError) as error:
        raise HubError(f"{repo_id} was not uploaded: {first_line(error)}") from error
    return str(url)
