"""Which signal means what between driver and worker."""

from __future__ import annotations

import signal

STACK_SIGNAL = signal.SIGRTMIN + 5
"""On it a worker writes the stacks of its threads into memory that the driver reads. A real-time
signal, as the others have uses of their own in libraries and debuggers.
"""

LAST_STACK_SIGNAL = signal.SIGRTMIN + 6
"""As STACK_SIGNAL, and ends the worker then and there: a stopped one that is continued for its
stack must not go on with its work.
"""
