"""stage=eval_reward: a report on whether a reward, of any source, is fit to be maximised by PPO."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_rlhf.callbacks.loggers import close_loggers, log_pictures
from lightning_rlhf.core.config import EvalConfig, RMConfig
from lightning_rlhf.core.errors import CheckpointError, DataError, HubError
from lightning_rlhf.core.masking import by_length, real_tokens
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.metrics import check_names
from lightning_rlhf.core.records import DecodedResponses, SampledResponses
from lightning_rlhf.core.shaping import NO_SCORES, RunningMoments, paid_sum
from lightning_rlhf.data.batches import collate_prompts
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.data.problems import Problems, find_problems
from lightning_rlhf.data.readers import draw_rows, load
from lightning_rlhf.data.rows import Preference, Rows, prompt_row
from lightning_rlhf.evaluation.build_rewards import build_reward, light_sources
from lightning_rlhf.evaluation.run_report import leave_report
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.build_roles import check_positions, check_room
from lightning_rlhf.models.checkpoint import PAGE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.report.fitness import ScoredPair, ScoredProbe, measure_fitness, measure_probes
from lightning_rlhf.report.fitness_page import write_fitness
from lightning_rlhf.rewards.config import HeadConfig, LearnedConfig, TextModelConfig
from lightning_rlhf.rewards.format_check import (
    COUNT,
    FormatResult,
    compare_scores,
    make_probes,
    ranked_backwards,
    read_pairs,
)
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rewards.weighted import Reward, Source
from lightning_rlhf.rollout.collector import (
    decode_responses,
    encode_responses,
    sample_reference,
    score_texts,
    shard,
)
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.runs.console import note_on_few, print_problems
from lightning_rlhf.runs.folders import FINAL, reward_role, run_name
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Stage, reward_key

PROBED = 64
"""Number of prompts for which every probe is scored."""
Written = tuple[dict[str, float], dict[str, Path], list[str]]
"""Numbers, pictures and verdicts of a report, as `write_fitness` returns them."""


def run_eval(ready: Run) -> Path:
    """Score held-out pairs, samples of the SFT model and probes; write the report."""
    settings = ready.settings
    config: EvalConfig = settings.config
    rows = ready.rows("preferences")
    with Working("looking through the pairs"):
        problems = find_problems(rows.val, rows.train)
    print_problems(problems)
    light = light_sources(ready, {"prompt", "messages"})
    pairs = held_out_pairs(rows.val, ready)
    roles = ready.load_model()
    prompts = [ready.chat.prompt_tokens(pair.prompt) for pair in pairs]
    check_lengths(ready, roles, prompts, config)
    reward = build_reward(
        ready, roles, light, MicrobatchSize(f"{settings.stage}.batch_size", config.batch_size)
    )
    roles.to(ready.device)
    check_formats(ready, reward)

    rollouts = sft_samples(ready, roles, prompts, config.samples, config, ready.replicas)
    texts = [prompt_row(pair.prompt) for pair in pairs]
    decoded = [
        decode_responses(rollout.to(ready.device), texts, ready.chat) for rollout in rollouts
    ]
    with Working("scoring SFT samples", config.samples) as working:
        shown = working.track(decoded, lambda some: len(some.responses))
        parts = torch.cat([divided(reward, some, ready.replicas) for some in shown])
    moments = [NO_SCORES.including(part) for part in parts.unbind(dim=1)]

    def paid(decoded: DecodedResponses) -> Float[Tensor, " B"]:
        """Return scores as PPO gets them at its start; running moments are of the SFT samples."""
        found = divided(reward, decoded, ready.replicas)
        return paid_sum(found, reward.terms, moments)

    scores = paid_sum(parts, reward.terms, moments).cpu()
    with TemporaryDirectory() as beside:
        written = report_on(
            ready,
            paid,
            pairs,
            (scores, rollouts),
            problems,
            Path(beside),
            title=f"{run_name(settings)}: {', '.join(settings.reward)}",
            sampled_from="prompts of the held-out pairs",
            scale="The scores are what PPO would be paid at its start: weighted, normalised and "
            "clipped as the reward says; running moments are those of the SFT samples.",
            logit_scale=logit_scale(ready, reward, moments[0]),
        )
        if not ready.replicas.is_first:
            sys.exit()
        final = leave_final(
            ready,
            written[0],
            lambda loggers: tell_fitness(written, loggers, 0),
            lambda whole: shutil.copytree(beside, whole, dirs_exist_ok=True),
        )
    print_line(f"{settings.stage} finished: {final / PAGE}")
    return final


def leave_final(
    ready: Run,
    metrics: Mapping[str, float],
    log: Callable[[Sequence[Logger]], object],
    write: Callable[[Path], object],
) -> Path:
    """Claim the run's folder, log the metrics, and write `final/` whole; return its path.

    log: logs what else there is; write: writes the files into a folder.
    """
    settings = ready.settings
    check_names(metrics)
    folder = ready.claim()
    loggers = ready.open_loggers()
    exit_code = 1
    try:
        for logger in loggers:
            logger.log_metrics(dict(metrics), step=0)
        log(loggers)
        exit_code = 0
    finally:
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
    with written_whole(folder / FINAL, kind="folder") as whole:
        write(whole)
    leave_report(folder, settings.definition)
    return folder / FINAL


def divided(reward: Reward, decoded: DecodedResponses, replicas: Replicas) -> Float[Tensor, "B K"]:
    """Return the components of all responses, of which each process scores a share."""
    mine = replicas.share(by_length(decoded.rollout.mask))
    parts = reward(decoded.select(mine)).tolist() if len(mine) else []
    return torch.tensor(replicas.merged(mine, parts), device=decoded.rollout.tokens.device)


def held_out_pairs(rows: Rows[Preference], ready: Run) -> Sequence[Preference]:
    """Return 1 to data.max_val_rows of the pairs that no length limit drops or cuts.

    Raises DataError where there is none.
    """
    data = ready.settings.data
    fits = fitting_pairs(rows, ready.chat, data)
    pairs = draw_rows(fits, data.max_val_rows, ready.settings.seed).rows
    if not pairs:
        raise DataError(
            f"no held-out pair of {rows.source} is within data.max_prompt_tokens "
            f"({data.max_prompt_tokens}) and data.max_response_tokens ({data.max_response_tokens})"
        )
    notes = note_on_few(len(pairs), to_validate=True)
    print_line(", ".join([f"{len(pairs)} held-out pairs", *notes]))
    return pairs


def logit_scale(ready: Run, reward: Reward, seen: RunningMoments) -> float | None:
    """Return the factor that turns a difference of scores into log-odds; None where none does."""
    (config, *others), source = list(ready.settings.reward.values()), reward.sources[0]
    is_learned = isinstance(config, HeadConfig | TextModelConfig)
    if others or not is_learned or config.clip is not None or config.weight <= 0:
        return None
    assert isinstance(source, LearnedReward | TextReward)
    running = seen.std if config.normalization == "running" else 1.0
    return source.std * running / config.weight


def fitting_pairs(rows: Rows[Preference], chat: ChatFormat, config: DataConfig) -> Rows[Preference]:
    """Return the pairs that no length limit drops or cuts."""

    def fits(row: Preference) -> bool:
        longest = max(len(chat.response_tokens(side)) for side in (row.chosen, row.rejected))
        prompt = len(chat.prompt_tokens(row.prompt))
        return longest <= config.max_response_tokens and prompt <= config.max_prompt_tokens

    return rows.only([i for i, row in enumerate(rows.rows) if fits(row)])


def report_on(
    ready: Run,
    source: Source,
    pairs: Sequence[Preference],
    samples: tuple[Float[Tensor, " N"], Sequence[SampledResponses]],
    problems: Problems,
    folder: Path,
    *,
    title: str,
    sampled_from: str,
    scale: str,
    logit_scale: float | None,
) -> Written:
    """Write report.md, its pictures and numbers to `folder`.

    pairs: one or more held-out pairs.
    samples: scores of responses of the SFT model, and the responses.
    sampled_from, scale: as for `write_fitness`.
    logit_scale: factor that turns a difference of scores into log-odds; None where none does.
    """
    chat, longest = ready.chat, ready.settings.data.max_response_tokens

    def score(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
        found: list[float] = score_texts(source, title, rows, texts, chat, ready.device).tolist()
        return found

    with Working(f"fitness: scoring {len(pairs):,} held-out pairs"):
        prompts = [prompt_row(pair.prompt) for pair in pairs]
        chosen = score(prompts, [pair.chosen for pair in pairs])
        rejected = score(prompts, [pair.rejected for pair in pairs])
        scored = [
            ScoredPair(
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
        first = {row["prompt"]: i for i, row in reversed(list(enumerate(prompts)))}
        probed = sorted(first.values())[:PROBED]
        probes = make_probes([prompts[i] for i in probed], [pairs[i].chosen for i in probed])
        texts = [shortened(probe.response, chat, longest) for probe in probes]
        found = score([prompts[probed[probe.row]] for probe in probes], texts)
        results = measure_probes([
            ScoredProbe(kind=probe.kind, response=text, score=s, pair=scored[probed[probe.row]])
            for probe, text, s in zip(probes, texts, found, strict=True)
        ])  # fmt: skip
    with Working("fitness: writing the report"):
        lengths = [n for some in samples[1] for n in some.response_mask.sum(dim=1).tolist()]
        fitness = measure_fitness(
            scored,
            list(zip(samples[0].tolist(), lengths, strict=True)),
            logit_scale=logit_scale,
            seed=ready.settings.seed,
        )
        return write_fitness(
            folder,
            title=title,
            fitness=fitness,
            probes=results,
            problems=problems,
            sampled_from=sampled_from,
            scale=scale,
        )


def shortened(text: str, chat: ChatFormat, longest: int) -> str:
    """Return the start of a text that has at most `longest` tokens, its end token included."""
    tokens = chat.response_tokens(text)
    return text if len(tokens) <= longest else chat.show(tokens[: longest - 1])


def tell_fitness(written: Written, loggers: Sequence[Logger], step: int) -> None:
    """Print the verdicts, and send the pictures to the loggers."""
    log_pictures(loggers, written[1], step)
    for verdict in written[2]:
        print_line(verdict)


def check_lengths(
    ready: Run, roles: Roles, prompts: Sequence[Sequence[int]], config: RMConfig | EvalConfig
) -> None:
    """Raise ConfigError where responses to the prompts do not fit the model or the memory."""
    longest = max(len(prompt) for prompt in prompts)
    key, response = "data.max_response_tokens", ready.settings.data.max_response_tokens
    what = f"the longest prompt ({longest} tokens) with {key} ({response})"
    check_positions(roles, longest + response, what, warns=False)
    check_room(roles, config.batch_size, longest, response, key, ready.device)


def sft_samples(
    ready: Run,
    roles: Roles,
    prompts: Sequence[Sequence[int]],
    count: int,
    config: RMConfig | EvalConfig,
    replicas: Replicas = ONE,
) -> list[SampledResponses]:
    """Sample `count` responses of the SFT model to prompts in random order; return them on CPU.

    Prompts repeat where there are fewer.

    replicas: processes that divide the batches; all return all responses.
    Warns where one is longer, with its prompt, than the model was made for.
    """
    settings, chat = ready.settings, ready.chat
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    chosen = [order[i % len(order)] for i in range(count)]
    batches = (
        collate_prompts(
            [PromptTokens(prompts[i], i) for i in chosen[start : start + config.batch_size]],
            chat.pad_token_id,
        )
        for start in range(0, count, config.batch_size)
    )
    shards = shard(((batch, 1) for batch in batches), replicas, divides=False)
    with Working("sampling from the SFT model", sum(len(one.numbers) for one in shards)) as working:
        samples = sample_reference(
            roles,
            working.track(shards, lambda batch: len(batch.numbers)),
            SamplingParams(
                max_response_tokens=settings.data.max_response_tokens,
                temperature=config.temperature,
                end_token_ids=chat.end_token_ids,
            ),
            torch.Generator().manual_seed(settings.seed),
            replicas,
        )
    longest = max(int(rollout.mask.sum(dim=1).max()) for rollout in samples)
    what = f"the longest of {count} responses of the SFT model, with its prompt,"
    check_positions(roles, longest, what)
    return samples


def check_formats(ready: Run, reward: Reward) -> None:
    """Compare every reward model with its scores at training, and print the result.

    Raises CheckpointError where they differ and `format_check` is strict.
    """
    for (name, config), source in zip(ready.settings.reward.items(), reward.sources, strict=True):
        if not isinstance(config, LearnedConfig) or config.format_check == "off":
            continue
        assert isinstance(source, LearnedReward | TextReward)
        with Working(f"checking the format of reward {name}"):
            result = check_format(ready, name, source)
        if result is None:
            print_line(
                f"reward {name}: no held-out pairs to check its format with (data.preferences)"
            )
            continue
        lines = result.lines(name, config.format_tolerance, shows_text=ready.settings.debug)
        fits = result.fits(config.format_tolerance)
        for line in lines:
            print_line(line, "bold red" if not fits else "")
        if not fits and config.format_check == "strict":
            advice = format_advice(result, reward_key(ready.settings, name))
            raise CheckpointError(f"{lines[0]}. {advice}")


def format_advice(result: FormatResult, key: str) -> str:
    """Return what to do about a reward model whose scores differ from those at training."""
    on = f"{key}.format_check=warn goes on all the same"
    if result.gap is None:
        return f"Mend that; or {on}"
    if result.rendered == result.own_rendered and not result.problems:
        return f"The text is the same: its numbers differ by dtype or quantization. {on}"
    return f"It would be asked about other text than it was trained on. Mend the format; or {on}"


def check_format(ready: Run, name: str, source: LearnedReward | TextReward) -> FormatResult | None:
    """Return the comparison for one reward model; None where there are no pairs."""
    final = ready.parents.get(reward_role(ready.settings, name))
    known = read_pairs(final.path) if final is not None else []
    pairs = [(p.row, p.chosen, p.rejected) for p in known] or labelled_pairs(ready)
    if not pairs:
        return None
    rows, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    source = replace(source, uncertainty_coef=0.0)  # the recorded scores are means
    doubts: list[str] = []
    problems: list[str] = []
    if isinstance(source, TextReward):
        rendered = source.rendered(rows[0], chosen[0])
        problems = list(source.problems(rows[0], chosen[0]))
        doubts = [] if known else source.model.doubts(rows[0], chosen[0])
    else:
        reply = encode_responses(rows[:1], chosen[:1], ready.chat).rollout
        rendered = ready.chat.show(real_tokens(reply.tokens, reply.mask)[0])
    high, low = (
        (score_texts(source, name, rows, side, ready.chat, ready.device) * source.std + source.mean)
        for side in (chosen, rejected)
    )
    if not known and ready.settings.reward[name].weight > 0:
        problems += ranked_backwards(high.tolist(), low.tolist())
    return compare_scores(known, high.tolist(), low.tolist(), rendered, problems, doubts)


def labelled_pairs(ready: Run) -> list[tuple[Mapping[str, Any], str, str]]:
    """Return some held-out pairs of the data: (row of the prompt, chosen, rejected)."""
    data = ready.settings.data
    if data.preferences.train is None:
        return []
    try:
        held_out = load("preferences", data, ready.settings.seed).val
    except (DataError, HubError) as error:  # PPO does not need the pairs
        print_line(f"data.preferences, to check the format of rewards with: {error}")
        return []
    some = draw_rows(held_out, data.max_val_rows, ready.settings.seed)
    rows = fitting_pairs(some, ready.chat, data).rows[:COUNT]
    return [(prompt_row(row.prompt), row.chosen, row.rejected) for row in rows]


class EvalReward(Stage):
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
        return run_eval(run)
