"""The command line: compose a configuration, choose the job, word what is refused."""
