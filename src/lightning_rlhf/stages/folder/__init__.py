"""The folder of a run: where it is, what it was made with, and how a run in it goes on."""
