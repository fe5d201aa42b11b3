"""What an exception of a task says of the GPU, the process and the program.

Rule 1: an exception is a suspicion, never a verdict: only `health` judges a GPU, from the driver's words.
Rule 2: the table is read from top to bottom and the first row that matches names the fault.
Rule 3: a plain word such as "memory" matches nothing; a row needs a name or a phrase of CUDA's or NVML's own,
        since a task may fail with any text at all.
Rule 4: running out of GPU memory is the program's business. Such a process goes on, and nothing is condemned.

Not its business: holding a task back, restarting a worker (both `lease`), judging a device (`health`).
"""

from __future__ import annotations

import re
from enum import StrEnum

from jupyter_gpupool.core.model import Verdict


class Fault(StrEnum):
    """Whose fault a task's exception looks like."""

    HARDWARE = "hardware"  # the GPU is suspected: hold the error until the node's verdict
    POISONED = "poisoned"  # the process's CUDA context is unusable: hold, then restart the worker in any case
    MEMORY = "memory"  # out of GPU memory: the program's, passed on
    MONITOR = "monitor"  # NVML could not be asked: says nothing of the GPU, passed on
    PROGRAM = "program"  # CUDA was called wrongly: passed on
    NONE = "none"  # not a CUDA or NVML error


#: (fault, why, phrases); lower-case regular expressions, matched as whole words within "ExceptionType: text".
FAULTS: tuple[tuple[Fault, str, tuple[str, ...]], ...] = (
    (
        Fault.HARDWARE,
        "the driver or CUDA says that the GPU itself has failed",
        (
            r"nvmlerror_(gpuislost|resetrequired)",
            r"gpu_is_lost|gpu is lost|(gpu has )?fallen off the bus",
            r"(nvml_error_)?reset_required|gpu requires reset",
            r"cudaerror(eccuncorrectable|nvlinkuncorrectable|hardwarestackerror|contained)",
            r"cuda_error_(ecc_uncorrectable|nvlink_uncorrectable|hardware_stack_error|contained)",
            r"uncorrectable (ecc|nvlink) error",
            r"cudaerror(devicesunavailable|nodevice)|cuda_error_(device_unavailable|no_device)",
            r"cuda-capable device\(s\) is/are busy or unavailable|no cuda-capable device is detected",
            r"cudaapierror: \[(46|100|214|220|714|721)\]",
        ),
    ),
    (
        Fault.MEMORY,
        "the program asked for more GPU memory than there is",
        (
            r"cudaerrormemoryallocation|cuda_error_out_of_memory|outofmemoryerror",
            r"cuda( error:)? out of memory|out_of_memory: (cuda|rmm)|maximum pool size exceeded",
            r"(cublas|cudnn|cusolver|cusparse)_status_alloc_failed",
            r"cudaapierror: \[2\]",
        ),
    ),
    (
        Fault.POISONED,
        "every later call of this process on the GPU fails or lies",
        (
            r"cudaerror(illegaladdress|launchfailure|illegalinstruction|misalignedaddress|invalidaddressspace)",
            r"cuda_error_(illegal_address|launch_failed|illegal_instruction|misaligned_address)",
            r"cudaerror(invalidpc|assert|launchtimeout|contextisdestroyed|mpsclientterminated)",
            r"cuda_error_(invalid_address_space|invalid_pc|assert|launch_timeout|context_is_destroyed)",
            r"cudaerror(tensormemoryleak|externaldevice|unknown)",
            r"cuda_error_(mps_client_terminated|tensor_memory_leak|external_device|unknown)",
            r"illegal memory access was encountered|unspecified launch failure",
            r"illegal instruction was encountered|device-side assert triggered",
            r"the launch timed out and was terminated",
            r"cuda error: (misaligned address|invalid program counter|unknown error)",
            r"(cublas|cudnn|cusolver|cusparse)_status_(not_initialized|execution_failed|internal_error)",
            r"fatal[_ ]cuda[_ ]error",
            r"cudaapierror: \[(70[029]|710|71[5-9]|80[05]|999)\]",
        ),
    ),
    (
        Fault.MONITOR,
        "NVML could not be asked; that says nothing of the GPU",
        (r"nvmlerror(_\w+)?", r"nvml error|nvml_error_\w+", r"driver/library version mismatch"),
    ),
    (
        Fault.PROGRAM,
        "CUDA was called wrongly, or has no code for this GPU",
        (
            r"cudaerror\w+|cuda_error_\w+|cuda error|cuda(runtime|driver|api)error",
            r"(cublas|cudnn|cusolver|cusparse)_status_\w+",
        ),
    ),
)

_PATTERNS = tuple(
    (fault, re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)")) for fault, _, phrases in FAULTS
)

#: Faults for which a task's error is held back until the node's verdict is known.
SUSPECT = (Fault.HARDWARE, Fault.POISONED)
#: How far along the causes of an exception to look; a chain may be a circle.
_DEPTH = 10
#: Characters that are looked at from either end of a text; a program may raise any amount of it.
_ENDS = 10_000


def classify_error(error: BaseException | str) -> Fault:
    """Name the fault that an exception, or its text, looks like.

    Args:
        error: An exception, which is followed along `__cause__` and `__context__` (Dask's shuffles wrap the
            first one), or a text such as "RuntimeError: CUDA error: out of memory".

    >>> classify_error("cudaErrorIllegalAddress: an illegal memory access was encountered")
    <Fault.POISONED: 'poisoned'>
    >>> classify_error(ValueError("no such column"))
    <Fault.NONE: 'none'>
    """
    texts = [error] if isinstance(error, str) else _chain(error)
    found = [_classify_text(text) for text in texts]
    order = [fault for fault, _, _ in FAULTS]
    return min((fault for fault in found if fault is not Fault.NONE), key=order.index, default=Fault.NONE)


def is_hardware(fault: Fault, verdict: Verdict) -> bool:
    """Say whether a held-back task error is the GPU's: then the task runs elsewhere and nobody sees an error.

    Args:
        fault: What the task's exception looks like.
        verdict: What the node has judged of the device since the exception.

    >>> is_hardware(Fault.POISONED, Verdict.GONE), is_hardware(Fault.POISONED, Verdict.RESTART_WORKER)
    (True, False)
    """
    if fault not in SUSPECT:
        return False
    worst = (Verdict.EVACUATE, Verdict.GONE)
    return verdict in worst or (fault is Fault.HARDWARE and verdict is Verdict.RETIRE_SOON)


def runs_again(fault: Fault, *, hardware: bool) -> bool:
    """Say whether a held-back task runs again although its device stays: the hardware failed, and only once.

    A contained memory error costs one process; neither the program nor the whole GPU is to blame.

    Args:
        fault: What the task's exception looks like.
        hardware: The driver has announced a hardware error on the device in the same moment. Without that, a
            program that raises such errors by itself would run for ever.
    """
    return fault is Fault.HARDWARE and hardware


def needs_restart(fault: Fault) -> bool:
    """Say whether the process must not take another task, whatever becomes of the GPU."""
    return fault in SUSPECT


def _chain(error: BaseException) -> list[str]:
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < _DEPTH:
        texts.append(f"{type(link).__name__}: {_text(link)}")
        link = link.__cause__ or link.__context__
    return texts


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it is the program's own class, and its name still counts
        return ""


def _classify_text(text: str) -> Fault:
    if len(text) > 2 * _ENDS:
        text = f"{text[:_ENDS]}\n{text[-_ENDS:]}"
    text = text.lower()
    return next((fault for fault, pattern in _PATTERNS if pattern.search(text)), Fault.NONE)
