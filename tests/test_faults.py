"""A task's exception is named by CUDA's and NVML's own words, and by nothing else."""

from __future__ import annotations

import pytest

from jupyter_gpupool.core.faults import (
    FAULTS,
    SUSPECT,
    Fault,
    classify_error,
    is_hardware,
    needs_restart,
    runs_again,
)
from jupyter_gpupool.core.model import Verdict
from jupyter_gpupool.driver.simulated import CUDARuntimeError
from jupyter_gpupool.driver.simulated.cuda import ERRORS

#: What libraries really write, and whose fault it looks like.
TEXTS = {
    # CuPy
    "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered": Fault.POISONED,
    "CUDARuntimeError: cudaErrorLaunchFailure: unspecified launch failure": Fault.POISONED,
    "CUDARuntimeError: cudaErrorECCUncorrectable: uncorrectable ECC error encountered": Fault.HARDWARE,
    "CUDARuntimeError: cudaErrorMemoryAllocation: out of memory": Fault.MEMORY,
    "CUDARuntimeError: cudaErrorInvalidValue: invalid argument": Fault.PROGRAM,
    "OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes": Fault.MEMORY,
    "CUDADriverError: CUDA_ERROR_INVALID_HANDLE: invalid resource handle": Fault.PROGRAM,
    # PyTorch
    "RuntimeError: CUDA error: an illegal memory access was encountered": Fault.POISONED,
    "RuntimeError: CUDA error: device-side assert triggered": Fault.POISONED,
    "RuntimeError: CUDA error: misaligned address": Fault.POISONED,
    "RuntimeError: CUDA error: invalid configuration argument": Fault.PROGRAM,
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution": Fault.HARDWARE,
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB": Fault.MEMORY,
    "RuntimeError: No CUDA GPUs are available": Fault.NONE,
    "RuntimeError: no CUDA-capable device is detected": Fault.HARDWARE,
    # Numba
    "CudaAPIError: [700] Call to cuMemcpyDtoH results in UNKNOWN_CUDA_ERROR": Fault.POISONED,
    "CudaAPIError: [719] Call to cuCtxSynchronize results in CUDA_ERROR_LAUNCH_FAILED": Fault.POISONED,
    "CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY": Fault.MEMORY,
    "CudaAPIError: [1] Call to cuLaunchKernel results in CUDA_ERROR_INVALID_VALUE": Fault.PROGRAM,
    # RAPIDS
    "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: cudaErrorMemoryAllocation": Fault.MEMORY,
    "MemoryError: std::bad_alloc: out_of_memory: RMM failure at: Maximum pool size exceeded": Fault.MEMORY,
    "RuntimeError: Fatal CUDA error encountered at: /x.cu:9: 700 cudaErrorIllegalAddress": Fault.POISONED,
    # libraries on a dead context
    "RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate": Fault.POISONED,
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": Fault.POISONED,
    "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED": Fault.MEMORY,
    "RuntimeError: CUBLAS_STATUS_INVALID_VALUE": Fault.PROGRAM,
    # NVML
    "NVMLError_GpuIsLost: GPU is lost": Fault.HARDWARE,
    "NVMLError_ResetRequired: GPU requires reset": Fault.HARDWARE,
    "NVMLError_Unknown: Unknown Error": Fault.MONITOR,
    "NVMLError_NotSupported: Not Supported": Fault.MONITOR,
    "NVMLError_LibRmVersionMismatch: Driver/library version mismatch": Fault.MONITOR,
    # programs that only talk of such things
    "ValueError: unknown column 'illegal_address'": Fault.NONE,
    "KeyError: 'memory'": Fault.NONE,
    "MemoryError: ": Fault.NONE,
    "ValueError: the uncorrectable ECC errors table is empty": Fault.NONE,
    "RuntimeError: the launch failed": Fault.NONE,
    "OSError: [Errno 28] No space left on device": Fault.NONE,
    "ZeroDivisionError: division by zero": Fault.NONE,
    "": Fault.NONE,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_named_by_the_table(text):
    assert classify_error(text) is TEXTS[text]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_of_the_simulated_cuda_is_recognised(name):
    assert classify_error(CUDARuntimeError(name)) is not Fault.NONE


def test_the_cause_of_a_wrapped_error_counts():
    """A shuffle raises its own error from the first one."""
    error = RuntimeError("P2P shuffling failed during transfer phase")
    error.__cause__ = CUDARuntimeError("cudaErrorECCUncorrectable")
    assert classify_error(error) is Fault.HARDWARE


def test_the_error_during_whose_handling_another_came_counts():
    error = KeyError("gone")
    error.__context__ = CUDARuntimeError("cudaErrorIllegalAddress")
    assert classify_error(error) is Fault.POISONED


def test_the_worst_along_the_causes_counts():
    error = RuntimeError("CUDA error: invalid argument")
    error.__cause__ = CUDARuntimeError("cudaErrorECCUncorrectable")
    assert classify_error(error) is Fault.HARDWARE


def test_a_circle_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify_error(first) is Fault.NONE


def test_an_exception_whose_text_cannot_be_had_is_named_by_its_type():
    class cudaErrorIllegalAddress(RuntimeError):  # noqa: N801, N818 - CUDA's name
        def __str__(self):
            raise ValueError("no text")

    assert classify_error(cudaErrorIllegalAddress()) is Fault.POISONED


def test_a_text_without_end_is_read_from_both_its_ends():
    long = "x " * 10**6
    assert classify_error(f"cudaErrorIllegalAddress {long}") is Fault.POISONED
    assert classify_error(f"{long} cudaErrorIllegalAddress") is Fault.POISONED
    assert classify_error(f"{long} cudaErrorIllegalAddress {long}") is Fault.NONE


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("verdict", Verdict)
def test_a_task_runs_elsewhere_only_where_error_and_verdict_both_speak_of_the_gpu(fault, verdict):
    """A program's own error stays its error, whatever state the GPU is in."""
    expected = {
        (Fault.HARDWARE, Verdict.RETIRE_SOON),
        (Fault.HARDWARE, Verdict.EVACUATE),
        (Fault.HARDWARE, Verdict.GONE),
        (Fault.POISONED, Verdict.EVACUATE),
        (Fault.POISONED, Verdict.GONE),
    }
    assert is_hardware(fault, verdict) is ((fault, verdict) in expected)


@pytest.mark.parametrize("fault", Fault)
def test_a_task_runs_again_on_the_same_device_only_where_the_driver_speaks_of_hardware_too(fault):
    """A program that raises such errors by itself does not run for ever."""
    assert runs_again(fault, hardware=True) is (fault is Fault.HARDWARE)
    assert not runs_again(fault, hardware=False)


def test_a_process_is_restarted_for_what_sticks_to_it_and_for_nothing_else():
    assert {fault for fault in Fault if needs_restart(fault)} == set(SUSPECT)


def test_every_row_says_why():
    assert all(why and phrases for _, why, phrases in FAULTS)
