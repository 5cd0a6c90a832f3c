"""Policies that a stage samples from: `final/` folders, hub ids, checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lightning_rlhf.callbacks.checkpoint_files import SUFFIX, Origin, read_run
from lightning_rlhf.core.config import PolicyEvalConfig, RankConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.validation import build
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.models.checkpoint import FROM_CONFIG, Final, Manifest, digest, find, json_object
from lightning_rlhf.models.config import SFT, LoRASettings
from lightning_rlhf.runs.changes import read_config
from lightning_rlhf.runs.folders import CHECKPOINTS, CONFIG, FINAL, PARENTS, earlier, folder_of
from lightning_rlhf.runs.resume import run_id
from lightning_rlhf.runs.stage import Settings, section

TRAINED = ("ppo", "dpo")
"""Names of the stages that train a policy from the SFT model."""
TRAINERS = " or ".join(f"stage={name}" for name in TRAINED)
KEY, RESPONDER = "eval_policy.policies", "rank.policy"
DECODING = ("temperature", "max_response_tokens", "stop_strings")
"""Keys of sampling that the sections of this stage and of PPO have."""


@dataclass(frozen=True)
class Kept:
    """A checkpoint of a stage that trains a policy, from which the policy's adapter is read."""

    path: Path
    """Path of the file, in the folder `checkpoints/` of its run."""

    @property
    def run(self) -> Path:
        """Return the folder of its run."""
        return self.path.parent.parent

    def origin(self) -> Origin:
        """Return the run in whose folder the checkpoint is, as its checkpoints record it.

        The version and the model are those of the file. Raises CheckpointError where the folder is
        none of a run.
        """
        stamp = read_run(self.path)
        return Origin(
            stage=stamp["stage"], model=stamp["model"], version=stamp["version"],
            run=run_id(self.run),
        )  # fmt: skip

    def lora(self) -> LoRASettings:
        """Return the settings of the policy's adapter. Raises an RLHFError where there are none."""
        file = self.run / CONFIG
        tree = read_config(file, "a checkpoint is read with its run")
        model = section(tree, "model", "lora")
        return build(LoRASettings, model["lora"], f"{file}: model.lora")


Source = Final | Kept


def find_policies(settings: Settings) -> dict[str, Source]:
    """Return the policies to compare by a short name, in their order.

    Raises CheckpointError or HubError where one is not there or is no policy.
    """
    config: PolicyEvalConfig = settings.config
    if config.policies is not None:
        names = short_names(config.policies)
        return {n: find_policy(s, KEY) for n, s in zip(names, config.policies, strict=True)}
    finals = {name: earlier(settings, name) for name in TRAINED}
    found: dict[str, Source] = {name: x for name, x in finals.items() if x is not None}
    if not found:
        folders = " or ".join(str(folder_of(settings, name)) for name in finals)
        raise CheckpointError(
            f"stage={settings.stage} compares policies, and the run has none in {folders}. Run "
            f"{TRAINERS} first, or give {KEY}=[FOLDER_OR_HUB_ID,...]"
        )
    return found


def find_policy(source: str, key: str) -> Source:
    """Return the policy at a `final/` folder, a checkpoint file or a hub id.

    key: key of the configuration that names it. Raises CheckpointError or HubError that names it.
    """
    path = Path(source).expanduser()
    if path.suffix == SUFFIX:
        if not path.is_file():
            raise CheckpointError(
                f"{key}: {source}: no such file{nearest_path(source)}; allowed: a checkpoint "
                "of PPO or DPO"
            )
        return Kept(path.resolve())
    final = find(source, key)
    stage = final.manifest.stage if final.manifest is not None else None
    file = final.path / "config.json"
    kinds = json_object(file).get("architectures") if file.is_file() else None
    if stage == "rm" or any("Classification" in str(kind) for kind in kinds or ()):
        raise CheckpointError(
            f"{key}: {final.path} is a reward model or another classifier; allowed: the final/ "
            f"folder of stage={SFT}, {TRAINERS}, or another causal language model"
        )
    return final


def responder(settings: Settings) -> Source | None:
    """Return the policy of which stage=rank samples responses; None for the SFT model.

    Raises CheckpointError or HubError where it is not there or is no policy.
    """
    config: RankConfig = settings.config
    return None if config.policy is None else find_policy(config.policy, RESPONDER)


def policy_folders(settings: Settings) -> dict[str, Final]:
    """Return the policies that are folders, by role."""
    found = find_policies(settings)
    return {f"policy {name}": one for name, one in found.items() if isinstance(one, Final)}


def other_decoding(settings: Settings, policies: Mapping[str, Source]) -> str | None:
    """Return which keys of sampling differ from those that the policies were trained with.

    None where none differs, or no policy comes with the configuration of its run.
    """
    found = []
    for name, policy in policies.items():
        if isinstance(policy, Kept):
            stage, tree = policy.origin().stage, read_config(policy.run / CONFIG, "it is needed")
        elif policy.manifest is not None:
            stage, tree = policy.manifest.stage, policy.manifest.config
        else:
            continue
        then = tree.get(stage) or {}
        found += [
            f"{name} was trained with {stage}.{key} {then[key]!r}, is sampled with {now!r}"
            for key in DECODING
            if key in then and then[key] != (now := settings.tree[settings.stage][key])
        ]
    keys = f"{settings.stage}.{', '.join(DECODING)}"
    return f"{'; '.join(found)} (keys of this stage: {keys})" if found else None


def other_sft(policies: Mapping[str, Source], sft: Final | None) -> str | None:
    """Return which policies were trained from another model than the SFT model `sft`.

    None where none was, or where the policies are compared with the base model.
    """
    found = []
    for name, policy in policies.items():
        parent = policy.parent(SFT) if isinstance(policy, Final) else None
        if sft is None or parent is None or parent == sft.path.resolve():
            continue
        if not parent.is_dir() or digest(parent) != digest(sft.path):
            found.append(f"{name} ({policy.path}) was trained from {parent}")
    where = "" if sft is None else sft.path
    return f"{'; '.join(found)}; KL and gains are those to {where}" if found else None


def short_names(sources: Sequence[str]) -> list[str]:
    """Return the end of each path, as short as keeps it apart from the others and from "sft".

    A checkpoint is named by the folder of its run and its step, as `ppo step 5`.
    """
    parts = [_named_parts(PurePath(source)) for source in sources]

    def short(source: str, own: Sequence[str]) -> str:
        for depth in range(1, len(own) + 1):
            end = own[-depth:]
            if end != (SFT,) and sum(other[-depth:] == end for other in parts) == 1:
                return "/".join(end)
        return source

    return [short(source, own) for source, own in zip(sources, parts, strict=True)]


def _named_parts(path: PurePath) -> tuple[str, ...]:
    """Return the parts of the path of a policy, without names that all runs have."""
    if path.name == FINAL:
        return path.parts[:-1]
    if path.suffix != SUFFIX:
        return path.parts
    run = path.parent.parent
    if path.parent.name != CHECKPOINTS or not run.name:
        return path.with_suffix("").parts
    step = f"step {int(path.stem)}" if path.stem.isdecimal() else path.stem
    return (*run.parts[:-1], f"{run.name} {step}")


def check_policies(settings: Settings, parents: Mapping[str, Final]) -> None:
    """Raise CheckpointError where a policy cannot be compared with the SFT model."""
    for policy in find_policies(settings).values():
        check_policy(policy, parents, KEY)


def check_policy(policy: Source, parents: Mapping[str, Final], key: str) -> None:
    """Raise CheckpointError unless a policy stands on the base model of the SFT model.

    Both must have the same base weights, tokenizer and chat template; a checkpoint of PPO must be
    trained from this SFT model.

    key: key of the configuration that names the policy.
    """
    sft = parents.get(SFT)
    if isinstance(policy, Kept):
        stage = policy.origin().stage
        if stage in (SFT, "rm"):
            raise CheckpointError(
                f"{key}: {policy.path} is a checkpoint of stage={stage}; allowed: one of "
                f"{TRAINERS}, or a final/ folder"
            )
        policy.lora()
        file = policy.run / PARENTS
        then = read_config(file, "a checkpoint is read with its run")
        now = {} if sft is None else {SFT: digest(sft.path)}
        if {role: was for role, was in then.items() if role == SFT} != now:
            model = "the base model" if sft is None else sft.path
            raise CheckpointError(
                f"{key}: {policy.path} was trained from another SFT model than {model}; give its "
                "own as policy.checkpoint"
            )
    elif sft is not None and sft.manifest is not None and policy.manifest is not None:
        _check_family(policy.path, policy.manifest, sft.path, sft.manifest, key)


def _check_family(path: Path, ours: Manifest, sft: Path, theirs: Manifest, key: str) -> None:
    """Raise CheckpointError unless two models have one base, tokenizer and chat template."""
    for what, found, wanted in (
        ("base model", base_of(ours), base_of(theirs)),
        ("vocabulary", ours.tokenizer_hash, theirs.tokenizer_hash),
        ("chat template", ours.chat_template, theirs.chat_template),
    ):
        if found != wanted:
            raise CheckpointError(
                f"{key}: the {what} of {path} is {found!r:.80}, but that of the SFT model {sft} is "
                f"{wanted!r:.80}; allowed: policies trained from the same base model"
            )


def base_of(manifest: Manifest) -> str:
    """Return the name of the base weights, with the seed where they are random."""
    is_random = manifest.base == FROM_CONFIG
    return f"{manifest.base}, seed {manifest.base_seed}" if is_random else manifest.base
