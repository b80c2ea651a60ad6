"""Detection of runs that failed for lack of GPU memory."""

import pytest

from stoker.fit.oom import is_out_of_memory, is_silent

OUT_OF_MEMORY = {
    "torch": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "23.69 GiB of which 1.2 GiB is free. If reserved memory is large try setting this to avoid fragmentation.",
    "torch 2.0": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total)",
    "torch 1": "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "torch, from the driver": "RuntimeError: CUDA error: out of memory",
    "torch on AMD": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "torch on Intel": "RuntimeError: XPU out of memory. Tried to allocate 512 MiB",
    "cuBLAS": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN": "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "NCCL": "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'",
    "JAX": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "JAX, the allocator": "RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB on device ordinal 0",
    "TensorFlow": "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:",
    "TensorFlow, a tensor": "OOM when allocating tensor with shape[64] on /device:GPU:0 by allocator GPU_0_bfc",
    "CuPy": "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes",
    "Paddle": "ResourceExhaustedError: \n\nOut of memory error on GPU 0. Cannot allocate 2GB",
    "the runtime": "GPUassert: out of memory main.cu 12",
    "the runtime's name for it": "terminate called: parallel_for failed: cudaErrorMemoryAllocation: out of memory",
    "the driver's name for it": "numba.cuda.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    "PyCUDA": "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
    "RAPIDS": "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /include/rmm/mr.hpp:70",
    "llama.cpp": "alloc_buffer: allocating 900 MiB on device 0: cudaMalloc failed: out of memory",
    "HIP": "hipErrorOutOfMemory: out of memory",
    "a number, torch": "RuntimeError: CUDA runtime error (2) : 显存不足 at /src/THCStorage.cu:66",
    "a number, C++": "CUDA error 2 at train.cu:120",
    "a number, a wrapper": "failed: cudaError(2)",
}
SOMETHING_ELSE = {
    "no output": "",
    "another error": "KeyError: 'batch_size'",
    "a wrong shape": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x3 and 4x8)",
    "a denial": "checking for out of memory errors: none",
    "a denial of the GPU's": "No CUDA out of memory errors so far",
    "a count of none": "CUDA out of memory errors: 0",
    "a full disk": "ResourceExhaustedError: out/model.ckpt; No space left on device [Op:SaveV2]",
    "the host's memory, TensorFlow": "OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator cpu",
    "a quota": "RESOURCE_EXHAUSTED: Quota exceeded for requests per minute",
    "the host's memory": "numpy.MemoryError: Unable to allocate 3.00 GiB for an array with shape (9, 9)",
    "what cuDNN says of wrong strides": "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous input?",
    "no GPU": "RuntimeError: No CUDA GPUs are available",
    "another number": "CUDA error 700 at train.cu:120",
    "a version": "CUDA error 2.1 is not known",
    "another CUDA error": "RuntimeError: CUDA error: an illegal memory access was encountered",
}


@pytest.mark.parametrize("line", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_oom_messages_of_frameworks_are_recognised(line: str) -> None:
    output = f"step 1: loss 4.1\nTraceback (most recent call last):\n  {line}\nERROR: a child failed\n"

    said = is_out_of_memory(output, 1)

    assert said is not None
    assert said in line


@pytest.mark.parametrize("line", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_other_failures_are_not_oom(line: str) -> None:
    assert is_out_of_memory(f"step 1: loss 4.1\n{line}\n", 1) is None


def test_unexplained_failure_is_distinguished_from_an_explained_one() -> None:
    assert is_silent("step 1: loss 4.2\nstep 2: loss 4.1\n")
    assert not is_silent("Traceback (most recent call last):\n  File x\nKeyError: 'lr'\n")


@pytest.mark.parametrize("code", [0, 137, -9])
def test_success_or_a_kill_is_not_oom(code: int) -> None:
    assert is_out_of_memory("torch.OutOfMemoryError: CUDA out of memory.\n", code) is None


@pytest.mark.parametrize("code", [1, 134, -6, None])
def test_any_other_end_is_judged_by_the_output(code: int | None) -> None:
    assert is_out_of_memory("torch.OutOfMemoryError: CUDA out of memory.\n", code) is not None


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear for other inputs.",
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        "RuntimeError: Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
    ],
)
def test_cudnn_error_counts_as_oom_where_a_smaller_batch_ran(line: str) -> None:
    assert is_out_of_memory(line, 1) is None
    assert is_out_of_memory(line, 1, smaller_ran=True) == line


@pytest.mark.parametrize(
    "line",
    [
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3.00 GiB for an array with shape (9, 9)",
        "MemoryError",
        "RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_host_oom_is_not_gpu_oom(line: str) -> None:
    assert is_out_of_memory(line, 1) is None


def test_early_output_does_not_count() -> None:
    early = "CUDA out of memory, trying again\n" + "".join(f"step {step}\n" for step in range(1000))

    assert is_out_of_memory(early + "KeyError: 'lr'\n", 1) is None


def test_oom_line_is_found_among_redrawn_lines() -> None:
    assert is_out_of_memory(" 10%|#  | 1/10\rRuntimeError: CUDA error: out of memory\r", 1) is not None
