"""Tokens per second of the cpu platform in every format of weights, beside vLLM, transformers and
llama.cpp with the same weights, in one run. The same as `hardpoint bench cpu`, which lists the
options.

    python benchmarks/cpu.py [--formats bf16,w8a8] [--peer vllm=PYTHON] [--json] [--plot FILE.png]

`peers.py` makes the interpreters. How each engine does its part is said in its file, in
`hardpoint_engine/bench/serving_engines`.
"""

from __future__ import annotations

import sys

from hardpoint.cli import main

if __name__ == "__main__":
    main(["bench", "cpu", *sys.argv[1:]])
