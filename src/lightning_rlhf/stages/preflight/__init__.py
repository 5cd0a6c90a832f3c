"""Checks of a training run before its first update, and the plan of its memory."""
