"""Who may start: no more requests at once than the device has banks."""

from __future__ import annotations

from hardpoint_engine import (
    AdmissionPolicy,
    Admit,
    Decision,
    Refuse,
    RequestInfo,
    RunningRequests,
    Wait,
)

BANKS = 8
LONGEST = 1024


class Banks(AdmissionPolicy):
    """Refuses prompts that fill a bank by themselves; lets as many run as there are banks."""

    def admit(self, request: RequestInfo, running: RunningRequests) -> Decision:
        """Say what to do with ``request``."""
        if request.num_prompt > LONGEST:
            return Refuse(f"a bank holds prompts of at most {LONGEST} tokens")
        return Admit() if len(running) < BANKS else Wait()
