"""PPO on a reward model of another family: its scores are those of that model."""

import csv
import multiprocessing
import os
import statistics
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.cli.main import main

from .conftest import Workplace
from .others import classifier_scores, own_scores, samples


def judge(place: Workplace) -> Path:
    return place.outputs / "other" / "other" / "rm" / "final"


def ppo(place: Workplace, run: str, *overrides: str) -> str:
    policy = f"policy.checkpoint={place.stage('sft') / 'final'}"
    command = ["stage=ppo", f"run={run}", policy, "ppo.iterations=1", "samples=false", *overrides]
    return place.mini(*command).succeeded.out


def test_a_reward_model_of_another_vocabulary(judged: Workplace) -> None:
    """One of stage=rm, standardised; a classifier as the hub has them learns below."""
    words = ["reward=model", f"reward.name_or_path={judge(judged)}"]
    out = ppo(judged, "judge", *words, "reward.normalization=stored", "reward.batch_size=3")
    said = samples(judged, "judge")
    expected = own_scores(judge(judged), said)
    assert statistics.pstdev(expected) > 0.1
    assert [sample["score"] for sample in said] == pytest.approx(expected, abs=1e-5)
    assert "[user]" not in out  # neither a row of the data nor a sample


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("classifier reward.normalization=stored", "reward.normalization is 'stored'; allowed: "
         "none, running, since classifier was not trained by stage=rm, which measures mean"),
        ("{judge} reward.label=0", "reward.label is 0; allowed: null, since"),
        ("{judge} reward.quantization=nf4", "reward.quantization is 'nf4'; allowed: none, since"),
    ],
)  # fmt: skip
def test_a_wrong_option_costs_no_sampling(
    judged: Workplace, monkeypatch: pytest.MonkeyPatch, option: str, message: str
) -> None:
    monkeypatch.setattr("lightning_rlhf.models.build_roles.start_from", pytest.fail)
    name, word = option.format(judge=judge(judged)).split()
    error = judged.mini(
        "stage=ppo", "run=wrong", f"policy.checkpoint={judged.stage('sft') / 'final'}",
        "reward=model", f"reward.name_or_path={name}", "reward.max_tokens=256", word,
    ).error  # fmt: skip
    assert error.startswith(message)


def serve(folder: Path, out: int, *words: str) -> None:
    """The command in a process of its own, with all that this one imported."""
    sys.stdout, sys.argv = os.fdopen(out, "w", buffering=1), ["train.py", "serve-reward", *words]
    torch.cuda.is_available = lambda: False  # a fork cannot use the GPU of its parent
    os.chdir(folder)
    main()


def test_a_server_says_what_its_model_says(judged: Workplace) -> None:
    """Standardised by what its `final/` has."""
    lines, out = os.pipe()
    words = (judged.folder, out, str(judge(judged)), "--port", "0", "reward.max_tokens=256")
    context = multiprocessing.get_context("fork")
    server = context.Process(target=serve, args=words, daemon=True)
    server.start()
    os.close(out)
    with os.fdopen(lines) as output:
        try:
            line = next(line for line in output if "reward.url=" in line)
            url = line.partition('reward.url="')[2].partition('"')[0]
            assert url.startswith("http://127.0.0.1:"), line
            ppo(judged, "served", "reward=http", f"reward.url={url}")
        finally:
            server.terminate()
            server.join(60)
        assert server.exitcode == 0
        assert output.read() == "stopped\n"
    said = samples(judged, "served")
    expected = own_scores(judge(judged), said)
    assert [sample["score"] for sample in said] == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_served_is_said(judged: Workplace) -> None:
    for word, message in (
        ("reward.weight=2", "an option is 'reward.weight=2'; allowed: reward.KEY="),
        ("reward.normalization=running", "reward.normalization is 'running'; allowed: none, "),
    ):
        error = judged.call("serve-reward", "classifier", word, "--port", "0").error
        assert error.startswith(message)


@pytest.mark.slow
def test_a_policy_learns_what_a_model_of_another_vocabulary_likes(judged: Workplace) -> None:
    """From random weights large enough to prefer some tokens; two tokens a response.

    Measured: a mean of 1.3 in the first five iterations and 2.3 in the last five, of raw scores
    with a standard deviation of 0.7.
    """
    outcome = judged.mini(
        "stage=ppo", "run=learn", "policy.checkpoint=base", "reward=model",
        "model.from_config.initializer_range=0.5", "reward.name_or_path=classifier",
        "reward.max_tokens=256", "reward.batch_size=64",
        "reward.normalization=none", "ppo.iterations=24", "ppo.rollout_batch_size=32",
        "ppo.minibatch_size=32", "ppo.microbatch_size=32", "ppo.max_response_tokens=2",
        "ppo.lr=3e-2", "ppo.kl_coef=0", "ppo.missing_eos=none", "ppo.val_every=24",
        "ppo.samples_every=24", "ppo.checkpoint_every=24",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    said = samples(judged, "learn")
    expected = classifier_scores(judged.folder / "classifier", said)
    assert statistics.pstdev(expected) > 0.1
    assert [sample["score"] for sample in said] == pytest.approx(expected, abs=1e-5)
    with (judged.stage("ppo", "learn") / "metrics.csv").open(newline="") as file:
        rewards = [float(row["reward_mean"]) for row in csv.DictReader(file) if row["reward_mean"]]
    assert len(rewards) == 24
    assert (judged.stage("ppo", "learn") / "diminishing.json").is_file()
    assert statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:5]) > 0.4
