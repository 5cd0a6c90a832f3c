"""PPO from a reward model, whole, in one file: the page to read first.

    prompts -> sample -> score -> experience -> minibatches -> loss -> step

It trains the quickstart's policy from the quickstart's models, and its numbers are those of
`stage=ppo`: a test compares rewards, advantages and losses. First the models, then this file:

    python train.py recipe=quickstart
    python examples/ppo_in_one_file.py [SFT_FINAL RM_FINAL]

Let the model answer, hear how good the answers were, make likelier what was better than expected,
and do not change too much at once. Four models take part:

    policy     the SFT model with a LoRA adapter, which learns
    critic     one linear layer on the policy's hidden states, which learns to predict the return
    reference  the SFT model: the policy with its adapter switched off
    reward     a classifier that stage=rm trained on pairs of answers

What is left out, as it changes no number of the quickstart's, and where the package has it:

    speed     rows that have ended and padding are computed here (rollout/native.py, kernels/)
    memory    a minibatch is one forward pass; the package splits it (modules/ppo.py)
    options   knobs that are off in the quickstart, GPUs, processes (core/, conf/stages/ppo.yaml)
    looking   evaluation on held-out prompts, metrics, diagnosis, reports (callbacks/, report/)
    safety    checkpoints and resume, checks of data, models and updates (stages/, modules/optim.py)

B sequences of a batch, P tokens of a prompt, T of a response. Prompts are padded on the left and
responses on the right, so that every response starts in column P. Masks are True on real tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np  # comes with transformers, and draws the package's seeds
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_utils import load_state_dict

# The quickstart's numbers; their units and sources stand in conf/stages/ppo.yaml.
SEED = 0
ITERATIONS, BATCH_SIZE, MINIBATCH_SIZE, PPO_EPOCHS = 150, 64, 32, 2
MAX_RESPONSE_TOKENS, TEMPERATURE, MISSING_EOS_PENALTY, KL_COEF = 48, 0.7, 1.0, 0.06
GAMMA, GAE_LAMBDA = 1.0, 0.95
CLIP_RANGE, CLIP_RANGE_VF, VF_COEF = 0.2, 0.2, 0.1
LR, VALUE_LR_FACTOR, MAX_GRAD_NORM = 1e-3, 3.0, 1.0
PROMPTS = Path(__file__).parents[1] / "recipes" / "quickstart" / "data" / "prompts_train.jsonl"


# 1. Prompts
def prompt_batches(prompts: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches [B,P] and masks without end; every epoch has an order of its own."""
    epochs = (np.random.default_rng((SEED, 0, e)).permutation(len(prompts)) for e in count())
    order = chain.from_iterable(epochs)
    while True:
        batch = [prompts[i] for i in islice(order, BATCH_SIZE)]
        width = max(map(len, batch))
        tokens = torch.tensor([[-1] * (width - len(prompt)) + prompt for prompt in batch])
        yield tokens.clamp(min=0), tokens >= 0


def positions(mask: Tensor) -> Tensor:
    """Return the position of each token among the real ones of its row, from 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


# 2. Sample
class Rollout(NamedTuple):
    """Prompts with the policy's responses."""

    tokens: Tensor  # [B,P+T]
    mask: Tensor  # [B,P+T]
    response_mask: Tensor  # [B,T]
    ended: Tensor  # [B], False where a response was cut at MAX_RESPONSE_TOKENS


@torch.no_grad()
def sample(
    policy: nn.Module, tokens: Tensor, mask: Tensor, end: int, generator: torch.Generator
) -> Rollout:
    """Draw a response to each prompt from softmax(logits / TEMPERATURE), up to an end token.

    Of a number u in [0, 1) it takes the first token up to which the probabilities sum to more than
    u. All numbers are drawn at once: no response depends on how long the others are.
    """
    uniform = torch.rand(len(tokens), MAX_RESPONSE_TOKENS, generator=generator)
    latest, width, cache = tokens, tokens.shape[1], None
    running = torch.ones(len(tokens), dtype=torch.bool)
    for u in uniform.split(1, dim=1):
        output = policy(
            input_ids=latest, attention_mask=mask.long(), past_key_values=cache, use_cache=True,
            position_ids=positions(mask)[:, -latest.shape[1] :], logits_to_keep=1,
        )  # fmt: skip
        cache = output.past_key_values
        cumulative = torch.softmax(output.logits[:, -1] / TEMPERATURE, dim=-1).cumsum(dim=-1)
        u = u * (1 - 1e-6) * cumulative[:, -1:]  # a rounded sum may end below 1
        latest = torch.searchsorted(cumulative, u, right=True)
        tokens, mask = torch.cat([tokens, latest], 1), torch.cat([mask, running[:, None]], 1)
        running = running & (latest[:, 0] != end)
        if not running.any():
            break
    return Rollout(tokens, mask, mask[:, width:], ~running)


# 3. Score
class ActorCritic(nn.Module):
    """The policy, and a critic that reads its hidden states."""

    def __init__(self, sft: str) -> None:
        """Add a new adapter to the SFT model, and a critic that predicts 0.

        The adapter starts with one of its two factors at 0: the policy starts as the SFT model.
        Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685
        """
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(sft).eval()
        torch.manual_seed(int(np.random.SeedSequence((SEED, *b"policy")).generate_state(1)[0]))
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.policy = PeftModel(model, lora)
        self.critic = nn.Linear(self.policy.config.hidden_size, 1)
        for parameter in self.critic.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rollout: Rollout | Experience) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probability, value and entropy at each response token [B,T].

        Token t of a response stands in column P+t and is predicted from the column before it, where
        the critic reads too: V(s_t) is the return expected before token t is chosen. Probabilities
        are those that were sampled from, with their temperature, or no ratio would start at 1.
        """
        length = rollout.response_mask.shape[1]
        output = self.policy(
            input_ids=rollout.tokens, attention_mask=rollout.mask.long(), output_hidden_states=True,
            position_ids=positions(rollout.mask), logits_to_keep=length + 1,
        )  # fmt: skip
        logprobs = torch.log_softmax(output.logits[:, :-1] / TEMPERATURE, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        chosen = logprobs.gather(-1, rollout.tokens[:, -length:, None]).squeeze(-1)
        return chosen, self.critic(output.hidden_states[-1][:, -length - 1 : -1])[..., 0], entropy


def load_reward(folder: Path) -> Callable[[Rollout], Tensor]:
    """Return the reward model as a function to scores [B], read at the last token of a response.

    A Bradley-Terry reward has no zero and no unit: stage=rm measured both on answers of the SFT
    model, which score 0 +- 1. Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325
    """
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    moments = json.loads((folder / "manifest.json").read_text())
    head = load_state_dict(str(folder / "roles" / "reward_head.safetensors"))
    mean = moments["reward_mean"] - head["linear.bias"]  # the classifier's last layer has no bias

    @torch.no_grad()
    def score(rollout: Rollout) -> Tensor:
        mask = rollout.mask
        tokens = rollout.tokens.where(mask, classifier.config.pad_token_id)
        raw = classifier(tokens, attention_mask=mask.long(), position_ids=positions(mask)).logits
        return (raw[:, 0] - mean) / moments["reward_std"]

    return score


# 4. Experience
class Experience(NamedTuple):
    """A rollout with all that the update needs; rewards, advantages and returns 0 on padding."""

    tokens: Tensor  # [B,P+T]
    mask: Tensor  # [B,P+T]
    response_mask: Tensor  # [B,T]
    old_logprobs: Tensor  # [B,T], of the policy that sampled
    old_values: Tensor  # [B,T], of the critic at that time
    kl: Tensor  # [B,T], log pi(a_t) - log pi_ref(a_t), nats
    rewards: Tensor  # [B,T]
    advantages: Tensor  # [B,T], whitened
    returns: Tensor  # [B,T], what the critic learns to predict
    score: Tensor  # [B]


@torch.no_grad()
def make_experience(
    actor: ActorCritic, reward: Callable[[Rollout], Tensor], rollout: Rollout
) -> Experience:
    """Turn one score a response into a reward, an advantage and a return a token.

        r_t = -KL_COEF (log pi(a_t) - log pi_ref(a_t)) + [t is the last token] score

    The price of leaving the reference keeps the policy to text that the reward model can judge.
    Source: Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593
    """
    mask = rollout.response_mask
    logprobs, values, _ = actor(rollout)  # of the policy as it sampled
    with actor.policy.disable_adapter():
        ref_logprobs, _, _ = actor(rollout)
    kl, score = torch.where(mask, logprobs - ref_logprobs, 0), reward(rollout)
    rewards = -KL_COEF * kl
    rewards[range(len(mask)), mask.sum(dim=1) - 1] += score - MISSING_EOS_PENALTY * ~rollout.ended
    advantages, returns = gae(rewards, values, mask)
    variance, mean = torch.var_mean(advantages[mask], correction=0)
    whitened = torch.where(mask, (advantages - mean) * torch.rsqrt(variance + 1e-8), 0)
    return Experience(*rollout[:3], logprobs, values, kl, rewards, whitened, returns, score)


def gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages, how much better than expected a token was, and returns; both [B,T].

        delta_t = r_t + GAMMA V_{t+1} - V_t          V after the last token is 0
        A_t     = delta_t + GAMMA GAE_LAMBDA A_{t+1}
        R_t     = A_t + V_t

    GAE_LAMBDA 1 trusts what happened, without bias and with much noise; 0 trusts the critic.
    Source: Schulman et al. 2015, eq. 11-16, https://arxiv.org/abs/1506.02438
    """
    advantages, values = torch.zeros_like(rewards), torch.where(mask, values, 0)
    next_value = next_advantage = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + GAMMA * GAE_LAMBDA * next_advantage, 0)
        next_value, advantages[:, t] = values[:, t], next_advantage
    return advantages, advantages + values


# 5. Minibatches
def minibatches(experience: Experience, generator: torch.Generator) -> Iterator[Experience]:
    """Yield every sequence once in each of PPO_EPOCHS passes, in a new order each pass."""
    for _ in range(PPO_EPOCHS):
        order = torch.randperm(len(experience.tokens), generator=generator)
        for rows in order.split(MINIBATCH_SIZE):
            yield Experience(*(column[rows] for column in experience))


# 6. Loss
def ppo_loss(actor: ActorCritic, batch: Experience) -> tuple[Tensor, Tensor]:
    """Return loss and entropy of a minibatch, means over its response tokens.

        ratio  = pi(a_t) / pi_old(a_t)
        policy = max(-A_t ratio, -A_t clip(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE))
        value  = 0.5 max((V_t - R_t)^2, (V_clip - R_t)^2)
        loss   = policy + VF_COEF value

    A token whose probability has left the range in the direction of its advantage has no gradient:
    one batch cannot move it far. V_clip is V_t kept within CLIP_RANGE_VF of the old value.
    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; value: Huang et al. 2022,
    detail 9, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    logprobs, values, entropy = actor(batch)
    ratio = torch.exp(logprobs - batch.old_logprobs)
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    policy_loss = torch.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
    near = batch.old_values + (values - batch.old_values).clamp(-CLIP_RANGE_VF, CLIP_RANGE_VF)
    value_loss = 0.5 * torch.maximum((values - batch.returns) ** 2, (near - batch.returns) ** 2)
    loss = (policy_loss + VF_COEF * value_loss)[batch.response_mask].mean()
    return loss, entropy[batch.response_mask].mean()


# 7. Step
def train(sft: str, rm: str) -> Iterator[tuple[Experience, Tensor]]:
    """Yield what each iteration learned from, and (loss, entropy) of its updates; then save it."""
    tokenizer = AutoTokenizer.from_pretrained(sft)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text("utf-8").splitlines()]
    dialogues = [[{"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(dialogues, add_generation_prompt=True).input_ids
    actor, reward = ActorCritic(sft), load_reward(Path(rm))
    adapter = [p for p in actor.policy.parameters() if p.requires_grad]
    critic = {"params": [*actor.critic.parameters()], "lr": LR * VALUE_LR_FACTOR}
    optimizer = torch.optim.AdamW(
        [{"params": adapter}, critic], lr=LR, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / ITERATIONS)
    for k, batch in enumerate(islice(prompt_batches(prompts), ITERATIONS)):
        start = np.random.SeedSequence((SEED, 0, k)).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(start))
        rollout = sample(actor.policy, *batch, tokenizer.eos_token_id, generator)
        experience, updates = make_experience(actor, reward, rollout), list[Tensor]()
        for minibatch in minibatches(experience, generator):
            loss, entropy = ppo_loss(actor, minibatch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*adapter, *critic["params"]], MAX_GRAD_NORM)
            optimizer.step()
            updates.append(torch.stack([loss, entropy]).detach())
        schedule.step()
        yield experience, torch.stack(updates)
    actor.policy.save_pretrained("outputs/ppo_in_one_file")


if __name__ == "__main__":
    torch.set_num_threads(1)
    finals = sys.argv[1:] or [f"outputs/default/tiny/{stage}/final" for stage in ("sft", "rm")]
    for number, (seen, updates) in enumerate(train(*finals), 1):
        score, kl = seen.score.mean(), seen.kl.sum(dim=1).mean()
        loss, entropy = updates.mean(dim=0)
        print(f"{number:3d}  reward_mean {score:+.4f}  kl_divergence {kl:+.4f}", end="  ")
        print(f"entropy {entropy:.4f}  ppo_loss {loss:+.4f}", flush=True)
