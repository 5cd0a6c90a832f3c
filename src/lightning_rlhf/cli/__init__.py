"""The command line: compose a configuration, check it, build, fit, hand over."""
