"""Policies that a stage samples from: `final/` folders, hub ids, checkpoints of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lightning_rlhf.callbacks.files import SUFFIX, Origin, read_stamp
from lightning_rlhf.core.config import PolicyEvalConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.validation import build
from lightning_rlhf.evaluation.select import load_weights
from lightning_rlhf.io.console import Working
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.models.build_roles import check_vocabulary, start_from
from lightning_rlhf.models.checkpoint import FROM_CONFIG, Final, Manifest, digest, find, json_object
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT, LoRASettings
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.runs.folders import CHECKPOINTS, CONFIG, FINAL, PARENTS, folder_of, read_config
from lightning_rlhf.runs.parents import earlier
from lightning_rlhf.runs.resume import run_id
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, section

TRAINED = ("ppo", "dpo")
"""Names of the stages that train a policy from the SFT model."""
TRAINERS = " or ".join(f"stage={name}" for name in TRAINED)
KEY = "eval_policy.policies"
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
        stamp = read_stamp(self.path)
        found = {key: stamp[key] for key in ("stage", "model", "version")}
        return Origin(**found, run=run_id(self.run))

    def lora(self) -> LoRASettings:
        """Return the settings of the policy's adapter. Raises an RLHFError where there are none."""
        file = self.run / CONFIG
        tree = read_config(file, "a checkpoint is read with its run")
        return build(LoRASettings, section(tree, "model", "lora")["lora"], f"{file}: model.lora")


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


def load_policy(run: Run, policy: Source | None) -> tuple[Roles, str]:
    """Return the models with the policy, on the CPU, and the role that is the policy.

    policy: None is the base model.
    Raises CheckpointError where a checkpoint is damaged or does not fit the model.
    """
    with Working("loading the model"):
        start = run.parents.get(SFT) if isinstance(policy, Kept) else policy
        settings = run.settings
        roles = start_from(settings.model, start, trainable=False, seed=settings.seed)
        if isinstance(policy, Kept):
            roles.add_adapter(POLICY, policy.lora(), settings.seed)
            load_weights(roles, policy.path, policy.origin(), prefix="roles.")
    check_vocabulary(roles, run.tokenizer)
    return roles, POLICY if isinstance(policy, Kept) else REFERENCE


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

    A checkpoint is named by the folder of its run and its step, as `ppo step 5`; names that all
    runs have are left out.
    """

    def parts_of(path: PurePath) -> tuple[str, ...]:
        run = path.parent.parent
        if path.name == FINAL:
            return path.parts[:-1]
        if path.suffix != SUFFIX:
            return path.parts
        if path.parent.name != CHECKPOINTS or not run.name:
            return path.with_suffix("").parts
        step = f"step {int(path.stem)}" if path.stem.isdecimal() else path.stem
        return (*run.parts[:-1], f"{run.name} {step}")

    parts = [parts_of(PurePath(source)) for source in sources]

    def ends(own: Sequence[str]) -> Iterator[str]:
        for end in (own[-depth:] for depth in range(1, len(own) + 1)):
            if end != (SFT,) and sum(other[-len(end) :] == end for other in parts) == 1:
                yield "/".join(end)

    return [next(ends(own), source) for source, own in zip(sources, parts, strict=True)]


def check_policy(policy: Source, sft: Final | None, key: str) -> None:
    """Raise CheckpointError unless a policy stands on the base model of the SFT model.

    Both must have the same base weights, tokenizer and chat template; a checkpoint of PPO must be
    trained from this SFT model.

    key: key of the configuration that names the policy.
    """
    if isinstance(policy, Kept):
        if (stage := policy.origin().stage) in (SFT, "rm"):
            raise CheckpointError(
                f"{key}: {policy.path} is a checkpoint of stage={stage}; allowed: one of "
                f"{TRAINERS}, or a final/ folder"
            )
        policy.lora()
        then = read_config(policy.run / PARENTS, "a checkpoint is read with its run")
        if then.get(SFT) != (None if sft is None else digest(sft.path)):
            model = "the base model" if sft is None else sft.path
            raise CheckpointError(
                f"{key}: {policy.path} was trained from another SFT model than {model}; give its "
                "own as policy.checkpoint"
            )
    elif sft is not None and sft.manifest is not None and policy.manifest is not None:
        for what, of in FAMILY.items():
            found, wanted = of(policy.manifest), of(sft.manifest)
            if found != wanted:
                raise CheckpointError(
                    f"{key}: the {what} of {policy.path} is {found!r:.80}, but that of the SFT "
                    f"model {sft.path} is {wanted!r:.80}; allowed: policies trained from the same "
                    "base model"
                )


FAMILY: Mapping[str, Callable[[Manifest], str | None]] = {
    "base model": lambda manifest: (
        manifest.base + f", seed {manifest.base_seed}" * (manifest.base == FROM_CONFIG)
    ),
    "vocabulary": lambda manifest: manifest.tokenizer_hash,
    "chat template": lambda manifest: manifest.chat_template,
}
"""Name of what compared policies must share with the SFT model -> its value in a manifest."""
