"""SFT, reward modelling and PPO as PyTorch Lightning modules and Hydra recipes."""

__version__ = "0.1.0"
