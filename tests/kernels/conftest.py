"""The small models of tests/models, one thread."""

from ..models.conftest import LORA as LORA
from ..models.conftest import VOCABULARY as VOCABULARY
from ..models.conftest import _calm as _calm
from ..models.conftest import build_config as build_config
from ..models.conftest import build_model as build_model
from ..rollout.conftest import make_prompts as make_prompts
