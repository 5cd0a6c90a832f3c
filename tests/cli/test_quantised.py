"""Stages on a base of quantised weights: one copy of it, rounded once, below every role."""

import contextlib
import shutil
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

import lightning_rlhf
from lightning_rlhf.kernels.patch import same_logits
from lightning_rlhf.models.config import BASE, CRITIC, POLICY, REFERENCE, SFT, VALUE
from lightning_rlhf.models.loading import use_exact_layers
from lightning_rlhf.models.roles import Roles, probe_tokens
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.stages.preflight import ratio, sample

from ..matrix import matrix
from .conftest import PRESETS, Outcome, given, make_workplace, rows, weights

TOKENIZER = Path(__file__).parents[2] / "recipes" / "quickstart" / "tokenizer"
SHAPE = {
    "vocab_size": 1792, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.05, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
HYBRID = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
FAMILY = {"int8": ("qwen3", SHAPE), "nf4": ("qwen3_5_text", SHAPE | HYBRID)}
KL = "kl_divergence"
LAYER = {"int8": bnb.nn.Linear8bitLt, "nf4": bnb.nn.Linear4bit}
OWN = {
    "sft": ["sft.finetune=lora", "sft.epochs=0.125"], "rm": ["rm.finetune=lora", "rm.epochs=0.125"],
    "ppo": ["ppo.critic=adapter", "ppo.iterations=2", "ppo.ppo_epochs=1"],
    "dpo": ["dpo.epochs=0.125"],
}  # fmt: skip
BYTES = {"int8": 1.0, "nf4": 0.5}
"""Bytes of a weight, without the scales."""


class Stages:
    """A workplace in which sft, rm and ppo ran on a base of quantised weights."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.place = make_workplace(folder / "work")
        self.base = self.place.folder / "base"
        torch.manual_seed(0)
        family, shape = FAMILY[kind]
        config = AutoConfig.for_model(family, **shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(self.base)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(self.base)
        self.model = [
            f"model.name_or_path={self.base}", "model.from_config=null",
            f"model.quantization={kind}",
        ]  # fmt: skip
        for stage in ("sft", "rm", "ppo"):
            self.run(stage).succeeded  # noqa: B018

    def run(self, stage: str, *words: str) -> Outcome:
        return self.place.mini(f"stage={stage}", *self.model, *OWN.get(stage, ()), *words)

    def final(self, stage: str) -> Path:
        return self.place.stage(stage) / "final"

    def own(self) -> BitsAndBytesConfig:
        """The argument with which the model card loads adapters."""
        if self.kind == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module", params=matrix(["int8", "nf4"], "nf4"))
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp(request.param), request.param)


class Built:
    """PPO before its first iteration."""

    def __init__(self, stages: Stages) -> None:
        words = [
            f"hydra.searchpath=[file://{PRESETS}]", "model=mini", "data=small", *stages.model,
            *OWN["ppo"], "run=built", *given(stages.place),
        ]  # fmt: skip
        with contextlib.chdir(stages.place.folder):
            training = lightning_rlhf.build(lightning_rlhf.configuration("ppo", *words))
        self.training, self.roles = training, training.module.roles
        assert isinstance(training.module, PPOModule)
        self.module = training.module


@pytest.fixture(scope="module")
def built(stages: Stages) -> Built:
    return Built(stages)


def test_one_quantised_copy_of_the_base_serves_four_roles(stages: Stages, built: Built) -> None:
    roles, critic = built.roles, built.module.critic
    assert critic is not None
    assert critic.roles is roles
    assert [source.module is roles for source in built.module.collector.reward.sources] == [True]
    (reward,) = {*roles.heads} - {VALUE}
    assert [roles.adapters(role) for role in (BASE, REFERENCE, POLICY, reward, CRITIC)] == [
        (), (SFT,), (SFT, POLICY), (SFT, reward), (SFT, CRITIC),
    ]  # fmt: skip
    layers = [m for m in roles.modules() if isinstance(m, LAYER[stages.kind])]
    assert len({layer.weight.data_ptr() for layer in layers}) == len(layers)
    # Every linear layer but the output, which is tied to the embedding and stays whole.
    stored = load_file(stages.base / "model.safetensors")
    linear = {n: x for n, x in stored.items() if x.ndim == 2 and "embed" not in n}
    assert sum(layer.weight.nbytes for layer in layers) == BYTES[stages.kind] * sum(
        x.numel() for x in linear.values()
    )


@torch.no_grad()
def test_the_reference_is_the_model_of_sft(stages: Stages, built: Built) -> None:
    """Bit for bit, on the processor that trained it: weights are rounded once, when loaded."""
    stored = load_file(stages.final("sft") / "adapter_model.safetensors")
    parameters = dict(built.roles.model.named_parameters())
    for name, x in stored.items():
        assert torch.equal(parameters[name.replace(".weight", f".{SFT}.weight")], x)
    expected = load_file(stages.final("sft") / "roles" / "fingerprint.safetensors")
    assert torch.equal(built.roles.probe(REFERENCE), expected["self"])
    assert torch.equal(built.roles.probe(BASE), expected["below"])
    assert torch.equal(built.roles.probe(POLICY), expected["self"])
    assert (expected["self"] - expected["below"]).abs().max() > 1e-3


@torch.no_grad()
def test_the_first_update_starts_at_ratio_1_and_a_kl_of_0(stages: Stages, built: Built) -> None:
    """To 1e-5: rows are computed in batches of other sizes, which moves a log-probability by some
    1e-7 in fp32."""
    data = built.training.data
    sampled = sample(built.module, data.collate(data.train[:6]))
    rollout = built.module.collector.annotate(sampled)
    assert (ratio(built.module, rollout) - 1).abs().max() < 1e-5
    found = [float(row[KL]) for row in rows(stages.place.stage("ppo")) if KL in row]
    assert abs(found[0]) < 1e-5 < abs(found[-1])


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not(stages: Stages) -> None:
    folder = stages.place.stage("ppo")
    whole = weights(folder), rows(folder)
    shutil.rmtree(folder / "final")
    stages.run("ppo", "resume=1").succeeded  # noqa: B018
    assert (weights(folder), rows(folder)) == whole


@torch.no_grad()
def test_merged_weights_are_the_model_that_was_trained(stages: Stages, built: Built) -> None:
    """Both kinds compute with W = codes x scale, and that is what the adapter is merged into."""
    for stage in ("ppo", "rm"):
        stages.place.call("export", str(stages.final(stage)), "--merge").succeeded  # noqa: B018
    merged = stages.place.stage("ppo") / "final_merged"
    found = Roles(AutoModelForCausalLM.from_pretrained(merged, dtype="float32")).probe(BASE)
    stored = load_file(stages.final("ppo") / "roles" / "fingerprint.safetensors")["self"]
    assert same_logits(found, stored, 1e-5)

    tokens = torch.arange(3, 27).reshape(2, 12)
    (reward,) = {*built.roles.heads} - {VALUE}
    head = built.roles.heads[reward]
    expected = built.roles.rewards(tokens, tokens > 0, reward)[:, 0] - head.linear.bias[0]
    merged = stages.place.stage("rm") / "final_merged"
    classifier = AutoModelForSequenceClassification.from_pretrained(merged, dtype="float32")
    scores = classifier(tokens).logits[:, 0]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)

    # The adapters, loaded as the model card says; without `use_exact_layers` transformers rounds
    # the activations of int8, and packs nf4 for some CPUs, which takes multiples of 32 outputs.
    final = stages.final("rm")
    assert "quantization_config=BitsAndBytesConfig(load_in" in (final / "README.md").read_text()
    adapter = AutoModelForSequenceClassification.from_pretrained(
        final, num_labels=1, dtype="float32", quantization_config=stages.own()
    )
    use_exact_layers(adapter)
    adapter.config.get_text_config().pad_token_id = classifier.config.pad_token_id
    torch.testing.assert_close(adapter(tokens).logits[:, 0], expected, atol=1e-5, rtol=1e-4)
    policy = AutoModelForCausalLM.from_pretrained(
        stages.final("ppo"), dtype="float32", quantization_config=stages.own()
    )
    use_exact_layers(policy)
    assert same_logits(policy(probe_tokens(policy)).logits[0, -1], stored, 1e-5)


def test_dpo_and_evaluation_run(stages: Stages) -> None:
    if stages.kind == "int8":
        pytest.skip("as with nf4")
    stages.run("dpo").succeeded  # noqa: B018
    stages.run("eval_policy", "eval_policy.samples_per_prompt=1").succeeded  # noqa: B018


def test_an_adapter_on_other_weights_is_refused(stages: Stages) -> None:
    error = stages.run("rm", "model.quantization=none", "run=whole", given(stages.place)[0]).error
    assert f"gave with model.quantization={stages.kind}, which is none here" in error
