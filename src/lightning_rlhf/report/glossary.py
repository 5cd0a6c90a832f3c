"""Definitions of the numbers in a fitness report, and the names under which they are logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_rlhf.report.checks import MIN_COUNT, MIN_PROBES, Finding
from lightning_rlhf.report.fitness import Fitness
from lightning_rlhf.report.length_bias import LONGER, SHORTER
from lightning_rlhf.report.probing import ProbeResult

GLOSSARY: Mapping[str, str] = {
    "Accuracy": "share of held-out pairs in which chosen scores above rejected; a tie counts one "
    "half.",
    "95% interval": "2.5% and 97.5% quantile of 2,000 bootstrap resamples, which draw whole "
    "prompts with all their pairs.",
    "Accuracy of length": "how often chosen is the response with more tokens, two of one length "
    "counting one half: what a rule reaches that reads nothing.",
    "Good responses": "the chosen responses of held-out pairs; where one number stands for them, "
    "it is the median of their scores.",
    "Length gap": "accuracy over pairs whose chosen response has more tokens, less accuracy over "
    "those where it has fewer. 1: it takes the longer response whatever it says; 0: length does "
    "not decide how often it is right; -1: it takes the shorter.",
    "Correlation": "Pearson's over the numbers and Spearman's over their ranks; undefined where "
    "one of the two never changes or there are fewer than three points. Within pairs: chosen less "
    "rejected, of score and of tokens. What chosen responses score more on average, and have more "
    "tokens on average, does not enter.",
    "Confidence": "sigmoid of the scaled |chosen - rejected|, 0.5 to 1: how sure it is of its own "
    "pick, which is right where chosen scores higher. (Chosen stands first in every pair; a "
    "probability that the first is preferred could be right by always saying 1.)",
    "Log-loss": "mean of -log sigmoid(chosen - rejected), scaled alike; guessing gives 0.693.",
    "ECE": "expected calibration error: pairs in 10 bins by confidence, of equal mass, equal "
    "confidences together; mean over pairs of |confidence - accuracy| of their bin. The error of a "
    "calibrated model by chance is what is expected where every outcome is drawn with its stated "
    "confidence (normal approximation).",
    "Overconfidence": "mean confidence less accuracy.",
    "Score difference": "|chosen - rejected|, by quarter of the pairs; equal values stay together. "
    "The given margin likewise.",
    "Probes": "responses that deserve less than a good one; medians are compared over the same "
    "prompts. Where prompts ask for what should be refused, a refusal may earn its score.",
    "Beats chosen": "share of prompts in which the probe scores above the chosen response to the "
    "same prompt; a tie counts one half.",
    "SFT samples off the scale": "share of SFT samples that score above the highest or below the "
    "lowest response of the pairs.",
    "Not tested": f"fewer than {MIN_COUNT} pairs or samples, for a probe fewer than {MIN_PROBES} "
    "prompts, or nothing to measure.",
}
"""Definition of each number in a report."""


def metrics(
    fitness: Fitness, probes: Sequence[ProbeResult], findings: Sequence[Finding]
) -> dict[str, float]:
    """Return the scalar measurements by the names they are logged under; undefined ones are left
    out."""
    length, calibration = fitness.length, fitness.calibration
    longer, shorter = length.group(LONGER), length.group(SHORTER)
    low, high = fitness.accuracy.interval or (None, None)
    found: dict[str, float | None] = {
        "accuracy": fitness.accuracy.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "accuracy_chosen_longer": None if longer is None else longer.accuracy,
        "accuracy_chosen_shorter": None if shorter is None else shorter.accuracy,
        "length_gap": length.gap,
        "length_pearson": length.responses.pearson,
        "length_pearson_within_pairs": length.pairs.pearson,
        "length_pearson_sft": length.samples.pearson,
        "sft_outside": fitness.outside,
        "pairs": float(len(fitness.pairs)),
        "flags": float(sum(finding.outcome == "flag" for finding in findings)),
    }
    if calibration is not None:
        found |= {
            "log_loss": calibration.log_loss,
            "ece": calibration.ece,
            "overconfidence": calibration.overconfidence,
        }
    for probe in probes:
        found[f"probe_{probe.kind}"] = probe.median - probe.chosen_median
    return {f"fitness/{name}": value for name, value in found.items() if value is not None}
