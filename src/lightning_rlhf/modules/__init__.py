"""The stages: one LightningModule each; SFT, reward model and DPO share a base class."""
