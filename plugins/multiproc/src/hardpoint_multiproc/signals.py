"""Which signal means what between driver and worker."""

from __future__ import annotations

import signal

STACK_SIGNAL = signal.SIGRTMIN + 5
"""On it a worker writes the stacks of its threads into memory that the driver reads. A real-time
signal, as the others have uses of their own in libraries and debuggers.
"""

LAST_STACK_SIGNAL = signal.SIGRTMIN + 6
"""On it a worker does the same and ends, without one more line of Python: a worker that is stopped
must be continued to write anything, and must not go on with its work then.
"""
