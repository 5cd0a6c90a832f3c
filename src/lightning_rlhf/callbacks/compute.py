"""Tokens, memory and floating-point operations of a run, these by the standard formula.

For n tokens in rows of S tokens, m of whose hidden states go through the output layer:

    forward = 2 N n + 2 d V m + 4 A sum over rows of S^2
    update  = forward + backward
    backward = 2 N n + 2 d V m        gradients of the activations
               + 2 N' n [+ 2 d V m]   gradients of the weights that are trained [the output layer's]
               + 8 A sum of S^2       gradients of attention: twice its forward pass
               [+ forward]            with gradient checkpointing

N counts the weights of the trunk's linear layers and of the role's adapters, N' those of them that
are trained, d V the output layer's, and A heads * head size summed over the layers with softmax
attention. A trained weight takes 6 operations a token, a frozen one 4, and one that only reads 2.

Source: 2 N forward and 6 N in training, Kaplan et al. 2020, section 2.1,
https://arxiv.org/abs/2001.08361; attention of 12 layers * hidden * S in training, Chowdhery et al.
2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311
Departs: N has no embedding, and the output layer counts for the tokens that it reads. Attention is
its whole square, as in PaLM and in torch's counter; Kaplan's table 1 has the causal half. Left out
are padding, the state of linear attention (it grows with the tokens, not with their square), norms,
softmax, scalar heads, the optimizer, and experts that a router chooses.
"""

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rlhf.core import records, results
from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.io.storage import readable
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.roles import Roles, linear_layers
from lightning_rlhf.rollout.native import NativeSampler

PREFIX = "compute/"
PEAK = f"{PREFIX}peak_memory"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights of a model in one role, from which its operations follow."""

    frozen: int
    trained: int
    head: int
    """Number of weights of the output layer; 0 without one."""
    head_is_trained: bool
    attention: int
    """Number of heads times their size, summed over the layers with softmax attention."""
    recomputes: bool
    """True if decoder layers are computed once more for the gradient."""

    def forward(self, lengths: Int[Tensor, " B"], predicted: int = 0) -> float:
        """Return the operations of a forward pass.

        lengths: number of tokens of each row. predicted: number of tokens that the output layer
            predicts.
        """
        linear = 2.0 * (self.frozen + self.trained) * int(lengths.sum())
        return linear + 2.0 * self.head * predicted + self._scores(lengths)

    def update(self, lengths: Int[Tensor, " B"], predicted: int = 0) -> float:
        """Return the operations of a forward and a backward pass; arguments as for `forward`."""
        passes = (3 if self.recomputes else 2) * self.forward(lengths, predicted)
        weights = self.trained * int(lengths.sum()) + self.head_is_trained * self.head * predicted
        return passes + 2.0 * weights + self._scores(lengths)

    def _scores(self, lengths: Int[Tensor, " B"]) -> float:
        return 4.0 * self.attention * float((lengths.double() ** 2).sum())

    def sampling(
        self, prompts: Int[Tensor, " B"], responses: Int[Tensor, " B"], each: int
    ) -> float:
        """Return the operations of sampling with a cache, where token t attends to t tokens.

        prompts, responses: number of tokens of each response's prompt, and of the response.
        each: number of responses, one after the other, for which a prompt is read once.
        """
        steps = responses - 1  # nothing is predicted from the last token
        contexts = float((steps * prompts + steps * (steps + 1) // 2).sum())
        decoding = 2.0 * (self.frozen + self.trained) * int(steps.sum())
        decoding += 4.0 * self.attention * contexts
        return self.forward(prompts[::each], int(responses.sum())) + decoding


def weights_of(model: PreTrainedModel | Roles, role: str = "") -> Weights:
    """Return the numbers of weights of a model of any family; role: role of `Roles`."""
    adapters = model.adapters(role) if isinstance(model, Roles) else ()
    causal_lm: Any = model.causal_lm if isinstance(model, Roles) else model
    counts = {True: 0, False: 0}
    for _, layer, inputs, outputs in linear_layers(causal_lm.base_model, adapters):
        counts[layer.weight.requires_grad] += inputs * outputs
    head, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 0)  # RWKV has none
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    layers = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return Weights(
        frozen=counts[False],
        trained=counts[True],
        head=0 if head is None else head.in_features * head.out_features,
        head_is_trained=head is not None and head.weight.requires_grad,
        attention=heads * size * sum(kind != "linear_attention" for kind in layers),
        recomputes=bool(getattr(causal_lm, "recomputes", False)),
    )


def iteration_totals(
    module: Any, result: results.IterationResult, devices: int = 1
) -> dict[str, float]:
    """Return what an iteration of PPO computed, by the name of its metric without the prefix.

        rollout    sampling [+ forward of the policy][+ forward of a critic apart]
        score      forward of the reference and of each reward model here
        update     (forward + backward of the policy) [+ the same of a critic apart], each epoch

    A critic on the policy's trunk costs nothing, nor does a reward on another machine; a reward
    model with a tokenizer of its own is taken to read as many tokens as the policy.
    kl_estimator=full adds a forward pass of the policy to the score, or of the reference to the
    update. The policy reads once more what its sampler gives no numbers for, and only forward
    during ppo.critic_warmup. Every sampler is taken to compute with a cache, and all but the native
    one to read a prompt once for each response to it. Responses that ppo.resample_groups replaced
    were sampled and scored, and are not learned from.

    module: a PPOModule after the iteration. devices: number of processes, each on its own device.
    """
    config, critic, collector = module.config, module.critic, module.collector
    batches = (result.experience, *result.replaced)
    sizes = torch.cat([records.row_lengths(batch).cpu() for batch in batches])
    learned = sizes[: len(result.experience)]
    lengths, responses = sizes.unbind(dim=1)
    tokens, generated = sizes.sum(dim=0).tolist()
    policy = weights_of(module.roles, POLICY)
    reference = weights_of(module.roles.reference, REFERENCE)
    each = config.samples_per_prompt if isinstance(collector.sampler, NativeSampler) else 1
    rollout = policy.sampling(lengths - responses, responses, each)
    score = reference.forward(lengths, generated)
    for model, role in collector.reward.models.values():
        score += weights_of(model, role).forward(lengths)  # type: ignore[arg-type]
    policy_learns = module.iteration > config.critic_warmup
    trained, predicted = learned.sum(dim=0).tolist()
    update = (policy.update if policy_learns else policy.forward)(learned[:, 0], predicted)
    readings = 1 + len(collector.reward.models) + collector.annotated
    if collector.annotated:
        rollout += policy.forward(lengths, generated)
    if critic is not None and not critic.shares_trunk:
        readings += 1
        apart = weights_of(critic.roles, critic.role)
        rollout += apart.forward(lengths)
        update += apart.update(learned[:, 0])
    if config.kl_estimator == "full" and config.kl_in == "reward":
        readings += 1
        score += policy.forward(lengths, generated)
    elif config.kl_estimator == "full":
        update += reference.forward(learned[:, 0], predicted)
    epochs = len(result.updates) / (len(learned) // config.minibatch_size)
    update, trained = epochs * update, round(epochs * trained)
    if module.ptx is not None and policy_learns:
        for number in range(len(result.updates)):
            batch = module.ptx.batch(module.iteration - 1, number)
            rows = batch.mask.sum(dim=1)
            trained += int(rows.sum())
            update += policy.update(rows, int(batch.target_mask.sum()))
    seconds = result.seconds
    return {
        "generated_tokens": generated,
        "scored_tokens": readings * tokens,
        "trained_tokens": trained,
        "rollout_flops": rollout,
        "score_flops": score,
        "update_flops": update,
        "flops": rollout + score + update,
        "device_s": devices * (seconds["rollout"] + seconds["score"] + seconds["update"]),
    }


def step_totals(module: Any, batch: Any, seconds: float, devices: int = 1) -> dict[str, float]:
    """Return what a step of SFT, a reward model or DPO computed, likewise; seconds: its time.

    A reward model's output is taken at the last token of each row; DPO's reference adds a forward
    pass, and the KL of kto one of both.
    """
    is_pair = isinstance(batch, records.Preferences)
    masks = (batch.chosen_mask, batch.rejected_mask) if is_pair else (batch.mask,)
    lengths = torch.cat([mask.sum(dim=1) for mask in masks]).cpu()
    tokens = int(lengths.sum())
    if not is_pair:
        predicted = int(batch.target_mask.sum())
    else:
        predicted = 0 if module.role == REWARD else tokens - 2 * int(batch.prompt_tokens.sum())
    policy = weights_of(module.roles, module.role)
    flops = policy.update(lengths, predicted)
    if isinstance(module.config, DPOConfig) and module.config.has_reference:
        reference = weights_of(module.roles.reference, REFERENCE)
        flops += reference.forward(lengths, predicted)
        if isinstance(batch, records.Labels):
            others = batch.other_target_mask.sum(dim=1)
            read = lengths - batch.target_mask.sum(dim=1) + others
            flops += sum(one.forward(read, int(others.sum())) for one in (policy, reference))
    return {"trained_tokens": tokens, "flops": flops, "device_s": devices * seconds}


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, else of the process.

    Linux's ru_maxrss starts at that of the process that started this one; VmHWM starts anew.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compute_line(stages: Sequence[Mapping[str, float]], of: str = "") -> str:
    """Return the totals of stages together in one line, with the largest of their memory peaks.

    stages: metrics of each. of: words that say whose, after a space.
    """
    names = {name for metrics in stages for name in metrics if name.startswith(PREFIX)}
    found = {name.removeprefix(PREFIX): sum(m.get(name, 0.0) for m in stages) for name in names}
    kinds = [kind for kind in ("generated", "scored", "trained") if f"{kind}_tokens" in found]
    tokens = ", ".join(f"{found[f'{kind}_tokens']:,.0f} {kind}" for kind in kinds)
    peak = readable(int(max(metrics[PEAK] for metrics in stages)))
    return (
        f"compute{of}: tokens {tokens}; {found['flops'] / 1e15:.4g} PFLOP; "
        f"{found['device_s']:,.1f} device seconds; peak memory {peak}"
    )
