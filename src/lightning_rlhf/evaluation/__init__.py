"""Evaluation: rewards, policies and finished runs, and what a run leaves to read."""
