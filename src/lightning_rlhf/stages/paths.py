"""Where the configurations and the recipes are that ship with the package."""

from __future__ import annotations

from pathlib import Path

import lightning_rlhf

PACKAGE = Path(lightning_rlhf.__file__).parent
CHECKOUT = PACKAGE.parents[1]
HOME = CHECKOUT if (CHECKOUT / "conf" / "config.yaml").is_file() else PACKAGE
"""The folder that holds conf/ and recipes/: the checkout, or the package of a wheel."""
CONF, RECIPES = HOME / "conf", HOME / "recipes"
