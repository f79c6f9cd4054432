"""The ``ray`` executor: a Ray actor for each worker."""
