"""Several hosts: one leads, the others join it and run their share of the workers."""
