"""stage=sft: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule

from lightning_rlhf.callbacks.evaluation import HELD_OUT, SAMPLES, write_samples
from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.text_metrics import unigram_perplexity
from lightning_rlhf.data.batches import StageData, collate_prompts
from lightning_rlhf.data.lengths import PromptTokens
from lightning_rlhf.io.console import print_line, visible_line
from lightning_rlhf.models.config import SFT as ROLE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import SFTModule
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.report.curves import SFT_PANELS
from lightning_rlhf.report.tables import spread
from lightning_rlhf.rollout.collector import sample_reference, shard
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.runs.run import Run
from lightning_rlhf.stages.supervised import Supervised

RESPONSES, LONGEST = 5, 128
"""Number of responses that are sampled at the end, and the largest number of their tokens."""
SHOWN = ("prompt", "demonstration", "response")
"""Keys of the texts that are kept of each of them."""


class SFT(Supervised):
    """Supervised fine-tuning of a language model, which becomes the SFT model of the run."""

    name = "sft"
    title = "Supervised fine-tuning"
    config = SFTConfig
    panels = staticmethod(lambda measured: SFT_PANELS)
    data = "demonstrations"
    reads_sft = False
    goal = (("eval/loss", "min"),)
    headlines = ("update/loss", "eval/loss")
    summary = ("eval/loss",)
    module_class = SFTModule
    role = ROLE

    def read(self, run: Run, rows: Any) -> tuple[Any, StageData]:
        train, self.batches = super().read(run, rows)
        return train, self.batches

    def add_roles(self, run: Run, roles: Roles) -> None:
        if run.settings.config.finetune == "lora":
            roles.add_adapter(ROLE, run.settings.model.lora, run.settings.seed)
        else:
            roles.assign(ROLE)

    def summarise(
        self, run: Run, module: LightningModule, metrics: dict[str, float]
    ) -> dict[str, float]:
        data = self.batches
        if data.val:
            texts = ([e.imitated for e in some] for some in (data.train, data.val))
            metrics = metrics | {"eval/unigram_perplexity": unigram_perplexity(*texts)}
        metrics = super().summarise(run, module, metrics)
        sample_held_out(run, module.roles, data)  # type: ignore[arg-type]
        return metrics


def sample_held_out(run: Run, roles: Roles, data: StageData) -> None:
    """Print and keep a response to each of RESPONSES held-out prompts, sampled at temperature 1.

    The random numbers are the responses' own: the state of torch's generators stays as it is.
    """
    chat = run.chat
    different = {tuple(e.prompt): e.response for e in data.val if e.prompt}
    some = spread(list(different.items()), RESPONSES)
    limit: int = getattr(roles.causal_lm.config, "max_position_embeddings", None) or 10**9
    room = min(LONGEST, limit - max((len(prompt) for prompt, _ in some), default=0))
    if not some or room < 1:
        return
    prompts = [PromptTokens(prompt, i) for i, (prompt, _) in enumerate(some)]
    (sampled,) = sample_reference(
        roles.to(run.device),
        shard([(collate_prompts(prompts, chat.pad_token_id), 1)], ONE, divides=False),
        SamplingParams(
            max_response_tokens=min(room, run.settings.data.max_response_tokens),
            temperature=1.0,
            end_token_ids=chat.end_token_ids,
        ),
        torch.Generator().manual_seed(run.settings.seed),
        role=ROLE,
    )
    said = real_tokens(sampled.responses, sampled.response_mask)
    texts = [
        dict(zip(SHOWN, map(chat.decode_response, (*some[i], response)), strict=True))
        for i, response in zip(sampled.index.tolist(), said, strict=True)
    ]
    write_samples(run.folder / SAMPLES / HELD_OUT, texts)
    if run.settings.samples:
        print_line("responses to held-out prompts, sampled from the trained model:")
        for one in texts:
            print_line(visible_line(f"  {one['prompt'][:160]} -> {one['response'][:160]}"))
