"""Direct preference optimization against TRL's DPOTrainer: the same adapter on the same pairs."""

import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig as TRLConfig
from trl import DPOTrainer

from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.core.results import DPOScores
from lightning_rlhf.data.batches import collate_preferences
from lightning_rlhf.data.lengths import PreferenceTokens
from lightning_rlhf.models.config import POLICY, LoRASettings
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import DPOModule

from .conftest import close
from .ours import CONF

TOKENIZER = CONF.parent / "recipes" / "quickstart" / "tokenizer"
VOCABULARY = 1792
BETA, SMOOTHING, SFT = 0.3, 0.2, 0.7
ROWS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("What is the capital of Australia?", " The capital is Canberra.", " Sydney."),
        ("Is the earth flat?", " No.", " Yes, the earth is flat. Who told you it is not?"),
        ("Hello!", " Hello, how can I help you?", " What?"),
    )
]


def base() -> LlamaForCausalLM:
    """Two layers in fp32, with weights large enough for opinions."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    set_seed(1)
    return LlamaForCausalLM(config).float().eval()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters, by names without that of the adapter."""
    found = {
        name.partition("base_model.model.")[2].replace(f".{POLICY}.", ".default."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    assert found
    return found


@dataclass(frozen=True)
class Result:
    """What one side computed."""

    loss: Tensor
    gradient: dict[str, Tensor]
    """Gradient of each parameter of the adapter."""
    metrics: dict[str, float]
    """Means over the pairs, by TRL's names."""
    trainer: DPOTrainer
    """TRL's trainer, whose tokens and adapter both sides have."""


def theirs(loss_types: tuple[str, ...], **settings: Any) -> Result:
    """TRL's trainer on one batch, with a LoRA adapter that already does something."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base(), lora)
    generator = torch.Generator().manual_seed(2)
    for parameter in trained(model).values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data = parameter.data.float() + 0.05 * noise
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model,
            base(),
            TRLConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", beta=BETA,
                gradient_checkpointing=False, loss_type=list(loss_types), max_length=None,
                per_device_train_batch_size=len(ROWS), disable_tqdm=True, **settings,
            ),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
        )  # fmt: skip
    inputs = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = {name: p.grad.clone() for name, p in trained(trainer.model).items()}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return Result(loss.detach(), gradient, metrics, trainer)


def ours(like: Result, **changes: Any) -> tuple[Result, DPOScores]:
    """Our module on TRL's tokens, with TRL's adapter."""
    trainer = like.trainer
    stage = OmegaConf.to_container(OmegaConf.load(CONF / "stages/dpo.yaml"))
    module_config = DPOConfig(
        **stage | {"final": "last", "lr": 2.0e-5, "beta": BETA, "sft_coef": 0.0} | changes
    )
    roles = Roles(base())
    roles.add_adapter(POLICY, LoRASettings(r=4, alpha=8, target_modules="all-linear"))
    mine = trained(roles)
    with torch.no_grad():
        for name, parameter in trained(trainer.model).items():
            mine[name].copy_(parameter)
    assert mine.keys() == like.gradient.keys()
    batch = collate_preferences(
        [
            PreferenceTokens(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"], 0.0)
            for row in trainer.train_dataset
        ],
        pad_id=0,
    )
    module = DPOModule(roles, module_config)
    scores = module.scores(batch)
    loss = module.loss_share(batch, module.total(batch))[0]
    loss.backward()
    metrics = {
        "rewards/chosen": scores.chosen.mean().item(),
        "rewards/rejected": scores.rejected.mean().item(),
        "rewards/accuracies": scores.ranked_right.mean().item(),
        "logps/chosen": scores.chosen_logprob.mean().item(),
        "logps/rejected": scores.rejected_logprob.mean().item(),
    }
    gradient = {name: parameter.grad for name, parameter in mine.items()}
    return Result(loss.detach(), gradient, metrics, trainer), scores


def same(found: Result, expected: Result) -> None:
    close(found.loss.double(), expected.loss.double(), rtol=1e-5)
    scale = max(g.abs().max().item() for g in expected.gradient.values())
    assert scale > 1e-3
    for name, gradient in expected.gradient.items():
        close(found.gradient[name], gradient, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
def test_dpo_loss_and_its_gradient(loss_type: str) -> None:
    trl = theirs((loss_type,))
    same(ours(trl, loss_type=loss_type)[0], trl)


def test_dpo_with_an_sft_term() -> None:
    trl = theirs(("sigmoid", "sft"), loss_weights=[1.0, SFT])
    same(ours(trl, sft_coef=SFT)[0], trl)


def test_dpo_metrics() -> None:
    trl = theirs(("sigmoid",))
    found, _ = ours(trl)
    for name, value in found.metrics.items():
        assert value == pytest.approx(trl.metrics[name], rel=1e-5), name


def test_dpo_label_smoothing_is_the_mirror_of_trls_robust() -> None:
    """TRL: ((1 - e) l(h) - e l(-h)) / (1 - 2e); ours: (1 - e) l(h) + e l(-h).

    The first times 1 - 2e and the second add up to 2 (1 - e) l(h).
    """
    plain = theirs(("sigmoid",))
    robust = theirs(("robust",), label_smoothing=SMOOTHING)
    found, _ = ours(plain, label_smoothing=SMOOTHING)

    def mirrored(whole: Tensor, other: Tensor) -> Tensor:
        return 2 * (1 - SMOOTHING) * whole - (1 - 2 * SMOOTHING) * other

    expected = Result(
        mirrored(plain.loss, robust.loss),
        {n: mirrored(g, robust.gradient[n]) for n, g in plain.gradient.items()}, {}, plain.trainer,
    )  # fmt: skip
    same(found, expected)
    assert (found.loss - plain.loss).abs() > 1e-2


def test_dpo_rewards_of_a_normalized_loss_are_those_of_a_token() -> None:
    """TRL logs beta times the sum over tokens for every loss; ours what the loss compares."""
    trl = theirs(("sigmoid_norm",))
    _, normalized = ours(trl, loss_type="sigmoid_norm")
    summed = (normalized.chosen * normalized.chosen_tokens).mean().item()
    assert summed == pytest.approx(trl.metrics["rewards/chosen"], rel=1e-5)
