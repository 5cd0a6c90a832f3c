"""README.md of a `final/` folder: data, parents, metrics with intervals, license, loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

import lightning_rlhf
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.formats import Kind
from lightning_rlhf.models.config import SFT
from lightning_rlhf.models.manifest import FROM_CONFIG, Manifest
from lightning_rlhf.models.weights import is_folder, json_object
from lightning_rlhf.report.markdown import plain, table
from lightning_rlhf.stages.measured import StageResult

CARD = "README.md"
LONGEST = 200
"""Number of characters of a cell of a table, at most."""
POLICY = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer{imports}

name = "{name}"
model = AutoModelForCausalLM.from_pretrained(name{arguments})
tokenizer = AutoTokenizer.from_pretrained(name)

question = [{{"role": "user", "content": "What is the capital of Australia?"}}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True{kwargs}
)
output = model.generate(**prompt, do_sample=True, max_new_tokens={tokens})
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
REWARD = """```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer{imports}

name = "{name}"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name{arguments})
model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def tokens(question, response):
    turns = [{{"role": "user", "content": question}}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False{kwargs}
    )
    texts = tokenizer([prompt, response], add_special_tokens=False)["input_ids"]
    return [*texts[0], *texts[1], {end}]  # the end of a turn


question = "What is the capital of Australia?"
rows = [tokens(question, "It is Canberra."), tokens(question, "Sydney")]
batch = tokenizer.pad({{"input_ids": rows}}, return_tensors="pt")
with torch.no_grad():
    scores = model(**batch).logits[:, 0]
rewards = (scores - {mean!r}) / {std!r}
```

`rewards` are what PPO is paid: the mean of the SFT model's samples is 0, their deviation 1."""

OPTIONS = {
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
}
"""Kind of quantised weights -> code of the argument with which transformers makes them."""
ROUNDED = (
    " The adapter was trained on quantised weights, and is merged into their rounded values; "
    "8-bit layers of transformers round activations too."
)


@dataclass(frozen=True, kw_only=True)
class Described:
    """Content of the model card of a `final/` folder."""

    name: str
    """Folder or hub id in the code that loads the model."""
    title: str
    manifest: Manifest
    """Manifest in the same folder."""
    kind: Kind
    """Section of `data` that the stage was trained on."""
    chat: ChatFormat
    is_adapter: bool
    """True if the folder holds an adapter, False if it holds whole weights."""
    reward_bias: float | None
    """Constant by which the reward is larger than the classifier's score; None for a policy."""
    license: Mapping[str, Any]
    """Keys of the base's license in the metadata of a card; {} where it is not known."""
    result: StageResult
    """Metrics of the stage with the samples that their intervals are computed from."""

    def text(self) -> str:
        """Return the card as Markdown with its metadata."""
        manifest, is_reward = self.manifest, self.reward_bias is not None
        hub = hub_id(manifest.base)
        tags = ["lightning-rlhf", manifest.stage, *(["lora"] if self.is_adapter else [])]
        data = ModelCardData(
            base_model=hub,
            library_name="peft" if self.is_adapter else "transformers",
            pipeline_tag="text-classification" if is_reward else "text-generation",
            tags=tags,
            datasets=[name for _, name in self.data() if hub_id(name)] or None,
            **self.license,
        )
        parts = [
            f"---\n{data.to_yaml()}\n---",
            f"# {self.title}",
            f"{self.what()} by lightning-rlhf {lightning_rlhf.__version__} with `stage="
            f"{manifest.stage}`. `manifest.json` has the whole configuration and the versions of "
            "the packages.",
            table(("", ""), [(name, plain(text, LONGEST)) for name, text in self.origin()], ()),
            *self.verdict(),
            "## Metrics",
            self.metrics(),
            "## Loading",
            self.loading(),
        ]
        return "\n\n".join(parts) + "\n"

    def what(self) -> str:
        """Return the beginning of a sentence that says what the model is."""
        kind = "A reward model" if self.reward_bias is not None else "A language model"
        form = "a LoRA adapter" if self.is_adapter else "whole weights"
        return f"{kind} ({form}), trained"

    def data(self) -> Iterator[tuple[str, str]]:
        """Yield the splits of the data that the stage was trained on, and their sources."""
        node = (self.manifest.config.get("data") or {}).get(self.kind) or {}
        for split in ("train", "val"):
            if isinstance(source := node.get(split), str):
                yield f"{self.kind}, {split}", source if hub_id(source) else Path(source).name

    def origin(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table of base, parents, data and step."""
        manifest = self.manifest
        base = hub_id(manifest.base) or Path(manifest.base).name
        is_random = manifest.base == FROM_CONFIG
        yield "base", f"random weights of seed {manifest.base_seed}" if is_random else base
        yield "license of the base", self.license.get("license", "not stated with its weights")
        yield from ((f"from: {role}", source) for role, source in manifest.parents.items())
        yield from self.data()
        if manifest.chosen:
            chosen = manifest.chosen
            yield "step", f"{chosen['step']} of {chosen['last_step']} (final={chosen['final']})"
        yield "seed", str(manifest.config.get("seed"))

    def verdict(self) -> Iterator[str]:
        """Yield the verdicts of fitness reports, a paragraph each."""
        for name, verdict in self.manifest.verdicts.items():
            yield f"Reward `{name}`: {verdict['words']}"

    def metrics(self) -> str:
        """Return the table of the metrics of the evaluation, with 95% intervals."""
        rows = []
        for name in self.manifest.metrics:
            found = self.result.metric(name) if name.startswith("eval/") else None
            if found is None:
                continue
            interval = "" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
            before = self.manifest.metrics.get(f"start/{name}")
            rows.append((f"`{name}`", f"{found.value:.4g}", interval,
                         "" if before is None else f"{before:.4g}"))  # fmt: skip
        if not rows:
            return "None were stored."
        head = ("on held-out data", "value", "95% interval", "before training")
        shown = table(head, rows, (1, 2, 3))
        return f"{shown}\n\nIntervals are bootstraps over prompts, of one run with one seed."

    def loading(self) -> str:
        """Return the code that loads the model."""
        manifest = self.manifest
        if self.is_adapter and manifest.base == FROM_CONFIG and SFT not in manifest.parents:
            return (
                "The adapter stands on random weights, which only lightning-rlhf makes again: "
                "`lightning-rlhf export FOLDER --merge` writes whole weights."
            )
        kwargs = "".join(f", {key}={value!r}" for key, value in self.chat.template_kwargs.items())
        imports, arguments = self.quantization()
        if self.reward_bias is None:
            tokens = manifest.config.get("data", {}).get("max_response_tokens", 64)
            code = POLICY.format(
                name=self.name, kwargs=kwargs, tokens=tokens, imports=imports, arguments=arguments
            )
        else:
            code = REWARD.format(
                name=self.name, kwargs=kwargs, end=self.chat.end_token_id, imports=imports,
                arguments=f", num_labels=1{arguments}" if self.is_adapter else "",
                mean=(manifest.reward_mean or 0.0) - self.reward_bias,
                std=manifest.reward_std or 1.0,
            )  # fmt: skip
        if not self.is_adapter:
            return code
        return (
            f"{code}\n\nThe base weights are loaded from where `adapter_config.json` names them "
            "(`base_model_name_or_path`); `lightning-rlhf export FOLDER --merge` writes whole "
            f"weights, for programs without PEFT.{ROUNDED if arguments else ''}"
        )

    def quantization(self) -> tuple[str, str]:
        """Return import and argument that quantise the base of an adapter as in training."""
        model = self.manifest.config.get("model") or {}
        kind = model.get("quantization", "none")
        if not self.is_adapter or kind == "none":
            return "", ""
        found = f",\n    dtype={model['dtype']!r},\n    quantization_config={OPTIONS[kind]},\n"
        return ", BitsAndBytesConfig", found


def hub_id(source: str) -> str | None:
    """Return `source` where it can be the id of a repository on the hub, else None."""
    is_id = source.count("/") == 1 and not source.startswith((".", "~", "/")) and ":" not in source
    return source if is_id and not Path(source).suffix and not is_folder(source) else None


def license_of(*folders: Path | None) -> dict[str, Any]:
    """Return the license of the first folder whose model card or config.json states one.

    Returns: the keys license, license_name and license_link that are there; {} without any.
    """
    for folder in folders:
        if folder is None:
            continue
        try:
            stated = metadata_load(folder / CARD) or {}
        except (OSError, ValueError, yaml.YAMLError):
            stated = {}
        if not isinstance(stated.get("license"), str) and (folder / "config.json").is_file():
            stated = json_object(folder / "config.json")
        if isinstance(stated.get("license"), str):
            keys = ("license", "license_name", "license_link")
            return {key: str(stated[key]) for key in keys if key in stated}
    return {}


def result_of(metrics: Mapping[str, float], folder: Path | None) -> StageResult:
    """Return the metrics, with their samples where the run in `folder` kept readable ones."""
    try:
        return StageResult(metrics, [], []) if folder is None else StageResult.read(metrics, folder)
    except RLHFError:
        return StageResult(metrics, [], [])


def in_code(folder: Path) -> str:
    """Return the name of a folder for the code in its card, which may be moved."""
    return "path/to/final" if folder.is_absolute() else folder.as_posix()
