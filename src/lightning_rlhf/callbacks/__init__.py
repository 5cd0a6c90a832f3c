"""Lightning callbacks and loggers: metrics, progress, checkpoints and warnings of a run."""
