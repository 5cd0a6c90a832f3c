"""Input and output: files written whole, text made safe to show, and code that the user names."""
