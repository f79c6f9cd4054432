"""Remote calls: the driver's call table, the worker's host, the codec. Executors are launchers plus
a channel over these.
"""
