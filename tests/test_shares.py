"""Deserved shares, usage and order as arithmetic: sentences of the specification over small values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.core.model import ANY, DAY, HOUR, WHOLE, Project, Reason, UserShare
from jupyter_gpupool.core.quotas import check, effective
from jupyter_gpupool.core.shares import Decay, Want, deserved
from jupyter_gpupool.core.tree import Tree


def shares(total, *wants):
    return deserved(total, [Want(f"t{number}", *each) for number, each in enumerate(wants)])


H = "H100-80GB"
#: Eight GPUs, two of them of another model.
POOL = {ANY: 8 * WHOLE, H: 6 * WHOLE, "A100-40GB": 2 * WHOLE}


class TestDeserved:
    @pytest.mark.parametrize(
        ("total", "wants", "expected"),
        [
            pytest.param(
                8000, [(4000, 2000), (4000, 9000)], [2000, 6000], id="what one does not want, others get"
            ),
            pytest.param(8000, [(4000, 9000), (2000, 9000)], [5000, 3000], id="quotas first, then alike"),
            pytest.param(9000, [(0, 9000, 2), (0, 9000, 1)], [6000, 3000], id="the surplus goes by weight"),
            pytest.param(
                8000,
                [(0, 9000, 1, 0), (0, 3000, 1, 1)],
                [5000, 3000],
                id="a higher tier comes first in the surplus",
            ),
            pytest.param(
                4000,
                [(3000, 9000, 1, 0), (0, 9000, 1, 1)],
                [3000, 1000],
                id="a tier never goes before a quota",
            ),
            pytest.param(
                10_000, [(0, 9000)] * 3, [4000, 3000, 3000], id="whole GPUs, largest remainder first"
            ),
            pytest.param(1000, [(0, 5000), (0, 2500)], [500, 500], id="halves where halves are asked for"),
            pytest.param(
                3000, [(4000, 4000), (2000, 9000)], [2000, 1000], id="quotas shrink alike when GPUs are lost"
            ),
            pytest.param(
                4000, [(0, 9000, 0), (0, 3000, 1)], [1000, 3000], id="a weight of nothing gets what is left"
            ),
            pytest.param(281_000, [(18_000, 10**6)] * 15, None, id="nothing of 281 GPUs is lost among 15"),
        ],
    )
    def test_shares_are_given_out_in_whole_gpus(self, total, wants, expected):
        found = shares(total, *wants)
        assert sum(found) == min(total, sum(each[1] for each in wants))
        if expected:
            assert found == expected

    @given(
        st.integers(0, 20).map(lambda count: count * WHOLE),
        st.lists(
            st.tuples(
                st.integers(0, 6).map(lambda count: count * WHOLE),
                st.integers(0, 40).map(lambda count: count * 250),
                st.integers(0, 3),
                st.integers(0, 2),
            ),
            max_size=6,
        ),
    )
    def test_nothing_is_lost_nobody_gets_more_than_they_want_and_quotas_are_kept(self, total, wants):
        found = shares(total, *wants)
        assert sum(found) == min(total, sum(each[1] for each in wants))
        for share, (quota, demand, *_) in zip(found, wants, strict=True):
            assert 0 <= share <= demand
            if sum(min(each[0], each[1]) for each in wants) <= total:
                assert share >= min(quota, demand)

    @given(
        st.integers(1, 12),
        st.lists(st.tuples(st.just(0), st.integers(1, 9), st.integers(1, 3)), min_size=2, max_size=5),
        st.data(),
    )
    def test_who_wants_more_than_they_deserve_changes_nothing_by_wanting_still_more(self, gpus, wants, data):
        wants = [(quota, demand * WHOLE, weight) for quota, demand, weight in wants]
        found = shares(gpus * WHOLE, *wants)
        hungry = [at for at, (_, demand, _) in enumerate(wants) if found[at] < demand]
        if hungry:
            at = data.draw(st.sampled_from(hungry))
            quota, demand, weight = wants[at]
            wants[at] = (quota, demand + 5 * WHOLE, weight)
            assert shares(gpus * WHOLE, *wants) == found


class TestDecay:
    def test_a_half_life_doubles_the_weight_of_a_second_exactly(self):
        decay = Decay(7 * DAY)
        assert [decay.at(7 * DAY * lives) // decay.at(0) for lives in range(4)] == [1, 2, 4, 8]

    def test_a_usage_is_worth_half_after_a_half_life(self):
        decay = Decay(DAY)
        used = 1000 * (decay.at(HOUR) - decay.at(0))
        now, later = decay.worth(used, HOUR), decay.worth(used, HOUR + DAY)
        assert abs(now - 1000 * HOUR) < 1000 * HOUR // 50
        assert abs(2 * later - now) <= 2

    def test_the_order_of_two_usages_does_not_depend_on_when_they_are_compared(self):
        decay = Decay(DAY)
        old = 4000 * (decay.at(HOUR) - decay.at(0))
        new = 1000 * (decay.at(3 * DAY + HOUR) - decay.at(3 * DAY))
        for when in (3 * DAY + HOUR, 9 * DAY, 60 * DAY):
            assert (decay.worth(old, when) < decay.worth(new, when)) or old < new

    def test_a_new_epoch_changes_no_order(self):
        tree = Tree((Project(name="a"), Project(name="b")), Decay(HOUR))
        one, other = tree.user("a", "ann"), tree.user("b", "ben")
        tree.meter(one, 2000, 0)
        tree.meter(other, 1000, 0)
        now = 65 * HOUR
        tree.meter(one, -2000, now)
        tree.meter(other, -1000, now)
        before = [tree.worth(each, now) for each in (one, other)]
        assert tree.decay.stale(now)
        tree.renew()
        assert not tree.decay.stale(now)
        after = [tree.worth(each, now) for each in (one, other)]
        assert all(abs(a - b) <= a // 10**6 for a, b in zip(before, after, strict=True))

    def test_long_numbers_can_be_written_as_json(self):
        assert json.loads(json.dumps(Decay(HOUR).at(60 * HOUR))) == Decay(HOUR).at(60 * HOUR)


class TestTree:
    def tree(self, *projects):
        tree = Tree(projects, Decay(DAY))
        tree.capacity({ANY: 12 * WHOLE})
        return tree

    def ask(self, tree, project, user, gpus):
        tree.ask(tree.user(project, user), f"{project}/{user}", ((ANY, gpus * WHOLE),))

    def share(self, tree, project, user):
        tree.refresh()
        return tree.user(project, user).share[ANY] // WHOLE

    def test_shares_are_given_out_level_by_level(self):
        tree = self.tree(
            Project(name="a", quota=((ANY, 8 * WHOLE),)),
            Project(name="a1", parent="a", weight=3),
            Project(name="a2", parent="a", weight=1),
            Project(name="b"),
        )
        for project, user in (("a1", "ann"), ("a2", "ben"), ("b", "cat")):
            self.ask(tree, project, user, 20)
        assert [self.share(tree, *who) for who in (("a1", "ann"), ("a2", "ben"), ("b", "cat"))] == [8, 2, 2]

    def test_users_are_leaves_with_numbers_of_their_own(self):
        users = (UserShare(name="ann", quota=((ANY, 4 * WHOLE),)), UserShare(name="ben", weight=3))
        tree = self.tree(Project(name="a", users=users))
        for user in ("ann", "ben", "cat"):
            self.ask(tree, "a", user, 20)
        assert [self.share(tree, "a", user) for user in ("ann", "ben", "cat")] == [6, 5, 1]

    def test_a_limit_caps_a_demand_so_that_nothing_is_kept_for_who_may_not_have_it(self):
        tree = self.tree(Project(name="a", limit=((ANY, 2 * WHOLE),)), Project(name="b"))
        self.ask(tree, "a", "ann", 20)
        self.ask(tree, "b", "ben", 20)
        assert (self.share(tree, "a", "ann"), self.share(tree, "b", "ben")) == (2, 10)

    def test_models_are_shared_out_where_there_are_several(self):
        tree = Tree((Project(name="a"), Project(name="b", quota=(("A", 3 * WHOLE),))), Decay(DAY))
        tree.capacity({ANY: 8 * WHOLE, "A": 4 * WHOLE, "B": 4 * WHOLE})
        for project, user in (("a", "ann"), ("b", "ben")):
            tree.ask(tree.user(project, user), user, ((ANY, 4 * WHOLE), ("A", 4 * WHOLE)))
        tree.refresh()
        assert [tree.user(*who).share["A"] // WHOLE for who in (("a", "ann"), ("b", "ben"))] == [1, 3]


class TestCheck:
    @pytest.mark.parametrize(
        ("projects", "reason"),
        [
            pytest.param(
                (Project(name="a"), Project(name="a")), Reason.BAD_REQUEST, id="twice the same name"
            ),
            pytest.param((Project(name="a", parent="x"),), Reason.BAD_REQUEST, id="below what is no project"),
            pytest.param(
                (Project(name="a", parent="b"), Project(name="b", parent="a")),
                Reason.BAD_REQUEST,
                id="a circle",
            ),
            pytest.param((Project(name="a/b"),), Reason.BAD_REQUEST, id="a slash in the name"),
            pytest.param(
                (Project(name="a", quota=((ANY, 9 * WHOLE),)),), Reason.QUOTA_SUM, id="above the pool"
            ),
            pytest.param(
                (
                    Project(
                        name="a",
                        quota=((ANY, WHOLE),),
                        users=(UserShare(name="u", quota=((ANY, 2 * WHOLE),)),),
                    ),
                ),
                Reason.QUOTA_SUM,
                id="a user above the project",
            ),
            pytest.param(
                tuple(
                    Project(name=f"p{n}", parent="" if n < 2 else "p0", quota=((ANY, 3 * WHOLE),))
                    for n in range(4)
                ),
                Reason.QUOTA_SUM,
                id="children together above their parent",
            ),
            pytest.param(
                (Project(name="a", quota=(("A100-40GB", 4 * WHOLE),)),),
                Reason.QUOTA_SUM,
                id="a model that the pool has too few of",
            ),
            pytest.param(
                (Project(name="a", quota=((ANY, 4 * WHOLE),)), Project(name="b", quota=((H, 5 * WHOLE),))),
                Reason.QUOTA_SUM,
                id="any GPUs and those of a model together above the pool",
            ),
            pytest.param(
                (Project(name="a", quota=((ANY, WHOLE), (H, 2 * WHOLE))),),
                Reason.QUOTA_SUM,
                id="of a model more than of all",
            ),
            pytest.param(
                (
                    Project(name="a", quota=((H, 2 * WHOLE),)),
                    Project(name="b", parent="a", quota=(("A100-40GB", WHOLE),)),
                ),
                Reason.QUOTA_SUM,
                id="of a model that its parent is not guaranteed",
            ),
        ],
    )
    def test_a_tree_that_does_not_add_up_is_refused(self, projects, reason):
        assert {each.reason for each in check(projects, POOL)} == {reason}

    def test_quotas_of_any_gpus_and_of_models_that_fit_are_taken(self):
        projects = (
            Project(name="a", users=(UserShare(name="u", quota=((H, WHOLE),)),)),
            Project(name="b", parent="a", quota=((ANY, 2 * WHOLE),)),
            Project(name="c", quota=((ANY, 4 * WHOLE), ("A100-40GB", 2 * WHOLE))),
            Project(name="d", parent="c", quota=(("A100-40GB", 2 * WHOLE), (H, WHOLE))),
        )
        assert check(projects, POOL) == ()
        assert effective(projects)["a"] == {ANY: 3 * WHOLE, H: WHOLE}

    def test_a_project_without_a_quota_has_that_of_those_below_it(self):
        projects = (
            Project(name="a"),
            Project(name="b", parent="a", quota=((ANY, 5 * WHOLE),)),
            Project(name="c", quota=((ANY, 4 * WHOLE),)),
        )
        assert "9 GPUs, above the 8" in check(projects, {ANY: 8 * WHOLE})[0].sentence

    def test_before_any_node_has_joined_only_the_tree_itself_is_checked(self):
        assert check((Project(name="a", quota=((ANY, 9 * WHOLE),)),), {}) == ()
