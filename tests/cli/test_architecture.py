"""The examples of docs/extending.md do what the page says."""

import contextlib
import importlib
import math
import re
import shutil
import tomllib
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import lightning_rlhf
from lightning_rlhf.core import metrics as names
from lightning_rlhf.core.losses import PolicyOutputs
from lightning_rlhf.core.metrics import check_names
from lightning_rlhf.runs.console import HOME

from .conftest import PRESETS, Workplace, given, rows, weights

PAGE = (HOME / "docs" / "extending.md").read_text()
FLOORS = re.findall(
    r"^\| (\d+) \| \[`(\w+)`\]", (HOME / "docs" / "architecture.md").read_text(), re.MULTILINE
)


def example(name: str) -> str:
    """Return the block of Python under this mark."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def place(finished: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A workplace with run=default of all stages, and the files of the page."""
    for path, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL):
        (finished.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (finished.folder / path).write_text(text)
    monkeypatch.syspath_prepend(finished.folder)
    return finished


def own(place: Workplace, *overrides: str) -> None:
    """Run a command that finds my_conf/."""
    place.mini("hydra.searchpath=[file://my_conf]", *overrides).succeeded  # noqa: B018


def test_a_reward_a_sampler_and_a_callback(place: Workplace) -> None:
    own(
        place, "stage=ppo", "run=own", "ppo.iterations=1", "ppo.critic_warmup=0",
        "ppo.rollout=cool.py:Cool", "callbacks.longest._target_=longest.Longest", "reward=function",
        "reward.path=concise.py:concise", "reward.arguments.cost=0.2",
        *(word for word in given(place) if not word.startswith("reward")),
    )  # fmt: skip
    [row] = [row for row in rows(place.stage("ppo", "own")) if "reward_mean" in row]
    # 0.2 of each word, and a token is at most one word.
    longest = float(row["rollout/longest"])
    assert longest == int(longest) > 0
    assert -0.2 * longest <= float(row["rollout/reward_min"]) < float(row["rollout/reward_max"])
    assert float(row["reward_mean"]) < 0


def test_a_stage(place: Workplace) -> None:
    own(place, "+stages=tune", "stage=tune", "tune.epochs=0.25", "tune.batch_size=4",
        "tune.microbatch_size=2")  # fmt: skip
    folder = place.stage("tune")
    assert (folder / "final" / "adapter_config.json").is_file()
    # It starts as the SFT model; a model that knows nothing has a loss of log 2048 = 7.6.
    before = [row["eval/loss"] for row in rows(place.stage("sft")) if "eval/loss" in row][-1]
    assert float(rows(folder)[0]["eval/loss"]) == pytest.approx(float(before), rel=1e-5)


def test_a_stage_on_ppo(place: Workplace) -> None:
    """With the numbers of the model; at beta=0 it is PPO, as it is not in the test below."""
    words = ["+stages=penalized", "stage=penalized", "stage_model@penalized=ppo_mini"]
    words += given(place)
    own(place, *words, "penalized.beta=0")
    assert rows(place.stage("penalized")) == rows(place.stage("ppo"))
    assert weights(place.stage("penalized")) == weights(place.stage("ppo"))


MINE = """
from lightning_rlhf.core.experience import Advantages, gae

def advantage(batch):
    c, given = batch.config, (batch.rewards, batch.values, batch.mask)
    advantages, returns = gae(*given, gamma=c.gamma, gae_lambda=c.gae_lambda)
    return Advantages(advantages=advantages, returns=returns)

def kl(tokens):
    return tokens.logprobs - tokens.ref_logprobs
"""


def test_a_loss_of_the_policy_an_advantage_and_a_kl(place: Workplace) -> None:
    """PPO's own in every digit; a run resumes with the same code, and with no other."""
    file, folder = place.folder / "mine.py", place.stage("ppo", "own")
    file.write_text(MINE)
    words = ["stage=ppo", "run=own", "ppo.policy_loss=surrogate.py:surrogate", *given(place)]
    words += ["ppo.advantage=mine.py:advantage", "ppo.kl_estimator=mine.py:kl"]
    place.mini(*words).succeeded  # noqa: B018
    assert rows(folder) == rows(place.stage("ppo"))
    assert weights(folder) == weights(place.stage("ppo"))
    shutil.rmtree(folder / "final")
    file.write_text(file.read_text() + "\n")
    error = place.mini(*words, "resume=true").error
    assert "the code of ppo.advantage=mine.py:advantage is not the one that it began" in error
    (place.folder / "sums.py").write_text("def sums(batch): return batch.logprobs.sum()")
    refused = place.mini(*words, "ppo.policy_loss=sums.py:sums", "overwrite=true").error
    assert (
        "ppo.policy_loss is 'sums.py:sums', which returned Tensor; allowed: PolicyLosses" in refused
    )


def test_a_loss_a_reward_an_optimizer_and_a_schedule(place: Workplace) -> None:
    """Shifted by d, the log-probabilities of all tokens have one ratio: exp(d), below its clip."""
    gspo = importlib.import_module("gspo").GSPO
    words = [f"hydra.searchpath=[file://{PRESETS}]", "model=mini", "data=small", *given(place)]
    with contextlib.chdir(place.folder):
        settings = lightning_rlhf.configuration("ppo", *words, "run=gspo", "ppo.iterations=1")
        training = lightning_rlhf.build(settings, module=gspo)
        L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, limit_val_batches=0,
            enable_checkpointing=False, enable_progress_bar=False,
        ).fit(training.module, training.data)  # fmt: skip
    module, batch = training.module, training.module.experience
    assert type(module.optimizers().optimizer) is torch.optim.RMSprop
    assert module.lr_schedulers().gamma == 0.99
    mask = batch.response_mask
    outputs = PolicyOutputs(
        logprobs=batch.old_logprobs[mask] + 0.1, entropy=torch.zeros(()), vocabulary_kl=None
    )
    expected = -math.exp(0.1) * batch.advantages[mask]
    torch.testing.assert_close(module.policy_losses(outputs, batch), expected)
    tokens, kl = mask.sum(dim=1), batch.kl.sum(dim=1)
    expected = batch.score - 1.0 * ~batch.ended - module.kl_coef * kl - 0.01 * tokens
    torch.testing.assert_close(batch.rewards.sum(dim=1), expected)


def test_checkpoints_and_findings_of_a_stage_on_ppo(place: Workplace) -> None:
    """Its module has a weight that PPO's lacks, and measures nothing but its loss."""
    file = place.folder / "penalized.py"
    text = file.read_text().replace("return replace(terms, loss=", "return PPOTerms.of(loss=")
    text = text.replace(
        "import PPOConfig", "import PPOConfig\nfrom lightning_rlhf.core.records import PPOTerms"
    )
    text = text.replace("beta * penalty", "beta * self.scale * penalty")
    init = "    def __init__(self, *args, **named):\n        super().__init__(*args, **named)\n"
    init += "        self.scale = torch.nn.Parameter(torch.ones(()))\n\n    def loss_terms"
    file.write_text("import torch\n" + text.replace("    def loss_terms", init))
    words = ["+stages=penalized", "stage=penalized", "stage_model@penalized=ppo_mini"]
    words += [*given(place), "hydra.searchpath=[file://my_conf]"]
    out = place.mini(*words, "record=true").succeeded.out
    assert "collapsed" not in out
    folder = place.stage("penalized")
    assert weights(folder) != weights(place.stage("ppo"))
    [*_, last] = [row for row in rows(folder) if "ppo_loss" in row]
    assert not {"entropy", "update/clip_fraction", "update/ratio_max"} & last.keys()
    assert "ppo." not in (folder / "diagnosis.json").read_text()

    assert "--code FILE.py:Penalized" in place.call("export", str(folder), "--step", "3").error
    code = ("--code", "penalized.py:Penalized")
    out = str(place.folder / "exported" / "final")
    place.call("export", str(folder), "--step", "3", "--out", out, *code).succeeded  # noqa: B018
    assert weights(place.folder / "exported") == weights(folder)

    error = place.mini(*words, "run=wrong", "penalized.kl_in=loss").error
    assert "penalized." in error
    assert "ppo." not in error


def test_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "METRICS", dict(names.METRICS))
    with pytest.raises(ValueError, match="rollout/longest"):
        check_names(["rollout/longest"])
    exec(example("metric"), {"METRICS": names.METRICS, "metric_rows": names.metric_rows})
    check_names(["rollout/longest"])


def test_an_advantage(place: Workplace) -> None:
    config = SimpleNamespace(samples_per_prompt=2)
    mask, returns = torch.ones(4, 1).bool(), torch.tensor([[1.0], [4.0], [-2.0], [-3.0]])
    batch = SimpleNamespace(returns=returns, mask=mask, config=config)
    found = importlib.import_module("worst").over_worst(batch)
    assert found.advantages.flatten().tolist() == [0.0, 3.0, 1.0, 0.0]


def test_the_floors_are_those_of_the_import_contracts() -> None:
    pyproject = tomllib.loads((HOME / "pyproject.toml").read_text())
    layers = pyproject["tool"]["importlinter"]["contracts"][0]["layers"]
    package = HOME / "src" / "lightning_rlhf"
    rooms = [
        (str(len(layers) - i), room.strip().removeprefix("lightning_rlhf."))
        for i, layer in enumerate(layers)
        for room in layer.split("|")
    ]
    assert [(floor, room) for floor, room in rooms if (package / room).is_dir()] == FLOORS
    assert {room for _, room in FLOORS} == {p.parent.name for p in package.glob("*/__init__.py")}
