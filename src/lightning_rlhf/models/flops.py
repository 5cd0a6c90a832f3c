"""Floating-point operations of reading tokens with a model, by the standard formula.

For n tokens in rows of S tokens, m of whose hidden states go through the output layer:

    forward = 2 N n + 2 d V m + 4 A sum over rows of S^2
    update  = forward + backward
    backward = 2 N n + 2 d V m        gradients of the activations
               + 2 N' n [+ 2 d V m]   gradients of the weights that are trained [the output layer's]
               + 8 A sum of S^2       gradients of attention: twice its forward pass
               [+ forward]            with gradient checkpointing

N counts the weights of the trunk's linear layers and of the role's adapters, N' those of them that
are trained, d V the output layer's, and A heads * head size summed over the layers with softmax
attention. A trained weight takes 6 operations a token, a frozen one 4, and one that only reads 2:
full training is 6 N n, adapters (N') on a frozen base are 4 (N - N') n + 6 N' n.

Source: 2 N forward and 6 N in training, Kaplan et al. 2020, section 2.1,
https://arxiv.org/abs/2001.08361; attention of 12 layers * hidden * S in training, Chowdhery et al.
2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311
Departs: N has no embedding, and the output layer counts for the tokens that it reads. Attention is
its whole square, as in PaLM and in torch's counter; Kaplan's table 1 has the causal half. Left out
are padding, the state of linear attention (it grows with the tokens, not with their square), norms,
softmax, scalar heads, the optimizer, and experts that a router chooses.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rlhf.models.roles import Roles, linear_layers


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights of a model in one role, from which its operations follow."""

    frozen: int
    trained: int
    head: int
    """Number of weights of the output layer; 0 without one."""
    head_is_trained: bool
    attention: int
    """Number of heads times their size, summed over the layers with softmax attention."""
    recomputes: bool
    """True if decoder layers are computed once more for the gradient."""

    def forward(self, lengths: Int[Tensor, " B"], predicted: int = 0) -> float:
        """Return the operations of a forward pass.

        lengths: number of tokens of each row. predicted: number of tokens that the output layer
            predicts.
        """
        linear = 2.0 * (self.frozen + self.trained) * int(lengths.sum())
        return linear + 2.0 * self.head * predicted + self._scores(lengths)

    def _scores(self, lengths: Int[Tensor, " B"]) -> float:
        return 4.0 * self.attention * float((lengths.double() ** 2).sum())

    def update(self, lengths: Int[Tensor, " B"], predicted: int = 0) -> float:
        """Return the operations of a forward and a backward pass; arguments as for `forward`."""
        passes = (3 if self.recomputes else 2) * self.forward(lengths, predicted)
        weights = self.trained * int(lengths.sum()) + self.head_is_trained * self.head * predicted
        return passes + 2.0 * weights + self._scores(lengths)

    def sampling(
        self, prompts: Int[Tensor, " B"], responses: Int[Tensor, " B"], each: int
    ) -> float:
        """Return the operations of sampling with a cache, where token t attends to t tokens.

        prompts, responses: number of tokens of each response's prompt, and of the response.
        each: number of responses, one after the other, for which a prompt is read once.
        """
        steps = responses - 1  # nothing is predicted from the last token
        contexts = float((steps * prompts + steps * (steps + 1) // 2).sum())
        decoding = 2.0 * (self.frozen + self.trained) * int(steps.sum())
        decoding += 4.0 * self.attention * contexts
        return self.forward(prompts[::each], int(responses.sum())) + decoding


def weights_of(model: PreTrainedModel | Roles, role: str = "") -> Weights:
    """Return the numbers of weights of a model of any family; role: role of `Roles`."""
    adapters = model.adapters(role) if isinstance(model, Roles) else ()
    causal_lm: Any = model.causal_lm if isinstance(model, Roles) else model
    counts = {True: 0, False: 0}
    for _, layer, inputs, outputs in linear_layers(causal_lm.base_model, adapters):
        counts[layer.weight.requires_grad] += inputs * outputs
    head, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 0)  # RWKV has none
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    layers = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return Weights(
        frozen=counts[False],
        trained=counts[True],
        head=0 if head is None else head.in_features * head.out_features,
        head_is_trained=head is not None and head.weight.requires_grad,
        attention=heads * size * sum(kind != "linear_attention" for kind in layers),
        recomputes=bool(getattr(causal_lm, "recomputes", False)),
    )
