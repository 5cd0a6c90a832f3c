"""Replay of recorded updates, and the pages that show them."""
