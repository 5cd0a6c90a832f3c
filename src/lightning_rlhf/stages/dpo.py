"""stage=dpo: direct preference optimization of a policy on preference pairs."""

from __future__ import annotations

from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.report.curves import DPO_PANELS
from lightning_rlhf.stages.supervised import Supervised


class DPO(Supervised):
    """Training of a policy on pairs; the SFT model that it starts from is the reference."""

    name = "dpo"
    title = "Direct preference optimization"
    config = DPOConfig
    panels = staticmethod(lambda measured: DPO_PANELS)
    data = "preferences"
    goal = (("eval/dpo_loss", "min"),)
    headlines = ("update/dpo_loss", "update/accuracy", "eval/accuracy")
    summary = ("eval/dpo_loss", "eval/accuracy", "eval/reward_margin")
    module_class = DPOModule
