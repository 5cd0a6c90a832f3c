"""Every family from a folder through sft, rm and ppo, and back into the ecosystem's own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from lightning_rlhf.models.build_roles import attach_reward, start_from
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.config import REFERENCE, REWARD, ModelConfig
from lightning_rlhf.models.roles import Roles

from ..matrix import matrix
from ..models.conftest import build_config

FAMILIES = {"qwen3.5-multimodal": "lora", "qwen3": "lora", "llama": "full"}
STAGES = ("sft", "rm", "ppo")
VOCABULARY = 1757
PROBE = (torch.arange(1, 17) * 7919 % VOCABULARY)[None]
"""The row of tokens after which a fingerprint is taken."""
STEPS = {
    "sft": ["sft.epochs=1", "sft.batch_size=4", "sft.microbatch_size=2", "sft.lr=0.01"],
    "rm": ["rm.epochs=1", "rm.batch_size=4", "rm.microbatch_size=2", "rm.lr=0.01",
           "rm.calibration_samples=4"],
    "ppo": ["ppo.iterations=1", "ppo.rollout_batch_size=4", "ppo.minibatch_size=4",
            "ppo.microbatch_size=2", "ppo.ppo_epochs=2", "ppo.max_response_tokens=6",
            "ppo.lr=0.01"],
}  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=matrix(FAMILIES, "qwen3.5-multimodal"))
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
    command: Callable[[Path, list[str]], None], checkpoint: Callable[[str], Path], rows: list[str],
) -> Any:  # fmt: skip
    """The finals of the three stages."""
    family, finetune = request.param, FAMILIES[request.param]
    base, folder = checkpoint(family), tmp_path_factory.mktemp("run")
    for stage in STAGES:
        tuning = [f"sft.finetune={finetune}"] if stage == "sft" else []
        command(folder, [*arguments(stage, base), *rows, *tuning])
    return Run(base, finetune, folder / "outputs" / "default" / "small")


def arguments(stage: str, base: Path) -> list[str]:
    """A few steps of `stage`, on the model in `base`, into outputs/."""
    model = ["model=hub", "model.name=small", f"model.name_or_path={base}", "model.lora.r=4"]
    return [f"stage={stage}", *model, "data.max_response_tokens=16", "preflight=off", *STEPS[stage]]


class Run:
    """What the command left, and how any other program loads it."""

    def __init__(self, base: Path, finetune: str, folder: Path) -> None:
        self.base = base
        self.finetune = finetune
        self.final = {stage: find(str(folder / stage / "final"), stage) for stage in STAGES}

    def path(self, stage: str) -> Path:
        return self.final[stage].path

    def plain_sft(self) -> PreTrainedModel | PeftModel:
        if self.finetune == "full":
            return AutoModelForCausalLM.from_pretrained(self.path("sft")).eval()
        base = AutoModelForCausalLM.from_pretrained(self.base)
        return PeftModel.from_pretrained(base, self.path("sft"), adapter_name="sft").eval()

    def plain(self, stage: str) -> PeftModel:
        """The adapter of `stage` on what its adapter_config.json names, as peft loads them."""
        folder = self.final[stage].adapter
        named = json.loads((folder / "adapter_config.json").read_text())
        below = Path(named["base_model_name_or_path"])
        if (below / "config.json").is_file():
            model = AutoModelForCausalLM.from_pretrained(below)
            return PeftModel.from_pretrained(model, folder).eval()
        assert below == self.path("sft")
        model = self.plain_sft()
        model.load_adapter(str(folder), adapter_name=stage)
        model.base_model.set_adapter(["sft", stage])
        return model.eval()

    def roles(self) -> tuple[Roles, ModelConfig]:
        config = build_config(name_or_path=str(self.base))
        return start_from(config, self.final["sft"], trainable=False, seed=0), config


def tokens_of(final: Final) -> Tensor:
    """A prompt as the final's own tokenizer and template write it."""
    tokenizer = AutoTokenizer.from_pretrained(final.path)
    dialogue = [{"role": "user", "content": "What is the capital of Peru?"}]
    encoded = tokenizer.apply_chat_template(
        dialogue, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@torch.no_grad()
def test_three_stages_hand_over_to_each_other_and_to_the_ecosystem(run: Run) -> None:
    tokens = tokens_of(run.final["ppo"])
    assert torch.equal(tokens, tokens_of(run.final["sft"]))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for stage in STAGES:
        manifest = run.final[stage].require_manifest(stage)
        assert manifest.base == str(run.base)
    assert run.final["sft"].is_adapter == (run.finetune == "lora")

    # sft: another model than the base, and the same one to us as to everybody.
    base = AutoModelForCausalLM.from_pretrained(run.base).eval()(tokens).logits
    sft = run.plain_sft()(tokens).logits
    assert (sft - base).abs().max() > 1e-3
    roles, config = run.roles()
    with roles.use_role(REFERENCE):
        close(roles.head(roles.hidden(tokens)), sft)

    # ppo: trained away from the SFT model, at which it started.
    policy = run.plain("ppo")(tokens).logits
    assert (policy - sft).abs().max() > 1e-3
    start = run.final["ppo"].manifest.metrics["start/eval/kl"]
    assert start == pytest.approx(0, abs=1e-5)
    written = load_file(run.path("ppo") / "roles/fingerprint.safetensors")
    close(written["self"], run.plain("ppo")(PROBE).logits[0, -1])

    # rm: on the same SFT model; its score, by hand from peft's model and the head's file.
    written = load_file(run.path("rm") / "roles/fingerprint.safetensors")
    close(written["below"], run.plain_sft()(PROBE).logits[0, -1])
    owner = attach_reward(
        roles, REWARD, run.final["rm"], config, run.final["rm"].manifest.tokenizer_hash
    )
    head = load_file(run.path("rm") / "roles/reward_head.safetensors")
    hidden = run.plain("rm")(tokens, output_hidden_states=True).hidden_states[-1][:, -1]
    close(owner.reward(tokens, mask), hidden @ head["linear.weight"][0] + head["linear.bias"])
    assert owner is roles
    with roles.use_role(REFERENCE):
        close(roles.head(roles.hidden(tokens)), sft)


@torch.no_grad()
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_one_line_loads_the_model_that_the_stage_wrote(run: Run, stage: str) -> None:
    """`from_pretrained(final)` and nothing else, as a model card would say."""
    written = load_file(run.path(stage) / "roles/fingerprint.safetensors")["self"]
    loaders: list[Any] = [AutoModelForCausalLM]
    loaders += [AutoPeftModelForCausalLM] * run.final[stage].is_adapter
    for load in loaders:
        model = load.from_pretrained(run.path(stage)).eval()
        # peft fits the vocabulary to the tokenizer's 1756 tokens.
        close(model(PROBE).logits[0, -1, :1756], written[:1756])


@torch.no_grad()
def test_other_programs_load_the_reward_model_and_the_merged_weights(
    run: Run, command: Callable[[Path, list[str]], None], tmp_path: Path
) -> None:
    """SFT an adapter, so that the reward's includes it; a multimodal base has a vision tower."""
    if run.finetune == "full":
        pytest.skip("as in tests/cli/test_artefacts.py")
    final = run.final["rm"]
    tokens = tokens_of(final)
    head = load_file(final.path / "roles" / "reward_head.safetensors")
    hidden = run.plain("rm")(tokens, output_hidden_states=True).hidden_states[-1][:, -1]
    expected = hidden @ head["linear.weight"].T
    classifier: Any = AutoModelForSequenceClassification.from_pretrained(final.path, num_labels=1)
    close(classifier.eval()(tokens).logits, expected)

    for stage in ("rm", "ppo"):
        merge = ["export", str(run.path(stage)), "--merge", "--out", str(tmp_path / stage)]
        command(tmp_path, merge)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm", output_loading_info=True
    )
    assert info["missing_keys"] == set()
    close(classifier.eval()(tokens).logits, expected)
    policy, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo", output_loading_info=True)
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    close(policy.eval()(tokens).logits, run.plain("ppo")(tokens).logits)
