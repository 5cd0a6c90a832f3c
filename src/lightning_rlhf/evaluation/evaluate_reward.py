"""stage=eval_reward: a report on whether a reward, of any source, is fit to be maximised by PPO."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_rlhf.callbacks.loggers import close_loggers, log_pictures
from lightning_rlhf.core import errors, masking, memory, records, shaping
from lightning_rlhf.core.config import EvalConfig, RMConfig
from lightning_rlhf.core.metrics import check_names
from lightning_rlhf.data import batches, lengths, readers
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.problems import find_problems, print_problems
from lightning_rlhf.data.rows import Preference, Rows, prompt_row
from lightning_rlhf.evaluation import build_rewards, run_report
from lightning_rlhf.io.console import Working, print_detail, print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models import build_roles, checkpoint
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.report import fitness, fitness_page
from lightning_rlhf.rewards import format_check
from lightning_rlhf.rewards.config import LearnedConfig
from lightning_rlhf.rewards.weighted import LearnedReward, Reward, Source, TextReward
from lightning_rlhf.rollout import collector, sampler
from lightning_rlhf.runs import folders, stage
from lightning_rlhf.runs.run import Run

PROBED = 64
"""Number of prompts for which every probe is scored."""


@contextmanager
def leave_final(run: Run, metrics: Mapping[str, float]) -> Iterator[tuple[Path, list[Logger]]]:
    """Yield the folder that becomes `final/` of a stage that does not train, and its loggers.

    Claims the run's folder and logs the metrics; at the end it closes the loggers and writes the
    page. Ends all processes but the first.
    """
    if not run.replicas.is_first:
        sys.exit()
    check_names(metrics)
    folder = run.create()
    with written_whole(folder / folders.FINAL, kind="folder") as whole:
        loggers, exit_code = run.open_loggers(), 1
        try:
            for logger in loggers:
                logger.log_metrics(dict(metrics), step=0)
            yield whole, loggers
            exit_code = 0
        finally:
            with Working("closing the loggers"):
                close_loggers(loggers, exit_code)
    run_report.leave_report(folder, run.settings.definition)


def divided(
    reward: Reward, decoded: records.DecodedResponses, replicas: Replicas
) -> Float[Tensor, "B K"]:
    """Return the components of all responses, of which each process scores a share."""
    groups = collector.whole_groups(decoded.rollout, replicas)
    parts = reward(decoded.select(groups))[0].tolist() if len(groups) else []
    return torch.tensor(replicas.merged(groups, parts), device=decoded.rollout.tokens.device)


def logit_scale(run: Run, reward: Reward, seen: shaping.RunningMoments) -> float | None:
    """Return the factor that turns a difference of scores into log-odds; None where none does."""
    (config, *others), source = list(run.settings.reward.values()), reward.sources[0]
    if others or not isinstance(config, LearnedConfig) or config.clip is not None:
        return None
    if config.weight <= 0 or not isinstance(source, LearnedReward | TextReward):
        return None
    running = seen.std if config.normalization == "running" else 1.0
    return source.std * running / config.weight


def fitting_pairs(rows: Rows[Preference], chat: ChatFormat, config: DataConfig) -> Rows[Preference]:
    """Return the pairs that no length limit drops or cuts."""
    kept = []
    for i, row in enumerate(rows.rows):
        longest = max(len(chat.response_tokens(side)) for side in (row.chosen, row.rejected))
        if longest <= config.max_response_tokens:
            kept += [i] * (len(chat.prompt_tokens(row.prompt)) <= config.max_prompt_tokens)
    return rows.only(kept)


def measure_reward(
    run: Run,
    source: Source,
    pairs: Sequence[Preference],
    samples: tuple[Float[Tensor, " N"], Sequence[records.SampledResponses]],
    *,
    logit_scale: float | None,
    **about: Any,
) -> fitness_page.FitnessReport:
    """Score held-out pairs and probes; return what they and the samples show of a reward.

    Ends all processes but the first.

    pairs: one or more held-out pairs.
    samples: scores of responses of the SFT model, and the responses.
    logit_scale: factor that turns a difference of scores into log-odds; None where none does.
    about: further fields of the report.
    """
    chat, longest = run.chat, run.settings.data.max_response_tokens
    score = partial(collector.score_texts, source, about["title"], chat=chat, device=run.device)
    with Working(f"fitness: scoring {len(pairs):,} held-out pairs"):
        prompts = [prompt_row(pair.prompt) for pair in pairs]
        chosen = score(prompts, [pair.chosen for pair in pairs]).tolist()
        rejected = score(prompts, [pair.rejected for pair in pairs]).tolist()
        scored = [
            fitness.ScoredPair(
                prompt=row["prompt"],
                chosen=pair.chosen,
                rejected=pair.rejected,
                chosen_score=high,
                rejected_score=low,
                chosen_tokens=len(chat.response_tokens(pair.chosen)),
                rejected_tokens=len(chat.response_tokens(pair.rejected)),
                margin=pair.margin,
            )
            for row, pair, high, low in zip(prompts, pairs, chosen, rejected, strict=True)
        ]
    with Working("fitness: scoring probes"):
        first = {one.prompt: i for i, one in reversed(list(enumerate(scored)))}
        probed = sorted(first.values())[:PROBED]
        good = [pairs[i].chosen for i in probed]
        probes = format_check.make_probes([prompts[i] for i in probed], good)
        texts = []
        for probe in probes:
            tokens = chat.response_tokens(probe.response)
            is_whole = len(tokens) <= longest  # a policy's responses are not longer
            texts.append(probe.response if is_whole else chat.show(tokens[: longest - 1]))
        own = [probed[probe.row] for probe in probes]
        scores = score([prompts[i] for i in own], texts).tolist()
        scored_probes = [
            fitness.ScoredProbe(kind=probe.kind, response=text, score=x, pair=scored[i])
            for probe, text, x, i in zip(probes, texts, scores, own, strict=True)
        ]
        results = fitness.measure_probes(scored_probes)
    if not run.replicas.is_first:  # which has all scores, and bootstraps alone
        sys.exit()
    with Working("fitness: measuring"):
        tokens = [n for some in samples[1] for n in some.response_mask.sum(dim=1).tolist()]
        sampled = list(zip(samples[0].tolist(), tokens, strict=True))
        seed = run.settings.seed
        found = fitness.measure_fitness(scored, sampled, logit_scale=logit_scale, seed=seed)
    return fitness_page.FitnessReport(fitness=found, probes=results, **about)


def write_fitness(
    report: fitness_page.FitnessReport, folder: Path, loggers: Sequence[Logger], step: int
) -> None:
    """Write the report, and send its picture to the loggers."""
    report.write(folder)
    log_pictures(loggers, {fitness_page.SCORES: folder / fitness_page.PICTURE}, step)


def check_sampling(
    run: Run, roles: Roles, longest: int, response: int, section: str, rows: int
) -> None:
    """Raise ConfigError where the longest response would not fit the model or the memory.

    longest: number of tokens of the longest prompt; response: limit of a response, the key
    max_response_tokens of the section; rows: number of responses that are sampled at once.
    """
    key = f"{section}.max_response_tokens"
    what = f"the longest prompt ({longest} tokens) with {key} ({response})"
    lower = f"lower {key} or data.max_prompt_tokens, to {{limit}} together"
    # All limits of the data are seldom reached; their texts are looked at when they are there.
    build_roles.check_positions(roles, longest + response, what, lower, warns=section != "data")
    build_roles.check_room(roles, rows, longest, response, key, run.device)


def sft_samples(
    run: Run,
    roles: Roles,
    prompts: Sequence[Sequence[int]],
    count: int,
    config: RMConfig | EvalConfig,
    replicas: Replicas = ONE,
) -> list[records.SampledResponses]:
    """Sample `count` responses of the SFT model to prompts in random order; return them on CPU.

    Prompts repeat where there are fewer.

    replicas: processes that divide the batches; all return all responses.
    Raises ConfigError as `check_sampling`. Warns where a response is longer, with its prompt, than
    the model was made for.
    """
    settings, chat, size = run.settings, run.chat, config.batch_size
    longest, response = max(map(len, prompts)), settings.data.max_response_tokens
    check_sampling(run, roles, longest, response, "data", size)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    chosen = [lengths.PromptTokens(prompts[i], i) for i in islice(cycle(order), count)]
    parts = (chosen[start : start + size] for start in range(0, count, size))
    requests = ((batches.collate_prompts(part, chat.pad_token_id), 1) for part in parts)
    shards = collector.shard(requests, replicas, divides=False)
    params = sampler.SamplingParams(
        max_response_tokens=response,
        temperature=config.temperature,
        end_token_ids=chat.end_token_ids,
    )
    with Working("sampling from the SFT model", sum(len(one.numbers) for one in shards)) as working:
        tracked = working.track(shards, lambda batch: len(batch.numbers))
        generator = torch.Generator().manual_seed(settings.seed)
        samples = collector.sample_reference(roles, tracked, params, generator, replicas)
    longest = max(int(rollout.mask.sum(dim=1).max()) for rollout in samples)
    what = f"the longest of {count} responses of the SFT model, with its prompt,"
    build_roles.check_positions(roles, longest, what)
    return samples


def check_formats(run: Run, reward: Reward) -> None:
    """Compare every reward model with its scores at training, and print the result.

    The pairs are those that its own stage left, else held-out ones of the data.
    Raises CheckpointError where they differ and `format_check` is strict.
    """
    settings = run.settings
    for (name, config), source in zip(settings.reward.items(), reward.sources, strict=True):
        if not isinstance(config, LearnedConfig) or config.format_check == "off":
            continue
        assert isinstance(source, LearnedReward | TextReward)
        with Working(f"checking the format of reward {name}"):
            source = replace(source, uncertainty_coef=0.0)
            if isinstance(source, LearnedReward):
                source = replace(source, step_separator=None)
            result = check_format(run, name, source)
        if isinstance(result, str):
            print_line(f"reward {name}: no held-out pairs to check its format with: {result}")
            continue
        fits = result.fits(config.format_tolerance)
        lines = result.lines(name, config.format_tolerance, shows_text=settings.debug)
        for line in lines:
            print_detail(line) if fits else print_line(line, "bold red")
        if not fits and config.format_check == "strict":
            is_text = result.problems or result.rendered != result.own_rendered
            advice = "Fix the text" if is_text else "Its numbers differ by dtype or quantization"
            way = f"{stage.reward_key(settings, name)}.format_check=warn continues"
            raise errors.CheckpointError(f"{lines[0]}. {advice}; or {way}")


def check_format(
    run: Run, name: str, source: LearnedReward | TextReward
) -> format_check.FormatResult | str:
    """Return the comparison for one reward model, or why there are no pairs.

    source: the reward model; it gives means of heads, as the recorded scores are.
    """
    data, seed, chat = run.settings.data, run.settings.seed, run.chat
    final = run.parents.get(folders.reward_role(run.settings, name))
    known = [] if final is None else format_check.read_pairs(final.path)
    pairs = [(pair.row, pair.chosen, pair.rejected) for pair in known]
    if not pairs and data.preferences.train is not None:
        try:
            val = readers.load("preferences", data, seed).val
        except (errors.DataError, errors.HubError) as error:  # PPO does not need the pairs
            return f"data.preferences: {error}"
        fits = fitting_pairs(readers.draw_rows(val, data.max_val_rows, seed), chat, data)
        some = fits.rows[: format_check.COUNT]
        pairs = [(prompt_row(row.prompt), row.chosen, row.rejected) for row in some]
    if not pairs:
        return "data.preferences has none"
    rows, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    high, low = (
        collector.score_texts(source, name, rows, side, chat, run.device) * source.std + source.mean
        for side in (chosen, rejected)
    )
    scores = high.tolist(), low.tolist()
    doubts, problems = list[str](), list[str]()
    if isinstance(source, TextReward):
        tokens = source.encode(rows[0], chosen[0])["input_ids"]
        rendered, problems = source.model.show(tokens), source.model.problems(tokens)
        doubts = [] if known else source.model.doubts(rows[0], chosen[0])
    else:
        reply = collector.encode_responses(rows[:1], chosen[:1], chat).rollout
        rendered = chat.show(masking.real_tokens(reply.tokens, reply.mask)[0])
    if not known and run.settings.reward[name].weight > 0:
        problems += format_check.ranked_backwards(*scores)
    return format_check.FormatResult(known, *scores, rendered, problems, doubts)


class EvalReward(stage.Stage):
    """The fitness report, from scores of held-out pairs, samples of the SFT model and probes."""

    name = "eval_reward"
    title = "Fitness of a reward"
    config = EvalConfig
    data = "preferences"
    reads_reward = True
    summary = ("fitness/accuracy", "fitness/length_gap", "fitness/flags")
    hands_over = "report"
    divides = True

    def measure(self, run: Run) -> Path:
        settings, data = run.settings, run.settings.data
        config: EvalConfig = settings.config
        build_reward = build_rewards.prepare_reward(run, {"prompt", "messages"})
        code = build_rewards.code_of(settings)  # before the files of the functions can change
        rows = run.rows(self.data)
        with Working("looking through the pairs"):
            problems = find_problems(rows.val, rows.train)
        print_problems(problems)
        fits = fitting_pairs(rows.val, run.chat, data)
        pairs = readers.draw_rows(fits, data.max_val_rows, settings.seed).rows
        if not pairs:
            raise errors.DataError(
                f"no held-out pair of {fits.source} is within data.max_prompt_tokens "
                f"({data.max_prompt_tokens}) and data.max_response_tokens "
                f"({data.max_response_tokens})"
            )
        few = lengths.note_on_few(len(pairs), to_validate=True)
        print_line(", ".join([f"{len(pairs)} held-out pairs", *few]))
        roles = run.load_model()
        prompts = [run.chat.prompt_tokens(pair.prompt) for pair in pairs]
        batch = memory.MicrobatchSize(f"{self.name}.batch_size", config.batch_size)
        reward = build_reward(roles, batch)
        roles.to(run.device)
        check_formats(run, reward)

        rollouts = sft_samples(run, roles, prompts, config.samples, config, run.replicas)
        texts = [prompt_row(pair.prompt) for pair in pairs]
        with Working("scoring SFT samples", config.samples) as working:
            shown = working.track(rollouts, lambda one: len(one.tokens))
            decoded = (collector.decode_responses(x.to(run.device), texts, run.chat) for x in shown)
            parts = torch.cat([divided(reward, some, run.replicas) for some in decoded])
        moments = [shaping.NO_SCORES.including(part) for part in parts.unbind(dim=1)]

        def scores_in_ppo(decoded: records.DecodedResponses) -> Float[Tensor, " B"]:
            """Return scores as PPO gets them at its start; running moments are of the samples."""
            parts = divided(reward, decoded, run.replicas)
            return shaping.normalised_sum(parts, reward.terms, moments)

        report = measure_reward(
            run,
            scores_in_ppo,
            pairs,
            (shaping.normalised_sum(parts, reward.terms, moments).cpu(), rollouts),
            logit_scale=logit_scale(run, reward, moments[0]),
            title=f"{folders.run_name(settings)}: {', '.join(settings.reward)}",
            problems=problems,
            sampled_from="prompts of the held-out pairs",
            scale="The scores are those that PPO maximises at its start: weighted, normalised and "
            "clipped as the reward says; running moments are those of the SFT samples.",
        )
        with leave_final(run, report.metrics) as (whole, loggers):
            write_fitness(report, whole, loggers, 0)
            (whole / build_rewards.FUNCTIONS).write_text(json.dumps(code) + "\n")
        print_line(f"{self.name} finished: {run.folder / folders.FINAL / checkpoint.PAGE}")
        return run.folder / folders.FINAL
