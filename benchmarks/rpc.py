"""What a call of all workers costs, beside other ways to make one, in one run. The same as
`hardpoint bench rpc`, which lists the options.

    python benchmarks/rpc.py [--quick] [--json] [--plot FILE.png] [--peer vllm=PYTHON]

How each transport does its part is said in its file, in `hardpoint_engine/bench/transports`.
"""

from __future__ import annotations

import sys

from hardpoint.cli import main

if __name__ == "__main__":
    main(["bench", "rpc", *sys.argv[1:]])
