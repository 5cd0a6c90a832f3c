"""The command line: composes a configuration, chooses the job and words the errors."""
