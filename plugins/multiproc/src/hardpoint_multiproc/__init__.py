"""The ``mp`` executor: one process for each worker, on one host."""
