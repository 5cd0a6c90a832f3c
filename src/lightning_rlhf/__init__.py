"""SFT, reward modelling and PPO as PyTorch Lightning modules and Hydra recipes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlhf.library import build, configuration, save

__version__ = "0.1.0"
__all__ = ["build", "configuration", "save"]


def __getattr__(name: str) -> Any:
    """Return a function of `library`, imported at its first use, since that takes a second."""
    if name in __all__:
        from lightning_rlhf import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
