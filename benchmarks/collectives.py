"""How long ranks of one host take to exchange tensors: shared memory beside gloo, in one run.

Processes take turns, round by round, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time

KINDS = ("shared_memory", "gloo")
OPERATIONS = {
    "all_reduce 1 x 576": lambda c, t: c.all_reduce(t[:1, :576]),
    "all_reduce 64 x 576": lambda c, t: c.all_reduce(t[:64, :576]),
    "all_reduce 1024 x 576": lambda c, t: c.all_reduce(t[:1024, :576]),
    "all_gather 1 x 49152": lambda c, t: c.all_gather(
        t.view(1, -1)[:, : 49152 // c.size].contiguous(), [49152 // c.size] * c.size, -1
    ),
}


def rank_of(rank, size, addresses, rounds, calls, results):
    import torch
    from hardpoint_runtime.parallel.communicator import Meeting
    from hardpoint_runtime.parallel.groups import Axis, Topology
    from hardpoint_runtime.parallel.host import host_communicator

    torch.set_num_threads(1)
    group = Topology(tensor=size).group_of(Axis.TENSOR, rank)
    groups = {
        kind: host_communicator(group, Meeting(rank=rank, rendezvous=address), kind)
        for kind, address in addresses.items()
    }
    tensor = torch.ones(1024, 576)
    times = {}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, operation in OPERATIONS.items():
                for kind, communicator in groups.items():
                    communicator.barrier()
                    begun = time.perf_counter()
                    for _ in range(calls):
                        operation(communicator, tensor)
                    took = (time.perf_counter() - begun) / calls * 1e6
                    times.setdefault((name, kind), []).append(took)
    if rank == 0:
        results.put({key: statistics.median(values) for key, values in times.items()})


def measure(size, rounds, calls):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    descriptors = {kind: os.memfd_create(f"collectives-{kind}") for kind in KINDS}
    addresses = {kind: f"file:///proc/self/fd/{number}" for kind, number in descriptors.items()}
    processes = [
        context.Process(target=rank_of, args=(rank, size, addresses, rounds, calls, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = results.get()
    for process in processes:
        process.join()
    for number in descriptors.values():
        os.close(number)
    return [
        {"workers": size, "operation": name, "transport": kind, "median_us": round(median, 1)}
        for (name, kind), median in found.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="operations in a row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for size in options.workers for row in measure(size, options.rounds, options.calls)]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    by_case = {(r["workers"], r["operation"], r["transport"]): r["median_us"] for r in rows}
    print(f"{'workers':>7}  {'operation':22}  {'shared memory':>13}  {'gloo':>10}  ratio")
    for (size, name, kind), ours in by_case.items():
        if kind == KINDS[0]:
            gloo = by_case[size, name, KINDS[1]]
            print(f"{size:7}  {name:22}  {ours:10.1f} us  {gloo:7.1f} us  {gloo / ours:5.1f}")


if __name__ == "__main__":
    main()
