"""Models of some ten thousand random weights, in the architectures that the presets name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from lightning_rlhf.core.validation import build
from lightning_rlhf.models.build_roles import start_from
from lightning_rlhf.models.checkpoint import Final, Manifest, find, tokenizer_hash
from lightning_rlhf.models.config import POLICY, REWARD, SFT, VALUE, LoRASettings, ModelConfig
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.stages.final import write_final

TOKENIZER = Path(__file__).parents[2] / "recipes" / "quickstart" / "tokenizer"
LORA = LoRASettings(r=4, alpha=8, target_modules="all-linear")
VOCABULARY = 97
# i * 7919 mod 97 for i = 1..16; 7919 = 81 * 97 + 62.
PROBE = torch.tensor([[62 * i % 97 for i in range(1, 17)]])
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_5_text": {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "initializer_range": 0.05,  # its recurrence magnifies rounding: 1e-6 here, 1e-4 at 0.2
    },
    "llama": {"tie_word_embeddings": True},
}


BUILT: dict[str, tuple[PreTrainedModel, torch.Tensor]] = {}
"""Arguments of `build_model` -> the model, and torch's random state after it was made."""


def build_model(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model whose logits differ by whole nats, so that a wrong token or weight shows."""
    key = repr((model_type, seed, changes))
    if key not in BUILT:
        BUILT[key] = new_model(model_type, seed, changes), torch.get_rng_state()
    model, state = BUILT[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def new_model(model_type: str, seed: int, changes: dict[str, Any]) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **(shape | SHAPES.get(model_type, {}) | changes))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def build_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "name": "small", "name_or_path": None, "revision": None, "from_config": None,
        "tokenizer": None, "dtype": "float32", "quantization": "none", "attn_implementation": None,
        "gradient_checkpointing": False, "kernels": "auto", "trust_remote_code": False,
        "lora": LORA,
    }  # fmt: skip
    return build(ModelConfig, values | changes, "model")


def build_manifest(stage: str, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "stage": stage, "base": "from_config", "base_seed": 0, "parents": {},
        "tokenizer_hash": "0123456789abcdef", "chat_template": "{{ messages }}",
        "reward_mean": 0.5 if stage == "rm" else None, "reward_std": 2.0 if stage == "rm" else None,
        "metrics": {"eval/loss": 1.25, "eval/flags": 2},
        "config": {"seed": 0, "nested": {"list": [1, 2]}}, "versions": {"torch": "2"},
    }  # fmt: skip
    return Manifest(**(values | changes))


def randomise(roles: Roles, role: str, seed: int) -> None:
    """Give the adapter of `role` an effect of its own, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in roles.model.named_parameters():
            if "lora_" in name and f".{role}." in name:
                parameter.normal_(std=0.2, generator=generator)


@pytest.fixture(scope="session", autouse=True)
def _calm() -> None:
    """Silence what transformers prints while it loads."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """Three rows of 9 tokens, with the pad and eos id 1 among them."""
    rows = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(7))
    rows[0, 3] = rows[1, 8] = 1
    return rows


class Lineage:
    """A base model and what sft and rm left of it: folders, and how to load them as PPO does."""

    def __init__(
        self, folder: Path, model_type: str, finetune: str, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.finetune = finetune
        self.base = folder / "base"
        build_model(model_type, seed=1).save_pretrained(self.base)
        self.config = build_config(name_or_path=str(self.base))
        self.hash = tokenizer_hash(tokenizer)

        def write(roles: Roles, role: str, stage: str, head: str | None) -> Final:
            manifest = build_manifest(stage, tokenizer_hash=self.hash)
            write_final(folder / stage / "final", roles, role, tokenizer, manifest, head)
            return find(str(folder / stage / "final"), "policy.checkpoint")

        roles = start_from(self.config, None, trainable=finetune == "full", seed=0)
        if finetune == "lora":
            roles.add_adapter(SFT, LORA)
            randomise(roles, SFT, seed=2)
        else:
            roles.assign(SFT)
            with torch.no_grad():
                for i, parameter in enumerate(roles.model.parameters()):
                    generator = torch.Generator().manual_seed(i)
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        self.sft = write(roles, SFT, "sft", None)

        roles = start_from(self.config, self.sft, trainable=False, seed=0)
        generator = torch.Generator().manual_seed(3)
        roles.heads[REWARD] = ScalarHeads.random(roles.hidden_size, 1, generator)
        roles.add_adapter(REWARD, LORA)
        randomise(roles, REWARD, seed=4)
        self.rm = write(roles, REWARD, "rm", REWARD)

        roles = start_from(self.config, self.sft, trainable=False, seed=0)
        roles.heads[VALUE] = ScalarHeads(roles.hidden_size, 1)
        roles.add_adapter(POLICY, LORA)
        randomise(roles, POLICY, seed=5)
        self.ppo = write(roles, POLICY, "ppo", VALUE)
        with roles.use_role(POLICY), torch.no_grad():
            self.policy_logits = roles.causal_lm(PROBE).logits[0, -1]


@pytest.fixture(scope="session", params=[("qwen3", "full"), ("qwen3_5_text", "lora")], ids="-".join)
def lineage(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> Lineage:
    return Lineage(tmp_path_factory.mktemp("lineage"), *request.param, tokenizer)


@pytest.fixture(scope="session")
def adapters(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> Lineage:
    """The one lineage for tests in which neither architecture nor kind of SFT matters."""
    return Lineage(tmp_path_factory.mktemp("adapters"), "llama", "lora", tokenizer)
