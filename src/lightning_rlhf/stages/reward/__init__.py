"""The reward of a stage: built from its configuration, tried on the data, and measured."""
