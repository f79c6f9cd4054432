"""The ``external_launcher`` executor: a worker in each process that the user's launcher started."""
