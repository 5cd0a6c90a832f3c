"""The report on whether a reward is fit to be maximised, and the check of its text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_rlhf.callbacks.loggers import log_pictures
from lightning_rlhf.core.config import EvalConfig, RMConfig
from lightning_rlhf.core.errors import CheckpointError, DataError, HubError
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.metrics import check_names
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.data.batches import collate_prompts, pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.data.problems import Problems
from lightning_rlhf.data.readers import Rows, load, sample
from lightning_rlhf.data.rows import Preference, prompt_row
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.build_roles import check_positions, check_room
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.report.checks import metrics
from lightning_rlhf.report.fitness import (
    ScoredPair,
    ScoredProbe,
    ScoredSample,
    measure_fitness,
    measure_probes,
)
from lightning_rlhf.report.fitness_page import Written, write_fitness
from lightning_rlhf.rewards.config import LearnedConfig
from lightning_rlhf.rewards.format_check import (
    COUNT,
    FormatResult,
    KnownPair,
    compare_scores,
    make_probes,
    ranked_backwards,
    read_pairs,
)
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rewards.weighted import Reward, Source
from lightning_rlhf.rollout.build_sampler import count_mine, deal, sample_reference, sample_rewards
from lightning_rlhf.rollout.collector import encode_responses, score_texts
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.stages.folder.folders import reward_role
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.stage import reward_key

PROBED = 64
"""Number of prompts for which every probe is scored."""
ScoreTexts = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[float]]
"""Function: (rows of the prompts, responses) -> reward of each response."""


def fitting(rows: Rows[Preference], chat: ChatFormat, config: DataConfig) -> Rows[Preference]:
    """Return the pairs that no length limit drops or cuts."""

    def fits(row: Preference) -> bool:
        longest = max(len(chat.response_tokens(side)) for side in (row.chosen, row.rejected))
        prompt = len(chat.prompt_tokens(row.prompt))
        return longest <= config.max_response_tokens and prompt <= config.max_prompt_tokens

    return rows.only([i for i, row in enumerate(rows.rows) if fits(row)])


def write_report(
    folder: Path,
    source: Source,
    pairs: Sequence[Preference],
    samples: tuple[Float[Tensor, " N"], Sequence[int]],
    problems: Problems,
    *,
    title: str,
    sampled_from: str,
    scale: str,
    logit_scale: float | None,
    chat: ChatFormat,
    longest: int,
    device: torch.device,
    seed: int,
) -> tuple[Written, dict[str, float]]:
    """Write report.md, its pictures and numbers to `folder`; return the numbers by metric name.

    pairs: one or more held-out pairs.
    samples: scores and numbers of tokens of responses of the SFT model.
    sampled_from, scale: as for `write_fitness`.
    logit_scale: factor that turns a difference of scores into log-odds; None where none does.
    longest: number of tokens, the end token included, after which a probe is cut.
    """

    def score(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
        found: list[float] = score_texts(source, title, rows, texts, chat, device).tolist()
        return found

    with Working(f"fitness: scoring {len(pairs):,} held-out pairs"):
        scored = scored_pairs(pairs, score, chat)
    with Working("fitness: scoring probes"):
        results = measure_probes(scored_probes(pairs, scored, score, chat, longest))
    with Working("fitness: writing the report"):
        fitness = measure_fitness(
            scored,
            [ScoredSample(s, n) for s, n in zip(samples[0].tolist(), samples[1], strict=True)],
            logit_scale=logit_scale,
            seed=seed,
        )
        page = write_fitness(
            folder,
            title=title,
            fitness=fitness,
            probes=results,
            problems=problems,
            sampled_from=sampled_from,
            scale=scale,
        )
    return page, metrics(fitness, results, page.findings)


def scored_pairs(
    pairs: Sequence[Preference], score: ScoreTexts, chat: ChatFormat
) -> list[ScoredPair]:
    """Return the pairs with the reward of each side."""
    prompts = [prompt_row(pair.prompt) for pair in pairs]
    chosen = score(prompts, [pair.chosen for pair in pairs])
    rejected = score(prompts, [pair.rejected for pair in pairs])
    return [
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


def scored_probes(
    pairs: Sequence[Preference],
    scored: Sequence[ScoredPair],
    score: ScoreTexts,
    chat: ChatFormat,
    longest: int,
) -> list[ScoredProbe]:
    """Return every probe of the first PROBED different prompts, cut after `longest` tokens."""
    prompts = [prompt_row(pair.prompt) for pair in pairs]
    first = {row["prompt"]: i for i, row in reversed(list(enumerate(prompts)))}
    probed = sorted(first.values())[:PROBED]
    probes = make_probes([prompts[i] for i in probed], [pairs[i].chosen for i in probed])
    probes = [replace(p, response=cut(p.response, chat, longest)) for p in probes]
    found = score([prompts[probed[p.row]] for p in probes], [p.response for p in probes])
    return [
        ScoredProbe(kind=p.kind, response=p.response, score=s, pair=scored[probed[p.row]])
        for p, s in zip(probes, found, strict=True)
    ]


def cut(text: str, chat: ChatFormat, longest: int) -> str:
    """Return the start of a text that has at most `longest` tokens, its end token included."""
    tokens = chat.response_tokens(text)
    return text if len(tokens) <= longest else chat.show(tokens[: longest - 1])


def known_pairs(roles: Roles, pairs: Sequence[Preference], chat: ChatFormat) -> list[KnownPair]:
    """Return some pairs with the reward model's scores in its training format: right-padded."""
    known = []
    for pair in pairs[:COUNT]:
        prompt = chat.prompt_tokens(pair.prompt)
        sides = [[*prompt, *chat.response_tokens(side)] for side in (pair.chosen, pair.rejected)]
        tokens, mask = pad(sides, chat.pad_token_id, "right")
        with torch.no_grad():
            chosen, rejected = roles.reward(tokens.to(roles.device), mask.to(roles.device)).tolist()
        known.append(
            KnownPair(
                row=prompt_row(pair.prompt),
                chosen=pair.chosen,
                rejected=pair.rejected,
                chosen_score=chosen,
                rejected_score=rejected,
                rendered=chat.show(sides[0]),
            )
        )
    return known


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

    replicas: processes that divide the batches; all return all responses.
    Warns where one is longer, with its prompt, than the model was made for.
    """
    settings, chat = ready.settings, ready.chat
    batches = drawn_prompts(
        prompts, count, config.batch_size, pad_id=chat.pad_token_id, seed=settings.seed
    )
    dealt = deal(((batch, 1) for batch in batches), replicas, divides=False)
    with Working("sampling from the SFT model", count_mine(dealt)) as working:
        samples = sample_reference(
            roles,
            working.track(dealt, lambda batch: len(batch.mine)),
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


def scored_samples(roles: Roles, rollouts: Sequence[SampledResponses]) -> Float[Tensor, " B"]:
    """Return the raw reward of each response of the SFT model, on the CPU."""
    with Working("scoring SFT samples", sum(len(r.tokens) for r in rollouts)) as working:
        return sample_rewards(roles, working.track(rollouts, lambda r: len(r.tokens)))


def drawn_prompts(
    prompts: Sequence[Sequence[int]], count: int, batch_size: int, *, pad_id: int, seed: int
) -> Iterator[Prompts]:
    """Yield batches of `count` prompts in all, in a random order; prompts repeat if too few."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    chosen = [order[i % len(order)] for i in range(count)]
    for start in range(0, count, batch_size):
        rows = [PromptTokens(prompts[i], i) for i in chosen[start : start + batch_size]]
        yield collate_prompts(rows, pad_id)


def response_lengths(rollouts: Sequence[SampledResponses]) -> list[int]:
    """Return the number of tokens of each response."""
    return [n for rollout in rollouts for n in rollout.response_mask.sum(dim=1).tolist()]


def log_fitness(
    page: Written, numbers: Mapping[str, float], loggers: Sequence[Logger], step: int
) -> None:
    """Print the verdicts, and send the numbers and pictures to the loggers."""
    check_names(numbers)
    for logger in loggers:
        logger.log_metrics(dict(numbers), step=step)
    log_pictures(loggers, page.pictures, step)
    print_line(page.verdict)
    if page.about_pairs is not None:
        print_line(page.about_pairs)


def check_formats(ready: Run, reward: Reward) -> None:
    """Compare every reward model with its scores at training, and print the result.

    Raises CheckpointError where they differ and `format_check` is strict.
    """
    for (name, config), source in zip(ready.settings.reward.items(), reward.sources, strict=True):
        if not isinstance(config, LearnedConfig) or config.format_check == "off":
            continue
        assert isinstance(source, LearnedReward | TextReward)
        key = reward_key(ready.settings, name)
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
            raise CheckpointError(f"{lines[0]}. {advice(result, key)}")


def advice(result: FormatResult, key: str) -> str:
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
    pairs = [(p.row, p.chosen, p.rejected) for p in known] or labelled(ready)
    if not pairs:
        return None
    rows, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    source = replace(source, uncertainty_coef=0.0)  # the recorded scores are means
    if isinstance(source, TextReward):
        rendered = source.rendered(rows[0], chosen[0])
        problems = source.problems(rows[0], chosen[0])
    else:
        reply = encode_responses(rows[:1], chosen[:1], ready.chat).rollout
        rendered, problems = ready.chat.show(real_tokens(reply.tokens, reply.mask)[0]), []
    high, low = (
        (score_texts(source, name, rows, side, ready.chat, ready.device) * source.std + source.mean)
        for side in (chosen, rejected)
    )
    doubts: list[str] = []
    if not known and isinstance(source, TextReward):
        doubts = source.model.doubts(rows[0], chosen[0])
    if not known and ready.settings.reward[name].weight > 0:
        problems = [*problems, *ranked_backwards(high.tolist(), low.tolist())]
    return compare_scores(known, high.tolist(), low.tolist(), rendered, problems, doubts)


def labelled(ready: Run) -> list[tuple[Mapping[str, Any], str, str]]:
    """Return some held-out pairs of the data: (row of the prompt, chosen, rejected)."""
    data = ready.settings.data
    if data.preferences.train is None:
        return []
    try:
        held_out = load("preferences", data, ready.settings.seed).val
    except (DataError, HubError) as error:  # PPO does not need the pairs
        print_line(f"data.preferences, to check the format of rewards with: {error}")
        return []
    some = sample(held_out, data.max_val_rows, ready.settings.seed)
    rows = fitting(some, ready.chat, data).rows[:COUNT]
    return [(prompt_row(row.prompt), row.chosen, row.rejected) for row in rows]
