"""Two logical nodes of Ray on this host, for tests: prints their address; ``remove`` on its input
has the second one go, ``end`` or its end both.

Its arguments are a folder, in which is the token, and how many workers each node can hold.
"""

import os
import sys
from pathlib import Path

folder, count = Path(sys.argv[1]), int(sys.argv[2])
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TEST_OF_NODE"] = "its own"
os.environ["RAY_TMPDIR"] = str(folder)  # below it their address is told: nobody else joins them
(folder / "ray").mkdir(exist_ok=True)

from ray.cluster_utils import Cluster  # noqa: E402

node = {
    "num_cpus": count,
    "resources": {"dummy": count},
    "object_store_memory": 80 << 20,
    "temp_dir": str(folder),
}
cluster = Cluster(head_node_args={**node, "include_dashboard": False}, initialize_head=True)
second = cluster.add_node(**node)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "remove":
        cluster.remove_node(second, allow_graceful=False)
        print("removed", flush=True)
    else:
        break
cluster.shutdown()
