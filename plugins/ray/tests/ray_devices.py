"""A driver for tests of what Ray assigns: two actors that each take two of its devices say which
these are, and what a platform reads off that in their processes, a JSON line each.
"""

import json
import shutil
import tempfile

import ray
from hardpoint_ray.actor import WorkerActor
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Owner(WorkerActor):
    def read(self):
        resources = self.where().resources
        return resources["GPU"], Devices().assigned_devices(resources)


class Devices(AcceleratorPlatform):
    masks = ("CUDA_VISIBLE_DEVICES",)
    __init__ = object.__init__  # which looks for no device

    def look(self):
        raise NotImplementedError


folder = tempfile.mkdtemp(prefix="hp-ray-", dir="/tmp")
ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, _temp_dir=folder)
group = placement_group([{"GPU": 2}, {"GPU": 2}])
assert group.wait(120)
for bundle in (0, 1):
    beside = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    owner = ray.remote(num_cpus=0, num_gpus=2)(Owner)
    actor = owner.options(scheduling_strategy=beside).remote(f"owner {bundle}")
    print(json.dumps(ray.get(actor.read.remote(), timeout=300)), flush=True)
ray.shutdown()
shutil.rmtree(folder, ignore_errors=True)
