"""Every XID that the published sources know, through a real judge: alone, repeated, on several GPUs."""

from __future__ import annotations

import pytest

from jupyter_gpupool.core.health import Judge, Thresholds
from jupyter_gpupool.core.history import CONDEMNED, rank
from jupyter_gpupool.core.model import MINUTE, NvmlEvent
from jupyter_gpupool.core.xids import CLASSES, EVENTS, LAST_CODE, XIDS, XidClass, lookup, lookup_event

from .judging import Bench

_NOTE = ("fine", "fine", "fine")
_SECONDARY = ("fine", "watch", "watch")
_WARNS = ("watch", "watch", "watch")
_PROGRAM = ("restart_worker", "retire_soon", "restart_worker")
_LINK = ("watch", "retire_soon", "watch")
_RESET = ("evacuate", "evacuate", "evacuate")
_GONE = ("gone", "gone", "gone")

#: code -> (once, repeated on one GPU under several programs, under one program on several GPUs), row by row.
EXPECTED = {
    1: _WARNS,
    2: _WARNS,
    3: _WARNS,
    4: _WARNS,
    5: _WARNS,
    6: _WARNS,
    7: _WARNS,
    8: _PROGRAM,
    9: _WARNS,
    10: _WARNS,
    11: _PROGRAM,
    12: _WARNS,
    13: _PROGRAM,
    14: _WARNS,
    15: _WARNS,
    16: _WARNS,
    17: _WARNS,
    18: _WARNS,
    19: _WARNS,
    20: _WARNS,
    21: _WARNS,
    22: _WARNS,
    23: _WARNS,
    24: _WARNS,
    25: _PROGRAM,
    26: _WARNS,
    27: _WARNS,
    28: _WARNS,
    29: _WARNS,
    30: _WARNS,
    31: _PROGRAM,
    32: _WARNS,
    33: _WARNS,
    34: _WARNS,
    35: _WARNS,
    36: _WARNS,
    37: _NOTE,
    38: _WARNS,
    39: _PROGRAM,
    40: _PROGRAM,
    41: _PROGRAM,
    42: _WARNS,
    43: _PROGRAM,
    44: _WARNS,
    45: _SECONDARY,
    46: _RESET,
    47: _WARNS,
    48: _RESET,
    49: _WARNS,
    50: _WARNS,
    51: _WARNS,
    52: _WARNS,
    53: _WARNS,
    54: _WARNS,
    55: _WARNS,
    56: _WARNS,
    57: _WARNS,
    58: _WARNS,
    59: _WARNS,
    60: _WARNS,
    61: _WARNS,
    62: _RESET,
    63: _NOTE,
    64: _RESET,
    65: _WARNS,
    66: _NOTE,
    67: _NOTE,
    68: _WARNS,
    69: _WARNS,
    70: _PROGRAM,
    71: _PROGRAM,
    72: _PROGRAM,
    73: _WARNS,
    74: _LINK,
    75: _PROGRAM,
    76: _PROGRAM,
    77: _PROGRAM,
    78: _WARNS,
    79: _GONE,
    80: _WARNS,
    81: _WARNS,
    82: _PROGRAM,
    83: _PROGRAM,
    84: _PROGRAM,
    85: _PROGRAM,
    86: _PROGRAM,
    87: _WARNS,
    88: _PROGRAM,
    89: _PROGRAM,
    90: _WARNS,
    91: _WARNS,
    92: _NOTE,
    93: _NOTE,
    94: ("restart_worker", "retire_soon", "retire_soon"),  # no program makes contained memory errors
    95: _RESET,
    96: _PROGRAM,
    97: _PROGRAM,
    98: _PROGRAM,
    99: _PROGRAM,
    100: _PROGRAM,
    101: _PROGRAM,
    102: _PROGRAM,
    103: _PROGRAM,
    104: _PROGRAM,
    105: _PROGRAM,
    106: _NOTE,
    107: _NOTE,
    108: _WARNS,
    109: _WARNS,
    110: _RESET,
    111: _WARNS,
    112: _WARNS,
    113: _WARNS,
    114: _WARNS,
    115: _WARNS,
    116: _WARNS,
    117: _WARNS,
    118: _WARNS,
    119: _RESET,
    120: _RESET,
    121: _WARNS,
    122: _WARNS,
    123: _WARNS,
    124: _WARNS,
    125: _WARNS,
    126: _PROGRAM,
    127: _PROGRAM,
    128: _PROGRAM,
    129: _PROGRAM,
    130: _PROGRAM,
    131: _PROGRAM,
    132: _PROGRAM,
    133: _PROGRAM,
    134: _PROGRAM,
    135: _PROGRAM,
    136: _RESET,
    137: _WARNS,
    138: _WARNS,
    139: _PROGRAM,
    140: _RESET,
    141: _NOTE,
    142: _WARNS,
    143: _RESET,
    144: _WARNS,
    145: _WARNS,
    146: _WARNS,
    147: _WARNS,
    148: _WARNS,
    149: _WARNS,
    150: _WARNS,
    151: _RESET,
    152: _NOTE,
    153: _NOTE,
    154: _NOTE,
    155: _RESET,
    156: _WARNS,
    157: _NOTE,
    158: _RESET,
    159: _WARNS,
    160: _WARNS,
    161: _NOTE,
    162: _WARNS,
    163: _WARNS,
    164: _WARNS,
    165: _WARNS,
    166: _WARNS,
    167: _WARNS,
    168: _WARNS,
    169: _WARNS,
    170: _WARNS,
    171: _WARNS,
    172: _WARNS,
    173: _WARNS,
    999: _WARNS,  # what NVML gives for an XID that it does not know itself
}


@pytest.mark.parametrize("code", EXPECTED)
def test_one_xid_gives_the_verdict_of_the_table(code):
    bench = Bench()
    bench.xid(code, by=["ana"])
    assert bench.worst() == EXPECTED[code][0]


@pytest.mark.parametrize("code", EXPECTED)
def test_an_xid_repeated_on_one_gpu_gives_the_verdict_of_the_table(code):
    bench = Bench()
    for turn in range(5):
        bench.xid(code, by=[("ana", "ben")[turn % 2]])
        bench.wait(MINUTE)
    assert bench.worst(0) == EXPECTED[code][1]


@pytest.mark.parametrize("code", EXPECTED)
def test_an_xid_on_several_gpus_under_one_program_gives_the_verdict_of_the_table(code):
    bench = Bench()
    for _ in range(5):
        for gpu in range(3):
            bench.xid(code, gpu, by=["ana"])
        bench.wait(MINUTE)
    assert [bench.worst(gpu) for gpu in range(4)] == [EXPECTED[code][2]] * 3 + ["fine"]


def test_every_code_of_the_sources_has_a_row():
    """Codes 1 to 173 are all in the product's table, and all are tested."""
    assert list(XIDS) == list(range(1, LAST_CODE + 1)) == [code for code in EXPECTED if code < 999]


def test_the_verdicts_of_a_class_are_what_its_rules_do():
    """What docs/health.md says of a class is what the tests above have seen of its codes."""
    for code, expected in EXPECTED.items():
        row = CLASSES[lookup(code).kind]
        assert (row.single, row.repeated, row.spread) == expected, code


@pytest.mark.parametrize("kind", list(XidClass))
def test_an_administrator_may_put_any_code_into_any_class(kind):
    limits = Thresholds.parse({"xids": {"13": kind.value, "79": kind.value, "109": kind.value}})
    for code in (13, 79, 109):
        bench = Bench(limits)
        bench.xid(code, by=["ana"])
        assert bench.worst() == CLASSES[kind].single


def test_a_class_that_condemns_at_once_is_only_for_codes_on_which_the_sources_agree():
    """The codes that some sources ignore and others condemn are all in a class that does not condemn."""
    disputed = [32, 38, 44, 60, 68, 69, 80, 109, 121, *range(144, 151), 160, 1, 56, 57, 58, 61, 65, 73, 81]
    assert not [code for code in disputed if CLASSES[lookup(code).kind].single in CONDEMNED]
    assert not [code for code in disputed if CLASSES[lookup(code).kind].repeated in CONDEMNED]


def test_no_class_gets_milder_when_it_repeats():
    assert all(rank(row.repeated) >= rank(row.single) for row in CLASSES.values())


@pytest.mark.parametrize("kind", EVENTS)
def test_other_nvml_events_are_judged_like_the_xid_that_says_the_same(kind):
    bench = Bench()
    bench.announce(kind)
    assert bench.worst() == CLASSES[EVENTS[kind].kind].single


def test_an_nvml_event_that_nobody_knows_is_a_note():
    row = lookup_event(NvmlEvent(device="GPU-0", now=0, kind="clock"))
    assert row.kind is XidClass.INFO


def test_the_driver_s_two_words_for_one_fault_are_one_incident():
    """A double-bit error comes as an XID and as an NVML event; it is judged, and counted, once."""
    bench = Bench()
    bench.xid(48)
    bench.announce("ecc_double")
    assert bench.told() == ["evacuate"]
    assert len(bench.judge.histories[bench.name(0)].incidents) == 1


def test_test_messages_of_the_driver_do_nothing():
    """XID 106 and 107 exist for testing the path of a message."""
    judge = Judge("node-1")
    assert judge.event(NvmlEvent(device="GPU-0", now=0, kind="xid", xid=106)).changes == ()
