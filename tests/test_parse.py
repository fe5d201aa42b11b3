"""Requests as people write them: what each becomes, and the one sentence where it is wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool import commands
from jupyter_gpupool.client import RequestOptions
from jupyter_gpupool.controller import fields
from jupyter_gpupool.controller.parse import CHANGE, OPTIONS, REQUEST, Asker, parse_change, parse_request
from jupyter_gpupool.controller.plugin import options
from jupyter_gpupool.controller.tree import DEFAULTS, PROJECT, parse_config
from jupyter_gpupool.core.model import HOUR, MINUTE, Defaults, Project, Reason, Request, UserShare
from jupyter_gpupool.lease import host

ASKER = Asker(id="r1", user="ann", now=5, project="", name="lease-1")
PLAIN = {"id": "r1", "user": "ann", "project": "", "name": "lease-1", "arrived": 5}


def parsed(**body):
    request, wrong = parse_request(body, ASKER)
    assert wrong == []
    return request


def refused(body):
    """The refusals of a body; each is one sentence, with its field."""
    request, wrong = parse_request(body, ASKER)
    assert request is None
    for each in wrong:
        assert each.sentence[-1] in ".?", each
        assert len(each.sentence) < 250
    return wrong


GOOD = {
    "nothing at all is one whole GPU": ({}, {}),
    "a whole number of GPUs": ({"gpus": 2}, {"count": 2}),
    "the same as text": ({"gpus": "2"}, {"count": 2}),
    "the same with a point": ({"gpus": 2.0}, {"count": 2}),
    "the same as text with a point": ({"gpus": " 2.0 "}, {"count": 2}),
    "half a GPU": ({"gpus": 0.5}, {"milli": 500}),
    "half a GPU as text": ({"gpus": "0.5"}, {"milli": 500}),
    "a tenth, exactly": ({"gpus": 0.1}, {"milli": 100}),
    "a third, to the nearest thousandth": ({"gpus": 1 / 3}, {"milli": 333}),
    "an elastic lease": ({"gpus": 1, "max_gpus": 8}, {"count": 1, "max_count": 8}),
    "one that may shrink": ({"gpus": 4, "min_gpus": 2}, {"count": 4, "min_count": 2}),
    "a share by its memory": ({"vram": "20GB"}, {"milli": 0, "vram": 20 * 10**9}),
    "memory in binary units": ({"vram": "20GiB"}, {"milli": 0, "vram": 20 * 2**30}),
    "a share by both": ({"gpus": 0.25, "vram": "30 GB"}, {"milli": 250, "vram": 30 * 10**9}),
    "two shares": ({"gpus": 2, "vram": "9GB"}, {"count": 2, "milli": 0, "vram": 9 * 10**9}),
    "a MIG instance": ({"mig": "1g.10gb"}, {"milli": 0, "mig": "1g.10gb"}),
    "an isolated share": (
        {"vram": "9GB", "isolated": True},
        {"milli": 0, "vram": 9 * 10**9, "isolated": True},
    ),
    "hours": ({"time_limit": "2h"}, {"time_limit": 2 * HOUR}),
    "hours and minutes": ({"time_limit": "1h30m"}, {"time_limit": 90 * MINUTE}),
    "hours and minutes, spaced": ({"time_limit": "1h 30 min"}, {"time_limit": 90 * MINUTE}),
    "seconds of a line": ({"time_limit": "60"}, {"time_limit": MINUTE}),
    "seconds": ({"time_limit": 90}, {"time_limit": 90_000}),
    "a part of a second": ({"time_limit": 0.5}, {"time_limit": 500}),
    "no idle time-out": ({"idle_timeout": "never"}, {"idle_timeout": -1}),
    "an idle time-out": ({"idle_timeout": "20m"}, {"idle_timeout": 20 * MINUTE}),
    "host CPUs and memory": ({"cpus": 2.5, "memory": "64GB"}, {"cpus": 2500, "memory": 64 * 10**9}),
    "one node to keep away from": ({"exclude": "node-1"}, {"exclude": ("node-1",)}),
    "several": ({"exclude": ["node-1", "GPU-1"]}, {"exclude": ("node-1", "GPU-1")}),
    "null is the same as not there": ({"gpus": None, "model": None}, {}),
    "what needs no reading": (
        {
            "model": "H100-80GB",
            "same_node": True,
            "nvlink": False,
            "priority": -3,
            "name": "my.run_1",
            "project": "p",
        },
        {"model": "H100-80GB", "same_node": True, "priority": -3, "name": "my.run_1", "project": "p"},
    ),
    "what the pool does not look at": (
        {"environment": {"variables": {"A": 1}, "pre_import": "torch"}, "options": {"rmm_pool_size": "10GB"}},
        {
            "options": json.dumps(
                {
                    "environment": {"pre_import": ["torch"], "variables": {"A": "1"}},
                    "options": {"rmm_pool_size": 10**10},
                }
            )
        },
    ),
}


@pytest.mark.parametrize(("body", "expected"), GOOD.values(), ids=GOOD)
def test_a_good_request_becomes_the_cores_integers(body, expected):
    assert parsed(**body) == Request(**{**PLAIN, **expected})


#: What is asked for -> the whole of what is said: sentence, then what to do.
BAD = {
    "no GPU": (
        {"gpus": 0},
        "0 GPUs cannot be granted: a request is for more than none.",
        "Ask for 1 or more whole GPUs, or for a share of one, such as 0.5.",
    ),
    "less than none": (
        {"gpus": -2},
        "-2 GPUs cannot be granted: a request is for more than none.",
        "Ask for 1 or more whole GPUs, or for a share of one, such as 0.5.",
    ),
    "a fraction above one": (
        {"gpus": 1.5},
        "1.5 GPUs cannot be granted: more than one GPU comes in whole ones only.",
        "Ask for gpus=1 or gpus=2, or for a share of one GPU, such as gpus=0.5.",
    ),
    "a fraction above one as text": (
        {"gpus": "2.5"},
        "'2.5' GPUs cannot be granted: more than one GPU comes in whole ones only.",
        "Ask for gpus=2 or gpus=3, or for a share of one GPU, such as gpus=0.5.",
    ),
    "a word": (
        {"gpus": "two"},
        "'two' is not a number of GPUs.",
        "Give a number, such as 2 for whole GPUs or 0.5 for a share of one.",
    ),
    "a truth": (
        {"gpus": True},
        "True is not a number of GPUs.",
        "Give a number, such as 2 for whole GPUs or 0.5 for a share of one.",
    ),
    "a quotient": (
        {"gpus": "1/2"},
        "'1/2' is not a number of GPUs.",
        "Give a number, such as 2 for whole GPUs or 0.5 for a share of one.",
    ),
    "a list": (
        {"gpus": [1]},
        "[1] is not a number of GPUs.",
        "Give a number, such as 2 for whole GPUs or 0.5 for a share of one.",
    ),
    "next to nothing": (
        {"gpus": 0.0001},
        "0.0001 of a GPU is less than a thousandth.",
        "Ask for at least 0.001.",
    ),
    "more than any pool has": (
        {"gpus": 1e12},
        "1000000000000.0 GPUs are more than any pool has.",
        "Ask for fewer.",
    ),
    "a most below the least": (
        {"gpus": 4, "max_gpus": 2},
        "max_gpus=2 is less than gpus=4.",
        "Leave max_gpus out, or give 4 or more.",
    ),
    "a least above the least": (
        {"gpus": 1, "min_gpus": 2},
        "min_gpus=2 is more than gpus=1.",
        "Leave min_gpus out, or give 1 or less.",
    ),
    "a share that grows": (
        {"gpus": 0.5, "max_gpus": 2},
        "A share of one GPU does not grow.",
        "Leave max_gpus out, or ask for whole GPUs.",
    ),
    "a broken most": (
        {"max_gpus": 1.5},
        "1.5 GPUs cannot be granted: more than one GPU comes in whole ones only.",
        None,
    ),
    "half a most": (
        {"max_gpus": 0.5},
        "max_gpus=0.5 is not a whole number of GPUs.",
        "Give max_gpus=1 or more.",
    ),
    "a forgotten unit": (
        {"vram": 20},
        "20 is 20 bytes, too little memory for anything.",
        "Did you mean 20GB?",
    ),
    "a forgotten unit as text": (
        {"vram": "20"},
        "'20' is 20 bytes, too little memory for anything.",
        "Did you mean 20GB?",
    ),
    "no memory": (
        {"vram": "0GB"},
        "'0GB' of memory cannot be granted.",
        "Ask for more than none, such as 20GB.",
    ),
    "negative memory": (
        {"memory": "-1GB"},
        "'-1GB' of memory cannot be granted.",
        "Ask for more than none, such as 20GB.",
    ),
    "an unknown unit": (
        {"vram": "20 gig"},
        "'20 gig' is not an amount of memory.",
        "Give one with its unit, such as 20GB.",
    ),
    "a profile and memory": (
        {"mig": "1g.10gb", "vram": "9GB"},
        "A MIG profile says its memory itself.",
        "Leave out vram, or give vram with isolated=true instead of mig.",
    ),
    "half a profile": (
        {"mig": "1g.10gb", "gpus": 0.5},
        "A MIG profile says its size itself; gpus counts such instances.",
        "Leave out gpus or mig.",
    ),
    "isolated from what": (
        {"isolated": True},
        "isolated=true does not say how much memory the instance must have.",
        "Give vram too, such as vram='9GB'.",
    ),
    "no length of time": (
        {"time_limit": "soon"},
        "'soon' is not a length of time.",
        "Give one with its unit, such as 2h or 30m, or seconds.",
    ),
    "no unit": ({"time_limit": "2"}, "'2' has no unit.", "Did you mean 2h, 2m or 2s?"),
    "no time": ({"time_limit": 0}, "0 is no time at all.", "Give a time above zero, such as 2h."),
    "time that is over": (
        {"time_limit": "-2h"},
        "'-2h' is no time at all.",
        "Give a time above zero, such as 2h.",
    ),
    "for ever": (
        {"time_limit": "1000000d"},
        "'1000000d' is longer than any pool lives.",
        "Give a shorter time.",
    ),
    "a truth that is a word": (
        {"same_node": "yes"},
        "same_node='yes' is neither true nor false.",
        "Give same_node=true or same_node=false.",
    ),
    "a name with a slash": (
        {"name": "a/b"},
        "'a/b' cannot be the name of a lease.",
        "Use up to 63 letters, digits, dots, dashes and underscores, a letter or digit first.",
    ),
    "a priority out of reach": (
        {"priority": 1000},
        "priority=1000 is not a whole number from -100 to 100.",
        "",
    ),
    "no CPUs": (
        {"cpus": 0},
        "0 CPUs cannot be given to a worker.",
        "Ask for more than none, such as cpus=4.",
    ),
    "a model that is a number": (
        {"model": 5},
        "model is not a text of 1 to 256 printable characters: 5.",
        "",
    ),
    "a misspelt field": ({"gpu": 2}, "There is no field 'gpu'.", "Did you mean gpus?"),
    "a misspelt field of the environment": (
        {"environment": {"pyton": "x"}},
        "There is no field 'environment.pyton'.",
        "Did you mean environment.python?",
    ),
    "a variable that is none": (
        {"environment": {"variables": {"A=B": "x"}}},
        "environment.variables: 'A=B' is not a name with a text.",
        'Give environment.variables={"NAME": "text"}.',
    ),
    "a variable that could not be sent to a node": (
        {"environment": {"variables": {"A": "\ud800"}}},
        "environment.variables: 'A' is not a name with a text.",
        'Give environment.variables={"NAME": "text"}.',
    ),
    "a variable by which the pool finds its processes": (
        {"environment": {"variables": {"GPUPOOL_MARK": "x"}}},
        "The variable 'GPUPOOL_MARK' is the pool's own.",
        "Leave it out: the pool sets it.",
    ),
    "other GPUs by a variable": (
        {"environment": {"variables": {"CUDA_VISIBLE_DEVICES": "0,1"}}},
        "The variable 'CUDA_VISIBLE_DEVICES' is the pool's own.",
        None,
    ),
    "an option that is a banana": (
        {"options": {"device_memory_limit": "banana"}},
        "options.device_memory_limit='banana' is not an amount of memory.",
        None,
    ),
    **{
        f"where a worker is, by the option {name}": (
            {"options": {name: "x"}},
            f"There is no field 'options.{name}'.",
            None,
        )
        for name in (
            "protocol",
            "preload",
            "local_directory",
            "scheduler",
            "address",
            "host",
            "security",
            "dashboard_prefix",
            "worker_class",
            "environment",
        )
    },
    "no object": ([1], "The body is not a JSON object: [1].", ""),
    "no object within": ({"environment": 5}, "environment=5 is not an object.", None),
}


@pytest.mark.parametrize(("body", "sentence", "advice"), BAD.values(), ids=BAD)
def test_a_bad_request_gets_one_sentence_and_what_to_do(body, sentence, advice):
    (no,) = refused(body)
    assert no.sentence == sentence
    assert advice is None or no.advice == advice


def test_whatever_can_be_asked_for_over_http_can_be_said_in_a_line_and_in_python():
    assert set(REQUEST) - {"environment"} <= {each.name for each in commands.REQUEST}
    assert set(REQUEST) == set(RequestOptions.__annotations__)


def test_the_options_are_those_that_a_worker_s_host_passes_on_to_dask_cuda():
    assert set(OPTIONS) == {*host.OPTIONS, "threads_per_worker"}


def test_what_was_asked_of_dask_cuda_reaches_the_node_by_its_own_name():
    asked = {
        "options": {"device_memory_limit": "0.5", "rmm_async": "true"},
        "environment": {"working_directory": "/tmp"},
    }
    assert options(parsed(**asked)) == {
        "device_memory_limit": 0.5,
        "rmm_async": True,
        "environment": {"working_directory": "/tmp"},
    }


def test_everything_that_is_wrong_is_said_at_once_each_with_its_field():
    wrong = refused({"gpus": 0, "vram": "x", "nonsense": 1, "environment": {"python": ""}})
    assert [each.field for each in wrong] == ["gpus", "vram", "nonsense", "environment.python"]
    assert wrong[0].reason is Reason.BAD_REQUEST


def test_a_field_that_resembles_nothing_is_answered_with_all_there_are():
    (no,) = refused({"zzzzzz": 1})
    assert no.advice == f"There are: {', '.join(sorted(REQUEST))}."


def test_what_is_shown_of_a_long_value_is_short():
    (no,) = refused({"gpus": "x" * 100_000})
    assert no.sentence == f"'{'x' * 36}…' is not a number of GPUs."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.from_regex(r"-?[0-9]{0,8}\.?[0-9]{0,4} ?[a-zA-Z]{0,4}( ?[0-9]+[a-z]{1,3})?", fullmatch=True)
KNOWN = [*REQUEST, "unknown", *fields.__dict__]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KNOWN), JSON | WORDS, max_size=5) | JSON)
def test_whatever_is_sent_becomes_a_request_or_sentences_and_never_an_error(body):
    request, wrong = parse_request(body, ASKER)
    assert (request is None) == bool(wrong)
    if request:
        assert 1 <= request.count <= fields.MOST
        assert 0 <= request.milli <= 1000
        assert all(
            type(getattr(request, name)) is int for name in ("vram", "cpus", "time_limit", "idle_timeout")
        )
        json.loads(request.options)
    for no in wrong:
        assert no.sentence.isprintable()


@settings(max_examples=300, deadline=None)
@given(JSON | WORDS)
def test_every_reader_of_every_table_answers_or_says_what_is_wrong(value):
    for table in (REQUEST, CHANGE, PROJECT):
        for field in table.values():
            try:
                field.read(value)
            except fields.Wrong:
                continue


# -------------------------------------------------------------------------------------- changes, projects


CHANGES = {
    "more time": ({"extend": "1h"}, ("extend", HOUR)),
    "still needed": ({"keep": True}, ("keep", True)),
    "another size": ({"gpus": "3"}, ("gpus", 3)),
    "others": ({"share": ["ben", "cleo"]}, ("share", ("ben", "cleo"))),
    "nobody else": ({"share": []}, ("share", ())),
}


@pytest.mark.parametrize(("body", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_lease_is_one_thing(body, expected):
    assert parse_change(body) == (*expected, [])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "A change of a lease is one thing at a time."),
        ({"gpus": None}, "gpus without a value changes nothing."),
        ({"extend": "1h", "keep": True}, "A change of a lease is one thing at a time, not extend, keep."),
        ({"keep": False}, "keep=false changes nothing."),
        ({"gpus": 0.5}, "gpus=0.5 is not a whole number of GPUs."),
        ({"extend": "-1h"}, "'-1h' is no time at all."),
        ({"shrink": 1}, "There is no field 'shrink'."),
        (None, "The body is not a JSON object: None."),
    ],
)
def test_a_change_that_is_none_gets_one_sentence(body, sentence):
    _, _, (no,) = parse_change(body)
    assert no.sentence == sentence


def test_a_tree_of_projects_is_read_into_thousandths_and_milliseconds():
    said, wrong = parse_config(
        {
            "projects": [
                {
                    "name": "lab",
                    "quota": 8,
                    "limit": {"H100-80GB": 4, "*": 6.5, "cpus": 1.5, "memory": "64GB"},
                    "max_time": "2d",
                },
                {
                    "name": "vision",
                    "parent": "lab",
                    "weight": 3,
                    "tier": 1,
                    "members": ["ann"],
                    "users": [{"name": "ann", "quota": {"*": 0.5}, "weight": 2}],
                    "default_time": 0,
                },
            ]
        }
    )
    assert wrong == []
    assert said["projects"] == (
        Project(
            name="lab",
            quota=(("*", 8000),),
            limit=(("*", 6500), ("H100-80GB", 4000), ("cpus", 1500), ("memory", 64 * 10**9)),
            max_time=48 * HOUR,
        ),
        Project(
            name="vision",
            parent="lab",
            weight=3,
            tier=1,
            members=("ann",),
            users=(UserShare(name="ann", quota=(("*", 500),), weight=2),),
        ),
    )


@pytest.mark.parametrize(
    ("body", "sentence", "field"),
    [
        ({"projects": []}, "projects is not a list of 1 to 10000 projects.", "projects"),
        ({}, "Neither projects nor defaults are given.", ""),
        (
            {"defaults": {"grace": "soon"}},
            "'soon' is not a length of time.",
            "defaults.grace",
        ),
        (
            {"defaults": {"time_limit": "3d", "max_time": "2d"}},
            "A time limit of 72 h for all is more than the 48 h that may be asked for.",
            "defaults.time_limit",
        ),
        ({"defaults": {"graze": 1}}, "There is no field 'defaults.graze'.", "defaults.graze"),
        (
            {"defaults": {"model_weights": {"T4": 0}}},
            "A weight=0 is not a whole number from 1 to 1000000.",
            "defaults.model_weights",
        ),
        ({"projects": [{"quota": 1}]}, "{'quota': 1} has no name.", "projects[0]"),
        ({"projects": [{"name": "a/b"}]}, "'a/b' cannot be the name of a project.", "projects[0]"),
        (
            {"projects": [{"name": "a"}, {"name": "b", "quota": "x"}]},
            "quota='x' is not GPUs by model.",
            "projects[1]",
        ),
        (
            {"projects": [{"name": "a", "quota": {"*": -1}}]},
            "quota: -1 is not a number of GPUs.",
            "projects[0]",
        ),
        (
            {"projects": [{"name": "a", "quota": {"cpus": 4}}]},
            "quota: cpus of the host cannot be guaranteed.",
            "projects[0]",
        ),
        ({"projects": [{"name": "a", "users": [{"nam": "x"}]}]}, "There is no field 'nam'.", "projects[0]"),
        (
            {"projects": [{"name": "a", "weight": 0}]},
            "weight=0 is not a whole number from 1 to 1000000.",
            "projects[0]",
        ),
    ],
)
def test_a_project_that_is_wrong_is_named_by_its_place(body, sentence, field):
    said, (no,) = parse_config(body)
    assert said == {}
    assert (no.sentence, no.field) == (sentence, field)


def test_each_default_of_the_pool_can_be_set_and_those_not_named_are_as_built_in():
    assert list(DEFAULTS) == [each.name for each in dataclasses.fields(Defaults)]
    numbers = {
        **dict.fromkeys(DEFAULTS, "3h"),
        "idle_warnings": 1,
        "reservations": 2,
        "ageing_most": 3,
        "passing": False,
        "idle_timeout": "never",
        "model_weights": {"T4": 16, "H100-80GB": 90},
    }
    said, wrong = parse_config({"defaults": numbers})
    assert wrong == []
    found = said["defaults"]
    assert (found.half_life, found.grace, found.idle_timeout, found.passing) == (
        3 * HOUR,
        3 * HOUR,
        -1,
        False,
    )
    assert found.model_weights == (("H100-80GB", 90), ("T4", 16))
    assert parse_config({"defaults": {"grace": 0}})[0] == {"defaults": Defaults(grace=0)}
