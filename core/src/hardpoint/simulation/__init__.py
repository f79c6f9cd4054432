"""A driver and its workers in one thread, on a clock and a network of their own.

The executor's calls, the call table, the supervisor and the workers' hosts are the real ones;
processes, time and delivery are simulated, and everything that chance decides comes from one seed.
So a failure that took a thousand runs to find is seen again by its seed alone. Used by tests of
executors and protocols; ours and others'.
"""
