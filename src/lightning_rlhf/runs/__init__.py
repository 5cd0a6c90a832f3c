"""Runs: the checked settings of a run, its folder, resuming, accelerator and Trainer."""
