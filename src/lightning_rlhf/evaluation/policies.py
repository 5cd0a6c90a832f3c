"""Policies that a stage samples from, and their scored responses.

A policy is a `final/` folder, a model of the hub or a checkpoint of a run.
"""

import gc
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from jaxtyping import Int

from lightning_rlhf.callbacks import evaluation, metrics
from lightning_rlhf.callbacks.files import SUFFIX, Origin, read_stamp
from lightning_rlhf.core import memory, records, results, validation
from lightning_rlhf.core.errors import CheckpointError, LogitsError, TrainingError, require
from lightning_rlhf.data import batches, lengths, readers
from lightning_rlhf.data.rows import Rows
from lightning_rlhf.evaluation import build_rewards, evaluate_reward, select
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models import build_roles, checkpoint
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT, LoRASettings
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.comparison import PolicySamples
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import collector, native, score, server
from lightning_rlhf.rollout import sampler as samplers
from lightning_rlhf.runs import folders, resume
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, section

TRAINED = ("ppo", "dpo")
"""Names of the stages that train a policy from the SFT model."""
TRAINERS = " or ".join(f"stage={name}" for name in TRAINED)
DECODING = ("temperature", "max_response_tokens", "stop_strings")
"""Keys of sampling that the sections of this stage and of PPO have."""
Part = tuple[Int[torch.Tensor, " B"], records.Rollout]
"""Responses, on the CPU, and their numbers among the responses of all processes."""
Decodings = Mapping[str, tuple[float, int]]
"""Name of a decoding -> temperature and number of responses to each prompt."""


@dataclass(frozen=True)
class StepCheckpoint:
    """A checkpoint of a stage that trains a policy, from which the policy's weights are read."""

    path: Path
    origin: Origin
    """Run in whose folder it is, with the stage, the model and the version that the file names."""
    tree: Mapping[str, Any]
    """Configuration of that run."""
    lora: LoRASettings | None
    """Settings of the policy's adapter; None where all weights were trained."""
    sft: str | None
    """Digest of the SFT model that it was trained from; None for the base model."""


Source = checkpoint.Final | StepCheckpoint


def find_policies(settings: Settings) -> dict[str, Source]:
    """Return the policies to compare by a short name, in their order.

    Raises CheckpointError or HubError where one is not there or is no policy.
    """
    config = settings.config
    if config.policies is not None:
        sources = [find_policy(source, "eval_policy.policies") for source in config.policies]
        return dict(zip(short_names(config.policies, SFT), sources, strict=True))
    finals = {name: folders.earlier(settings, name) for name in TRAINED}
    found: dict[str, Source] = {name: x for name, x in finals.items() if x is not None}
    if not found:
        places = " or ".join(str(folders.folder_of(settings, name)) for name in TRAINED)
        raise CheckpointError(
            f"stage={settings.stage} compares policies, and the run has none in {places}. Run "
            f"{TRAINERS} first, or give eval_policy.policies=[FOLDER_OR_HUB_ID,...]"
        )
    return found


def find_policy(source: str, key: str) -> Source:
    """Return the policy at a `final/` folder, a checkpoint file or a hub id.

    key: key of the configuration that names it.
    Raises an RLHFError where it is not there, is no policy, or is a checkpoint without its run.
    """
    path = Path(source).expanduser().resolve()
    if path.suffix == SUFFIX:
        run, stamp = path.parent.parent, read_stamp(path)
        stage = stamp["stage"]
        allowed = f"a checkpoint of {TRAINERS}, or a final/ folder; this is one of stage={stage}"
        require(stage not in (SFT, "rm"), key, source, allowed)
        files = (run / folders.CONFIG, run / folders.PARENTS)
        advice = "a checkpoint is read with its run"
        tree, parents = (folders.read_config(file, advice) for file in files)
        lora, where = section(tree, "model", "lora")["lora"], f"{files[0]}: model.lora"
        known = {name: stamp[name] for name in ("stage", "model", "version")}
        origin = Origin(**known, run=resume.run_id(run))
        is_full = section(tree, stage).get("finetune") == "full"
        own = None if is_full else validation.build(LoRASettings, lora, where)
        return StepCheckpoint(path, origin, tree, own, parents.get(SFT))
    final = checkpoint.find(source, key)
    file = final.path / "config.json"
    kinds = checkpoint.json_object(file).get("architectures") if file.is_file() else None
    is_reward = final.manifest is not None and final.manifest.stage == "rm"
    if is_reward or any("Classification" in str(kind) for kind in kinds or ()):
        raise CheckpointError(
            f"{key}: {final.path} is a reward model or another classifier; allowed: the final/ "
            f"folder of stage={SFT}, {TRAINERS}, or another causal language model"
        )
    return final


def short_names(sources: Sequence[str], taken: str | None = None) -> list[str]:
    """Return the end of each path, as short as keeps it apart from the others and from `taken`.

    A checkpoint is named by the folder of its run and its step, as `ppo step 5`; names that all
    runs have are left out.
    """
    parts = []
    for source in sources:
        text = str(PurePath(source)).removesuffix(f"/{folders.FINAL}")
        text = re.sub(rf"/{folders.CHECKPOINTS}/0*(\d+)\{SUFFIX}$", r" step \1", text)
        text = re.sub(rf"/{folders.CHECKPOINTS}/(\w+)\{SUFFIX}$", r" \1", text)
        parts.append(PurePath(text).parts)
    names = []
    for source, own in zip(sources, parts, strict=True):
        ends = (own[-depth:] for depth in range(1, len(own) + 1))
        single = (end for end in ends if sum(other[-len(end) :] == end for other in parts) == 1)
        names.append("/".join(next((end for end in single if end != (taken,)), (source,))))
    return names


def check_policies(run: Run, policies: Mapping[str, Source], key: str) -> None:
    """Check that policies stand on the base of the SFT model, and print how they were trained else.

    All must have its base weights, tokenizer and chat template; a checkpoint must be trained from
    this SFT model. Other keys of sampling than those of the stage, and another SFT model, are
    printed.

    key: key of the configuration that names the policies. Raises ConfigError that names it.
    """
    settings, sft = run.settings, run.parents.get(SFT)
    now, here = settings.tree[settings.stage], None if sft is None else checkpoint.digest(sft.path)
    for name, policy in policies.items():
        stage, tree, parent, facts = "", dict[str, Any](), None, dict[str, tuple[Any, Any]]()
        if isinstance(policy, StepCheckpoint):
            stage, tree = policy.origin.stage, dict(policy.tree)
            facts = {"SFT model (policy.checkpoint)": (policy.sft, here)}
        elif (ours := policy.manifest) is not None:
            stage, tree, parent = ours.stage, ours.config, policy.parent(SFT)
            theirs = ours if sft is None or sft.manifest is None else sft.manifest
            seeds = [
                f", seed {x.base_seed}" * (x.base == checkpoint.FROM_CONFIG) for x in (ours, theirs)
            ]
            facts = {
                "base model": (ours.base + seeds[0], theirs.base + seeds[1]),
                "vocabulary": (ours.tokenizer_hash, theirs.tokenizer_hash),
                "chat template": (ours.chat_template, theirs.chat_template),
            }
        for what, (found, wanted) in facts.items():
            differs = f"its {what} is {found!r:.80}, here it is {wanted!r:.80}"
            allowed = f"policies trained from the same base model; {differs}"
            require(found == wanted, key, str(policy.path), allowed)
        then = tree.get(stage) or {}
        notes = [
            f"with {stage}.{one} {then[one]!r}, is sampled with {settings.stage}.{one} {now[one]!r}"
            for one in DECODING
            if one in then and then[one] != now[one]
        ]
        if sft is not None and parent not in (None, sft.path.resolve()):
            is_same = parent.is_dir() and checkpoint.digest(parent) == here
            notes += [] if is_same else [f"from {parent}; KL and gains are those to {sft.path}"]
        for note in notes:
            print_line(f"{name} ({policy.path}) was trained {note}", "yellow")


class Task:
    """The prompts, the reward and the judge, which are the same for every policy."""

    references: Sequence[lengths.DemonstrationTokens] = ()
    """Held-out demonstrations; empty where the data have none, or they are not wanted."""

    def __init__(self, run: Run, part: str, limit: int | None) -> None:
        """Read the data, check the reward, and print the verdicts on it.

        part: prompts to respond to, train or val.
        limit: largest number of them, drawn with the seed.
        """
        settings, config = run.settings, run.settings.config
        self.run = run
        self.judge = evaluation.load_judge(settings.data.judge) if settings.data.judge else None
        self.batch = memory.MicrobatchSize(f"{settings.stage}.batch_size", config.batch_size)
        """Number of responses that the models read at a time."""
        rows = getattr(run.rows("prompts"), part)
        self.rows: Sequence[dict[str, Any]] = [row.columns for row in rows.rows]
        """Rows of the data that the prompts index."""
        columns = {name for row in self.rows for name in row}
        self.build_reward = build_rewards.prepare_reward(run, columns)
        self.verdicts = build_rewards.verdicts_on(run, refuses=False)
        """Component of the reward -> verdict of its fitness report, where it has one."""
        self.prompts: Sequence[lengths.PromptTokens] = fitting_tokens(run, rows, limit)

    def respond(
        self, policies: Mapping[str, Source], decodings: Decodings, sft_decodings: Decodings
    ) -> list[PolicySamples]:
        """Return the scored responses of the policies, after those of the SFT model, if any.

        One model is in memory at a time: each policy responds and is freed, then the SFT model
        responds, which is the base and the reference of the reward. Ends all processes but the
        first.
        """
        run, drawn = self.run, {}
        for name, source in policies.items():
            roles, role = self.load(source)
            parts = {key: self.sample(name, roles, role, *how) for key, how in decodings.items()}
            drawn[name] = parts, self.perplexity(roles, role)
            del roles
            gc.collect()
            torch.cuda.empty_cache()
        roles, role = self.load(run.parents.get(SFT))
        reward = self.build_reward(roles, self.batch)
        roles.to(run.device)
        evaluate_reward.check_formats(run, reward)
        if sft_decodings:
            parts = {key: self.sample(SFT, roles, role, *how) for key, how in sft_decodings.items()}
            drawn = {SFT: (parts, self.perplexity(roles, role)), **drawn}
        found = []
        for name, (parts, perplexity) in drawn.items():
            samples = {key: self.scored(roles, reward, some) for key, some in parts.items()}
            found.append(PolicySamples(name=name, samples=samples, perplexity=perplexity))
        if not run.replicas.is_first:
            sys.exit()
        return found

    def load(self, policy: Source | None) -> tuple[Roles, str]:
        """Return the models with a policy, on the device, and the role that is the policy.

        policy: None is the base model.
        Raises CheckpointError where a checkpoint is damaged or does not fit the model, ConfigError
        where the longest prompt and response do not.
        """
        run, config, key = self.run, self.run.settings.config, self.run.settings.stage
        with Working("loading the model"):
            start = run.parents.get(SFT) if isinstance(policy, StepCheckpoint) else policy
            is_full = isinstance(policy, StepCheckpoint) and policy.lora is None
            rounded, whole = run.settings.model.quantization, "none for a checkpoint of all weights"
            require(not is_full or rounded == "none", "model.quantization", rounded, whole)
            served, alone = config.rollout, "native for it, or the folder that export makes of it"
            require(not is_full or served != "vllm", f"{key}.rollout", served, alone)
            seed, role = run.settings.seed, REFERENCE
            roles = build_roles.start_from(run.settings.model, start, trainable=is_full, seed=seed)
            if isinstance(policy, StepCheckpoint):
                if policy.lora is not None:
                    role = POLICY
                    roles.add_adapter(role, policy.lora, seed)
                select.load_weights(roles, policy.path, policy.origin, prefix="roles.")
                roles.requires_grad_(False)
            for weight in roles.parameters() if is_full else ():  # as those of a final/ folder
                weight.data = weight.data.to(getattr(torch, run.settings.model.dtype))
        build_roles.check_vocabulary(roles, run.tokenizer)
        longest = max(len(example.prompt) for example in self.prompts)
        rows, response = config.batch_size, config.max_response_tokens
        evaluate_reward.check_sampling(run, roles, longest, response, key, rows)
        return roles.to(run.device), role

    @torch.no_grad()
    def sample(
        self, name: str, roles: Roles, role: str, temperature: float, count: int
    ) -> list[Part]:
        """Return batches of `count` responses of a policy to each prompt, those of this process.

        The random numbers depend on the seed alone. Log-probabilities are those at the stage's
        temperature, whatever the temperature of sampling.

        Raises LogitsError where it cannot be sampled from; TrainingError where the memory runs out.
        """
        run, config, found = self.run, self.run.settings.config, list[Part]()
        most, size = config.batch_size, max(1, config.batch_size // count)
        requests = [
            (batches.collate_prompts(self.prompts[start : start + size], run.chat.pad_token_id), n)
            for start in range(0, len(self.prompts), size)
            for n in (min(most, count - made) for made in range(0, count, most))
        ]
        shards = collector.shard(requests, run.replicas, divides=True)
        params = replace(samplers.SamplingParams.of(config, run.chat), temperature=temperature)
        local = native.NativeSampler if roles.cache_argument else samplers.HFSampler
        sampler: Any = local(roles, params)
        if config.rollout == "vllm":
            longest = max(len(one.prompt) for one in self.prompts) + config.max_response_tokens
            servers = run.settings.rollout_server
            sampler = server.ServerSampler(roles, params, servers, run.replicas, longest)
        generator = torch.Generator().manual_seed(run.settings.seed)
        drawn = collector.sample_local(sampler, shards, generator)
        total = sum(len(shard.numbers) for shard in shards)
        try:
            with roles.use_role(role), Working(f"sampling from {name}", total) as work:
                sampler.sync(0)
                for numbers, sampled in work.track(drawn, lambda part: len(part[1])):
                    rollout = score.annotate(
                        sampled,
                        roles,
                        None,
                        is_exact=sampler.is_exact and temperature == config.temperature,
                        temperature=config.temperature,
                        policy_rows=self.batch,
                        batch_size=config.batch_size,
                    )
                    if isinstance(sampler, server.ServerSampler):
                        sampler.check_gap(rollout)
                    found.append((numbers, rollout.to("cpu")))
            run.replicas.gather(lambda: None)  # others may still sample
            server.release()
        except LogitsError as error:
            raise LogitsError(f"policy {name}") from error
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{self.batch.key} is {config.batch_size}: so many responses at once are too much "
                f"for the memory of the device; allowed: a smaller number: {error}"
            ) from error
        return found

    @torch.no_grad()
    def perplexity(self, roles: Roles, role: str) -> float | None:
        """Return the perplexity of the demonstrations under a role; None without any.

            exp(- sum over responses and their tokens of log p(token) / number of those tokens)

        Each process computes some batches of demonstrations.
        """
        if not self.references:
            return None
        run, size, found = self.run, self.run.settings.config.batch_size, []
        starts = torch.arange(0, len(self.references), size)[run.replicas.rows]
        for start in starts.tolist():
            some = self.references[start : start + size]
            texts = [e.prompt for e in some], [e.response for e in some]
            batch = collector.as_responses(*texts, run.chat.pad_token_id).to(run.device)
            read = partial(score.predict, batch, roles, None, 1.0)
            with roles.use_role(role):
                logprobs, _ = self.batch.fitting(read)
            found.append((float(logprobs.cpu().double().sum()), int(batch.response_mask.sum())))
        sums, tokens = zip(*run.replicas.merged(starts, found), strict=True)
        return metrics.perplexity(-sum(sums) / sum(tokens))

    def scored(self, roles: Roles, reward: Reward, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the `judged_samples` of the responses of all processes.

        roles: models on the device, whose reference is the SFT model.
        """
        run, found = self.run, []
        numbers = torch.cat([torch.arange(0), *(numbers for numbers, _ in parts)])
        with Working("scoring the responses", len(numbers)) as working:
            for _, rollout in working.track(parts, lambda part: len(part[1])):
                decoded = collector.decode_responses(rollout.to(run.device), self.rows, run.chat)
                scores = score.score(
                    roles,
                    decoded,
                    reward,
                    temperature=run.settings.config.temperature,
                    batch_size=self.batch.rows,
                    over_vocabulary=False,
                ).to("cpu")
                result = results.EvaluationResult(rollout=rollout, decoded=decoded, scores=scores)
                found += evaluation.judged_samples(result, reward, self.judge)
            return run.replicas.merged(numbers, found)


def fitting_tokens(run: Run, rows: Rows[Any], limit: int | None) -> Sequence[Any]:
    """Return at most `limit` of the rows that fit, drawn with the seed, as tokens.

    Raises DataError where none fits.
    """
    fits = lengths.tokenise(rows, run.chat, run.settings.data)
    numbers = set(fits.numbers)
    usable = rows.only([i for i, number in enumerate(rows.numbers) if number in numbers])
    kept = set(readers.draw_rows(usable, limit, run.settings.seed).numbers)
    pairs = zip(fits.examples, fits.numbers, strict=True)
    return [example for example, number in pairs if number in kept]
