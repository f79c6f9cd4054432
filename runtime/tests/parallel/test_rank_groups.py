"""Which ranks belong together."""

from __future__ import annotations

import pytest
from hardpoint.config.schema import ParallelConfig
from hardpoint.errors import ConfigError
from hardpoint_runtime.parallel.groups import Axis, Place, Topology
from hypothesis import given
from hypothesis import strategies as st

TABLE = [
    # two copies of two stages of two shards, as drawn on paper
    (Axis.TENSOR, ((0, 1), (2, 3), (4, 5), (6, 7))),
    (Axis.PIPELINE, ((0, 2), (1, 3), (4, 6), (5, 7))),
    (Axis.DATA, ((0, 4), (1, 5), (2, 6), (3, 7))),
    (Axis.CONTEXT, tuple((rank,) for rank in range(8))),
    (Axis.EXPERT, ((0, 1, 4, 5), (2, 3, 6, 7))),
    (Axis.WORLD, (tuple(range(8)),)),
]


@pytest.mark.parametrize(("axis", "expected"), TABLE, ids=[row[0].value for row in TABLE])
def test_the_groups_of_eight_ranks(axis, expected):
    topology = Topology(tensor=2, pipeline=2, data=2)
    assert tuple(group.ranks for group in topology.groups(axis)) == expected
    assert [group.index for group in topology.groups(axis)] == list(range(len(expected)))


def test_context_shards_come_between_tensor_shards_and_stages():
    topology = Topology(tensor=2, context=3, pipeline=2)
    assert topology.group_of(Axis.CONTEXT, 3).ranks == (1, 3, 5)
    assert topology.group_of(Axis.PIPELINE, 3).ranks == (3, 9)
    assert topology.group_of(Axis.TENSOR, 3).ranks == (2, 3)


sizes = st.integers(1, 4)
topologies = st.builds(Topology, tensor=sizes, context=sizes, pipeline=sizes, data=sizes)


@given(topologies)
def test_every_axis_divides_the_world(topology):
    for axis in Axis:
        groups = topology.groups(axis)
        members = sorted(rank for group in groups for rank in group.ranks)
        assert members == list(range(topology.size))
        assert len({len(group.ranks) for group in groups}) == 1
        assert len({group.name for group in groups}) == len(groups)


@given(topologies)
def test_a_group_differs_along_its_axis_only(topology):
    moving = {Axis.TENSOR: "tensor", Axis.PIPELINE: "pipeline", Axis.DATA: "data"}
    for axis, name in moving.items():
        for group in topology.groups(axis):
            places = [topology.place_of(rank) for rank in group.ranks]
            assert [getattr(place, name) for place in places] == list(range(len(places)))
            others = set(moving.values()) - {name} | {"context"}
            assert all(len({getattr(p, other) for p in places}) == 1 for other in others)


@given(topologies, st.data())
def test_places_and_ranks_are_each_others_inverse(topology, data):
    rank = data.draw(st.integers(0, topology.size - 1))
    assert topology.rank_of(topology.place_of(rank)) == rank
    assert rank in topology.group_of(Axis.TENSOR, rank).ranks


def test_the_tensor_shard_changes_fastest():
    topology = Topology.of(ParallelConfig(tensor_parallel_size=3, pipeline_parallel_size=2))
    assert topology.size == 6
    assert topology.place_of(4) == Place(tensor=1, pipeline=1)


def test_a_rank_outside_the_world_and_an_empty_axis_are_errors():
    with pytest.raises(ConfigError, match="rank 2 is not in a world of 2"):
        Topology(tensor=2).group_of(Axis.TENSOR, 2)
    with pytest.raises(ConfigError, match="a world of 0 along the axis pipeline"):
        Topology(pipeline=0)
