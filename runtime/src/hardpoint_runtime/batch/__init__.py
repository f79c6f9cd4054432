"""The batch on the host: slots kept for life, declared columns, block tables, one step's inputs."""
