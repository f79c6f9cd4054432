"""Calls of all workers beside other ways to make them, in one run; also ``hardpoint bench rpc``.

python benchmarks/rpc.py [--quick] [--json] [--plot FILE.png]
"""

from __future__ import annotations

from hardpoint_engine.cli.bench_command import bench

if __name__ == "__main__":
    bench(["rpc"])
