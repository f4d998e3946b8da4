"""One file per run; its docstring is the record of that run."""
