"""Validated configurations of the stages. The values live in conf/stages/*.yaml."""

import dataclasses
import math
import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core import validation

Schedule = Literal["constant", "linear", "cosine"]
DType = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8", "nf4"]
KernelChoice = Literal["auto", "fast", "plain"]
Mode = Literal["min", "max"]
"""Direction in which a metric is better."""
Normalization = Literal["none", "stored", "running"]
LossType = Literal["sigmoid", "sigmoid_norm", "ipo", "kto", "orpo", "simpo", "cpo"]
SUMMED = ("sigmoid", "kto", "cpo")
"""Losses that read the sum over the tokens of a response; the others read the mean."""
REFERENCE_FREE = ("orpo", "simpo", "cpo")
"""Losses that read the policy alone."""


PolicyName = Annotated[
    validation.Text, validation.described("a final/ folder, a checkpoint file, a hub id")
]
PolicyNames = Annotated[
    tuple[validation.Text, ...],
    Field(strict=False, min_length=1),
    validation.described("a list of final/ folders, checkpoint files and hub ids, null"),
]
SamplerName = Annotated[str, validation.name_or_path("native", "hf", "vllm", kind="Class")]
"""Name of a sampler, or path of a class that implements one."""
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]
"""Assumed share of wrong labels."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class ServerConfig:
    """Settings of the servers of rollout=vllm, the section `rollout_server`."""

    url: validation.OneOrMore
    """Addresses of the servers, of which each answers an equal share of the requests."""
    adapters: validation.Text | None
    """Folder that this program and the servers see; None for a temporary one of this machine."""
    timeout_s: validation.PositiveFloat
    """Seconds that a request may take, with all tries."""
    max_gap: validation.PositiveFloat
    """Largest mean difference of a token's log-probability here from the server's, nats."""
    token_env: validation.Text | None
    """Environment variable that holds the token of the servers; None for none."""
    start: bool
    """True if the run starts and ends the server."""
    command: validation.Text
    """Executable `vllm` of the environment that a server is started in."""
    arguments: validation.Texts
    """Further arguments of `vllm serve`, which come last."""

    def __post_init__(self) -> None:
        form = r"https?://[^\s/@?#]+(/[^\s@?#]*)?"
        are_addresses = self.url and all(re.fullmatch(form, url) for url in self.url)
        shown = [re.sub(r"//.*@", "//***@", url, flags=re.DOTALL) for url in self.url]
        allowed = "http://HOST:PORT, or several; a token goes into token_env"
        validation.rule(bool(are_addresses), "url", shown, allowed)
        allowed = "false for several addresses, or for one that is not http://HOST:PORT"
        is_one = len(self.url) == 1 and re.fullmatch(r"http://[^/]+:\d+", self.url[0])
        validation.rule(not self.start or bool(is_one), "start", True, allowed)
        has_token = any(word.startswith("--api-key") for word in self.arguments)
        validation.rule(not has_token, "arguments", "--api-key", "token_env=VARIABLE for a token")


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class BestConfig:
    """Metric that decides which evaluation is the best."""

    metric: validation.Text | None
    """Name of a metric of the evaluations; None is the stage's own, of `stop` the one of `best`."""
    mode: Mode | None
    """Direction of the metric; None is the direction that is defined for it."""

    def __post_init__(self) -> None:
        is_whole = self.metric is not None or self.mode is None
        validation.rule(is_whole, "mode", self.mode, "null, unless the metric is given too")


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class StopConfig(BestConfig):
    """Rule by which a run ends before its last step, where the metric does not gain."""

    patience: validation.PositiveInt | None
    """Number of evaluations in a row without a gain after which the run ends; None is never."""
    min_gain: validation.NonNegativeFloat
    """Smallest gain that counts, exclusive, in units of the metric."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class StageConfig:
    """Settings of training, its schedule, validations and checkpoints, common to all stages."""

    finetune: Literal["lora", "full"]
    """What is trained: a LoRA adapter, or all weights."""
    lr: validation.PositiveFloat
    adam_beta2: Annotated[float, Field(gt=0, lt=1)]
    adam_eps: validation.PositiveFloat
    weight_decay: validation.NonNegativeFloat
    max_grad_norm: validation.PositiveFloat
    lr_schedule: Schedule
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)]
    microbatch_size: Annotated[
        validation.Count | Literal["auto"], validation.described("a whole number >= 1, auto")
    ]
    """Number of rows of a backward pass; auto is the largest that the memory plan allows."""
    val_every: validation.PositiveInt
    checkpoint_every: validation.PositiveInt
    checkpoint_minutes: validation.PositiveFloat | None
    """Minutes after which a checkpoint is written, whatever the number of steps; None is never."""
    checkpoints_kept: validation.PositiveInt
    """Number of latest checkpoints that are kept, besides the best one."""
    max_nonfinite: validation.PositiveInt
    final: Annotated[
        Literal["last", "best"] | validation.PositiveInt,
        validation.described("last, best, the number of a step"),
    ]
    """Step whose model becomes `final/`: last, best or a number."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None
    """Decay of the average of the weights that is `final/`; None for the weights themselves."""
    best: Annotated[BestConfig, validation.nested(BestConfig)]
    stop: Annotated[StopConfig, validation.nested(StopConfig)]
    step_key: ClassVar[str] = "batch_size"
    """Field with the number of rows of an optimizer step, which a micro-batch divides."""

    @property
    def microbatch_rows(self) -> int:
        """Return microbatch_size; for auto all rows of a step, until a memory plan takes fewer."""
        size = self.microbatch_size
        return int(getattr(self, self.step_key)) if size == "auto" else size

    def validation_interval(self, steps: int) -> int:
        """Return the number of steps between validations of a run of `steps`.

        It is val_every, or for a shorter run a tenth of it, rounded up.
        """
        return self.val_every if self.val_every <= steps else math.ceil(steps / 10)


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class SupervisedConfig(StageConfig):
    """Settings common to the stages that read examples with their labels."""

    epochs: Annotated[float, Field(gt=0, le=validation.MOST)]
    batch_size: validation.Count

    def __post_init__(self) -> None:
        validation.check_divides(self, "microbatch_size", "batch_size")


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class SFTConfig(SupervisedConfig):
    """Settings of supervised fine-tuning."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class EvalConfig:
    """Settings of the evaluation of a reward."""

    samples: validation.Count
    """Number of responses of the SFT model that are scored."""
    temperature: validation.Temperature
    """Sampling temperature of those responses."""
    batch_size: validation.Count
    """Number of responses that are sampled at once, or scored at once by a head on the policy's
    base."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class ResponsesConfig:
    """Settings of a stage that samples responses and scores them."""

    samples_per_prompt: validation.Count
    """Number of responses that are sampled to each prompt."""
    temperature: validation.Temperature
    """Sampling temperature, at which log-probabilities are measured too."""
    rollout: Literal["native", "vllm"]
    """Who samples them: this program, or the servers of `rollout_server`."""
    max_response_tokens: validation.PositiveInt
    """Largest number of tokens of a response, the end token included."""
    stop_strings: validation.Texts
    """Texts that end a response as an end token does."""
    batch_size: validation.Count
    """Number of responses that are sampled or read at once."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class PolicyEvalConfig(ResponsesConfig):
    """Settings of the evaluation of policies, which samples a greedy response to a prompt too."""

    policies: PolicyNames | None
    """Policies to compare with each other and with the SFT model; None for that of the run."""
    best_of: validation.Count | None
    """Number of responses of the SFT model of which the best by the reward is one more policy's;
    None for no such policy."""
    pass_k: Annotated[tuple[validation.Count, ...], Field(strict=False)] | None
    """Values of k for pass@k; None for 1 and `samples_per_prompt`."""
    shown: validation.Count
    """Number of prompts whose responses evaluation.md shows."""

    def __post_init__(self) -> None:
        most, given = self.samples_per_prompt, self.policies or ()
        for k in self.pass_k or ():
            validation.rule(k <= most, "pass_k", k, f"1 to {most}, the samples_per_prompt")
        validation.rule(len(set(given)) == len(given), "policies", list(given), "each policy once")


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class RankConfig(ResponsesConfig):
    """Settings of data made of a policy's responses and their scores."""

    policy: PolicyName | None
    """Policy that responds; None for the SFT model."""
    prompts: Literal["train", "val"]
    """Side of `data.prompts` that is responded to."""
    max_prompts: validation.PositiveInt | None
    """Largest number of prompts, drawn with the seed; None for all."""
    pairs: Literal["best_worst", "all"]
    """Preference pairs of a prompt: the best response with the worst one, or each two."""
    min_margin: validation.NonNegativeFloat
    """Smallest difference of the scores of a pair."""
    accept_above: float | None
    """Score from which a response is accepted as a demonstration; None accepts none."""

    def __post_init__(self) -> None:
        allowed = "at least 2, so that there is something to compare"
        count = self.samples_per_prompt
        validation.rule(count > 1, "samples_per_prompt", count, allowed)


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class RMConfig(SupervisedConfig):
    """Settings of reward modelling."""

    heads: validation.Count
    """Number of heads of the ensemble, whose spread measures the reward model's uncertainty."""
    margin_coef: validation.NonNegativeFloat
    """Factor of the margins in the data, in units of reward."""
    label_smoothing: LabelSmoothing
    center_coef: validation.NonNegativeFloat
    """Weight of the loss that centers the rewards of each pair at 0."""
    calibration_samples: Annotated[int, Field(ge=2, le=validation.MOST)]
    """Number of SFT samples on which the reward's mean and standard deviation are measured."""
    temperature: validation.Temperature
    """Sampling temperature of those samples."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class DPOConfig(SupervisedConfig):
    """Settings of direct preference optimization."""

    beta: validation.PositiveFloat
    """Factor of the log-ratios; with ipo, 1 / (2 beta) is the log-ratio that is aimed at, and with
    orpo it weighs the loss."""
    loss_type: LossType
    simpo_gamma: validation.NonNegativeFloat
    """Margin of simpo by which the reward of the chosen response is to be larger."""
    desirable_weight: validation.NonNegativeFloat
    """Weight of the responses with the label true in kto."""
    undesirable_weight: validation.NonNegativeFloat
    """Weight of the responses with the label false in kto."""
    label_smoothing: LabelSmoothing
    reference_free: bool
    """True for a reference that gives every response the same probability."""
    sft_coef: validation.NonNegativeFloat
    """Weight of the negative log-likelihood of the chosen responses, or of those with the label
    true, mean over their tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "kto":
            why = "with loss_type=kto, which has labels of single responses and a reference"
            validation.rule(
                self.label_smoothing == 0, "label_smoothing", self.label_smoothing, f"0 {why}"
            )
            validation.rule(not self.reference_free, "reference_free", True, f"false {why}")
            allowed = "at least 2 with loss_type=kto, which reads the responses to other prompts"
            validation.rule(self.batch_size > 1, "batch_size", self.batch_size, allowed)

    @property
    def sums(self) -> bool:
        """Return whether the loss reads the sum over the tokens of a response, or else the mean."""
        return self.loss_type in SUMMED

    @property
    def has_reference(self) -> bool:
        """Return whether the loss reads a reference."""
        return not (self.reference_free or self.loss_type in REFERENCE_FREE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """Weight, normalization and clip with which one component of a reward enters the score."""

    name: str
    weight: float
    """Factor of the component; below 0 for a penalty."""
    normalization: Normalization
    """none | stored: standardised by the source itself | running: by the moments of all numbers so
    far."""
    clip: float | None
    """Bound of the normalised component's absolute value; None does not clip."""


PAIR = "pair"
"""Value of `chat_template` that calls tokenizer(prompt, response) instead of a template."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class ClassifierConfig:
    """Sequence classifier that scores texts: how it is loaded and how it reads a text."""

    name_or_path: Annotated[validation.Text, validation.described("a folder or hub id")]
    revision: validation.Text | None
    tokenizer: validation.Text | None
    """Hub id or folder of the tokenizer; None is the model's own."""
    chat_template: validation.Text | None
    """Path of a Jinja file, PAIR for tokenizer(prompt, response), or None for the tokenizer's own
    template."""
    label: Annotated[
        validation.NonNegativeInt | validation.Text | None,
        validation.described("a number, the name of an output, or null"),
    ]
    """Number or name of the output that is the reward; None where there is only one."""
    dtype: DType | None
    """Type of the weights; None is the type of the training by stage=rm, or that of the file."""
    quantization: Quantization
    attn_implementation: validation.Text | None
    trust_remote_code: bool
    max_tokens: validation.PositiveInt | None
    """Largest number of tokens of a text; None is the model's number of positions."""
