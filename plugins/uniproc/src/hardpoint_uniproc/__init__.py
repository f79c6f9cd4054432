"""The ``uni`` executor: one worker on one dedicated thread of the driver's process."""
