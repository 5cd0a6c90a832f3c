"""A sampler whose log-probabilities are half of those that it sampled with."""

from dataclasses import replace

from lightning_rlhf.rollout.native import NativeSampler


class Wrong(NativeSampler):
    def sample(self, prompts, samples_per_prompt, generator, share):
        found = super().sample(prompts, samples_per_prompt, generator, share)
        return replace(found, logprobs=found.logprobs / 2)
