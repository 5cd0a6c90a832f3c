# %% [markdown]
# # Notebook: PPO with a loss of your own
# SFT, a reward model and PPO in a Lightning Trainer, with the embedded model: no download.
# `pip install jupytext notebook ipywidgets`, `jupytext --to notebook examples/notebook.py` and
# `jupyter notebook examples/notebook.ipynb` open it; `python examples/notebook.py` runs it.

# %%
import csv
import os
from functools import partial
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
from lightning.pytorch.loggers import CSVLogger

import lightning_rlhf
from lightning_rlhf.cli.chat import opened
from lightning_rlhf.core.policy_losses import PolicyBatch, PolicyLosses

# %% [markdown]
# ## Settings
# They are words of the [command line](../docs/configuration.md). A stage starts from what
# earlier ones saved. The reward model gets no [verdict](../docs/library.md#the-trainer) here.

# %%
WORDS = ["run=notebook", "overwrite=true", *os.environ.get("OVERRIDES", "").split()]


def train(stage: str, *words: str) -> tuple[Path, list[dict[str, str]]]:
    """Train a stage and save it; return the path of the model, and the rows of its metrics."""
    settings = lightning_rlhf.configuration(stage, *WORDS, *words, stages=("sft", "rm", "ppo"))
    training = lightning_rlhf.build(settings)
    every = settings.config.validation_interval(len(training.data.schedule))
    logger = CSVLogger(settings.outputs / "notebook" / "logs", name=stage)
    trainer = L.Trainer(
        max_epochs=1, accelerator=settings.trainer.accelerator, logger=logger, log_every_n_steps=1,
        precision=settings.trainer.precision, val_check_interval=every, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(training.module, training.data)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return lightning_rlhf.save(training), list(csv.DictReader(file))


for stage in ("sft", "rm"):
    train(stage)

# %% [markdown]
# ## A loss of your own
# PPO's other loss has no clip, but a penalty on the KL from the policy that sampled,
# -A r + beta (r - 1 - log r): [Schulman et al. 2017](https://arxiv.org/abs/1707.06347), section 4.
# It reads a [`PolicyBatch`](../src/lightning_rlhf/core/policy_losses.py), tensors of shape [B,T].


# %%
def penalised(batch: PolicyBatch, beta: float = 1.0) -> PolicyLosses:
    log_ratio = batch.logprobs - batch.old_logprobs
    ratio = log_ratio.exp()
    return PolicyLosses(losses=-batch.advantages * ratio + beta * (ratio - 1 - log_ratio))


final, rows = train("ppo", "ppo.policy_loss=__main__:penalised")

# %% [markdown]
# ## Learning curves, and a chat with the result

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for axis, name in zip(axes, ("reward_mean", "eval/reward_mean", "kl_divergence"), strict=True):
    points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]
    axis.plot(*zip(*points, strict=True), marker=".")
    axis.set(title=name, xlabel="iteration")
figure.savefig(final.parent / "curves.png")
# %%
conversation = opened([str(final)])
conversation.ask("What is the capital of Peru?", partial(print, end=""))
