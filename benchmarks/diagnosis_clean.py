"""How many findings does the diagnosis make in healthy runs?

Applies the rules to the metrics of finished runs, iteration by iteration as during the runs, and
writes one row a run. The runs are those of a sweep, here of 60 iterations of the quickstart from
the SFT and the reward model of its seed 0:

    python train.py recipe=quickstart run=s0
    python train.py -m stage=ppo data=quickstart run=clean ppo.iterations=60 ppo.val_every=20 \\
        policy.checkpoint=outputs/s0/tiny/sft/final reward.checkpoint=outputs/s0/tiny/rm/final \\
        seed=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19
    .venv/bin/python benchmarks/diagnosis_clean.py outputs/clean/tiny/*/ppo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_rlhf.callbacks.diagnosis import KEPT, RULES, History, Row
from lightning_rlhf.callbacks.files import read_rows
from lightning_rlhf.cli.commands import settings_of
from lightning_rlhf.core.ppo_config import PPOConfig

OUT = Path(__file__).parent / "results" / "diagnosis_clean.md"
SHOWN = ("kl_divergence", "entropy", "update/ratio_max", "rollout/repetition")
"""Metrics of which the table shows the most extreme value."""


def findings(rows: list[Row], config: PPOConfig, run_dir: Path) -> list[str]:
    """Return "rule at iteration" for each finding, in the order of a run."""
    found: dict[str, int] = {}
    for end in range(1, len(rows) + 1):
        part = rows[:end]
        history = History(
            rows=[row for row in part if "reward_mean" in row][-KEPT:],
            evaluations=[row for row in part if "eval/reward_mean" in row][-KEPT:],
            config=config,
            prompts_cut=0.0,
            run_dir=run_dir,
        )
        for rule in RULES:
            if rule.name not in found and rule.find(history) is not None:
                found[rule.name] = int(part[-1]["step"])
    return [f"{name} at {step}" for name, step in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs of PPO")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    lines = [
        "| seed | iterations | reward_mean, last | largest KL | least entropy | largest ratio "
        "| largest repetition | findings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total = 0
    runs = sorted((settings_of(folder) for folder in given.folders), key=lambda s: s.seed)
    by_seed = {settings_of(folder).seed: folder for folder in given.folders}
    for settings in runs:
        assert isinstance(settings.config, PPOConfig)
        folder = by_seed[settings.seed]
        cells = read_rows(folder / "metrics.csv")
        rows: list[Row] = [
            {"step": float(step)} | {name: float(x) for name, x in row.items()}
            for step, row in cells.items()
        ]
        found = findings(rows, settings.config, folder)
        total += len(found)
        trained = [row for row in rows if "reward_mean" in row]
        kl, entropy, ratio, repetition = ([row[name] for row in trained] for name in SHOWN)
        lines.append(
            f"| {settings.seed} | {len(trained)} | {trained[-1]['reward_mean']:.2f} "
            f"| {max(kl):.1f} | {min(entropy):.2f} | {max(ratio):.1f} | {max(repetition):.2f} "
            f"| {', '.join(found) or '-'} |"
        )
    lines += ["", f"{total} findings in {len(runs)} runs."]
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
