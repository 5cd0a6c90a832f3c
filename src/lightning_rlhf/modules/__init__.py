"""The stages: one LightningModule each, sharing functions and no ancestor."""
