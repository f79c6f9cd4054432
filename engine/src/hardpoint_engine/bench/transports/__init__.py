"""Ways to call workers, one a file, each with a class ``Transport`` that ``turns.py`` drives.

All do the same work: every worker gets a method's name and the payload, and answers with the
payload's last byte; the driver gathers the answers in rank order. A file here is run by path, in
whatever interpreter has its library, and imports nothing else of Hardpoint's.
"""
