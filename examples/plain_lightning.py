"""SFT, a reward model and PPO with a plain lightning.Trainer.

python examples/plain_lightning.py                            trains the embedded model
python examples/plain_lightning.py seed=1 run=s1 sft.epochs=2  with overrides of any stage
"""

import sys

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

import lightning_rlhf

STAGES = ("sft", "rm", "ppo")


def train(stage: str, *overrides: str) -> L.Trainer:
    """Train a stage and save its model, from which later stages of the run start."""
    settings = lightning_rlhf.configuration(stage, *overrides, stages=STAGES)
    training = lightning_rlhf.build(settings)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator=settings.trainer.accelerator,
        precision=settings.trainer.precision,
        logger=CSVLogger(settings.outputs / "logs", name=stage),
        callbacks=[LearningRateMonitor("step")],
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(training.module, training.data)
    lightning_rlhf.save(training)
    return trainer


if __name__ == "__main__":
    for stage in STAGES:
        train(stage, *sys.argv[1:])
