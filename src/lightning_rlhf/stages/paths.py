"""Paths of the configurations and recipes that ship with the package."""

from __future__ import annotations

from pathlib import Path

import lightning_rlhf

PACKAGE = Path(lightning_rlhf.__file__).parent
CHECKOUT = PACKAGE.parents[1]
HOME = CHECKOUT if (CHECKOUT / "conf" / "config.yaml").is_file() else PACKAGE
"""Folder that holds conf/ and recipes/: the checkout, or the installed package."""
CONF, RECIPES = HOME / "conf", HOME / "recipes"
