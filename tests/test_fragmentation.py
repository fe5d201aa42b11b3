"""What is learned from requests, and what follows: worth of gaps, waste, pressure on models."""

from __future__ import annotations

import numpy as np
import pytest

from jupyter_gpupool.core import fragmentation
from jupyter_gpupool.core.demand import PRIOR, Demand, Shape
from jupyter_gpupool.core.fragmentation import STEPS, WEIGHT, gap_worth, pressure, usual, waste
from jupyter_gpupool.core.model import GIB, MIB, WHOLE
from tests.placing import cluster_of, node, parts_of, request, take

HOST = np.array([64_000]), np.array([400_000])


def wasted(free, demand, cpus=HOST[0], memory=HOST[1]):
    """Waste of one node in thousandths."""
    found = waste(usual(tuple(demand), 80 * GIB, 8), np.array([free]), cpus, memory)[0]
    return found / (4 * WEIGHT)


# ------------------------------------------------------------------------------------------------- waste


@pytest.mark.parametrize(
    ("free", "shape", "thousandths"),
    [
        pytest.param([1000, 1000], Shape(1, 1000, 0, 0, 0), 0, id="nothing where all can be used"),
        pytest.param(
            [1000, 400], Shape(1, 1000, 0, 0, 0), 400, id="a broken device, to who wants whole ones"
        ),
        pytest.param([1000, 400], Shape(1, 500, 0, 0, 0), 400, id="a gap that is too small for a share"),
        pytest.param([1000, 600], Shape(1, 500, 0, 0, 0), 0, id="a gap that it fits in"),
        pytest.param([1000, 1000], Shape(4, 1000, 0, 0, 0), 2000, id="all, to a gang that finds no room"),
        pytest.param([1000, 1000], Shape(1, 1000, 0, 65_000, 0), 2000, id="all, where the CPUs do not do"),
        pytest.param([1000, 1000], Shape(1, 1000, 0, 64_000, 0), 250, id="a quarter of what CPUs leave over"),
        pytest.param([1000, 400], Shape(1, 0, 40 * GIB, 0, 0), 400, id="shares of memory likewise"),
    ],
)
def test_waste_is_what_a_usual_request_cannot_use(free, shape, thousandths):
    assert wasted(free, [(shape, 1)]) == thousandths


def test_waste_is_averaged_over_what_is_asked_for():
    both = [(Shape(1, 1000, 0, 0, 0), 3), (Shape(1, 500, 0, 0, 0), 1)]
    assert wasted([600, 1000], both) == 600 * 3 / 4


def test_a_node_without_free_cpus_is_wasted_only_on_who_needs_some():
    none = np.array([0]), np.array([0])
    assert wasted([1000], [(Shape(1, 1000, 0, 0, 0), 1)], *none) == 0
    assert wasted([1000], [(Shape(1, 1000, 0, 1, 0), 1)], *none) == 1000
    assert wasted([1000], [(Shape(1, 1000, 0, 1, 0), 1)], np.array([-5]), np.array([-5])) == 1000


# ------------------------------------------------------------------------------------------------- worth

SHARES = (
    ((50, 1),),
    ((81, 10), (47, 7), (32, 3), (65, 2), (16, 1)),
    ((10, 1), (20, 5), (30, 2), (90, 9)),
    (),
)


@pytest.mark.parametrize("shares", SHARES)
def test_the_worth_of_a_gap_grows_with_it_and_two_are_never_worth_more_than_one(shares):
    worth = gap_worth(shares)
    assert worth[0] == 0
    assert worth[STEPS] <= WHOLE
    assert (np.diff(worth) >= 0).all()
    for one in range(STEPS + 1):
        assert (worth[one] + worth[: STEPS + 1 - one] <= worth[one:]).all()


def test_measures_never_make_more_of_what_fits_on_one_device():
    """Dual feasible functions: shares that fit together measure at most a whole device together."""
    for measure in fragmentation._measures():
        most = [0] * (STEPS + 1)
        for room in range(1, STEPS + 1):
            most[room] = max(measure[size] + most[room - size] for size in range(1, room + 1))
        assert most[STEPS] <= WHOLE


def test_a_gap_that_no_usual_share_fits_is_worth_nothing():
    worth = gap_worth(((81, 10), (47, 7)))
    assert worth[46] == 0
    assert worth[47] == worth[53] == WHOLE // 2
    assert worth[94] == WHOLE


# ---------------------------------------------------------------------------------------------- pressure


def test_pressure_is_what_may_come_over_what_is_free():
    only, both = frozenset({1}), frozenset({1, 2})
    found = pressure({only: 1, both: 1}, {1: 10_000, 2: 30_000})
    # Half of what comes (20,000) can only go to model 1; the rest spreads over both.
    assert found == {1: 2000 + 500, 2: 500}


def test_who_can_go_elsewhere_keeps_off_the_model_that_others_need():
    cluster = cluster_of(node("a", 4, "A100-40GB"), node("h", 4))
    take(cluster, "x", node="a", count=2)
    assert parts_of(cluster)[0].node == "a"
    for _ in range(64):
        cluster.demand.observe(request(model="A100-40GB"))
    assert parts_of(cluster)[0].node == "h"
    assert parts_of(cluster, model="A100-40GB")[0].node == "a"


# ------------------------------------------------------------------------------------------------ demand


def test_before_anything_is_asked_for_a_prior_counts():
    assert dict(Demand().usual) == dict(PRIOR)


def test_what_is_asked_for_is_put_to_use_at_fixed_counts():
    demand, changes = Demand(), []
    for number in range(1, 40):
        demand.observe(request(count=3))
        if demand.generation > len(changes):
            changes.append(number)
    assert changes == [8, 16, 32]
    assert dict(demand.usual)[Shape(3, WHOLE, 0, 0, 0)] == 32


def test_what_was_asked_for_long_ago_counts_less():
    demand = Demand()
    for count in (3, 5):
        for _ in range(4096):
            demand.observe(request(count=count))
    counts = dict(demand.usual)
    assert counts[Shape(5, WHOLE, 0, 0, 0)] > 4 * counts[Shape(3, WHOLE, 0, 0, 0)]


def test_a_shape_is_what_matters_to_others():
    demand = Demand()
    for number in range(8):
        demand.observe(request(name=f"n{number}", milli=300, count=2, cpus=2000, memory=MIB + 1, model="b|a"))
    assert dict(demand.usual)[Shape(1, 300, 0, 2000, 2, ("a", "b"))] == 8


def test_room_for_usual_gangs_is_kept():
    cluster = cluster_of(node("a", 8), node("b", 8))
    for _ in range(64):
        cluster.demand.observe(request(count=4))
    take(cluster, "x", node="a", count=3)
    take(cluster, "y", node="b", count=4)
    # a has 5 free and b has 4: one more on a leaves 4 and 4, on b 5 and 3.
    assert parts_of(cluster)[0].node == "a"


def test_a_share_goes_where_the_rest_can_still_be_used():
    cluster = cluster_of(node("a", 4))
    for _ in range(64):
        for milli in (810, 470, 470, 160):
            cluster.demand.observe(request(milli=milli))
    large = take(cluster, "x", milli=810)[0].device
    half = take(cluster, "y", milli=470)[0].device
    assert half != large
    assert parts_of(cluster, milli=470)[0].device == half
    assert parts_of(cluster, milli=160)[0].device == large
