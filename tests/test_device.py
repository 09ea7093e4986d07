import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from forked import assert_refused

from runtime.device import (
    NVIDIA_DRIVER,
    attention_of_any_shape,
    compile_error,
    compiler_problem,
    device_name,
    is_out_of_memory,
    memory_gib,
    peak_memory_gib,
    select_device,
    select_dtype,
    synchronize,
)

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA GPU")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def hide_driver(monkeypatch):
    """Of a GPU that torch cannot use: containers without one see the driver of their host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_select_device_auto_is_the_best_that_torch_reports(monkeypatch):
    if not HAS_CUDA:
        hide_driver(monkeypatch)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert select_device("auto").type == (accelerator.type if accelerator else "cpu")
    assert select_device("cpu", local_rank=5) == CPU


@pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA GPU")
def test_select_device_that_is_missing_names_those_that_are_there(monkeypatch):
    hide_driver(monkeypatch)
    with pytest.raises(ValueError, match=r"--device cuda is not available here; available: .*cpu"):
        select_device("cuda")


@pytest.mark.skipif(HAS_CUDA, reason="torch can use this machine's GPU")
@pytest.mark.skipif(NVIDIA_DRIVER.exists(), reason="this machine has a driver of its own")
@pytest.mark.skipif(os.name != "posix", reason="an nvidia-smi of two lines of shell")
def test_driver_that_torch_cannot_use_is_refused_with_the_remedy(commands, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 535.104.05\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    model = "--model=./no-such-model"
    shown = {"PATH": path, "CUDA_VISIBLE_DEVICES": "0"}
    refused = commands.run("sample", model, **shown)
    assert_refused(refused, "has an NVIDIA driver 535.104.05, and torch", "or give --device cpu")
    assert_refused(commands.run("sample", model, "--device=cuda", **shown), "--device cpu")
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert_refused(commands.run("sample", model, **shown), "has an NVIDIA driver, and torch")
    on_purpose = [((), {"CUDA_VISIBLE_DEVICES": hidden}) for hidden in ("", "-1", "NoDevFiles")]
    for flags, environment in (*on_purpose, (("--device=cpu",), {})):
        done = commands.run("sample", model, *flags, **(shown | environment))
        assert_refused(done, "no-such-model does not exist")


@needs_cuda
def test_select_device_gives_each_local_rank_its_gpu_and_refuses_one_too_many():
    count = torch.cuda.device_count()
    assert [select_device("auto", rank).index for rank in range(count)] == list(range(count))
    with pytest.raises(ValueError, match=f"--nproc_per_node={count}"):
        select_device("cuda", count)


@linux_only
def test_select_dtype_auto_on_a_cpu_follows_the_hardware():
    with open("/proc/cpuinfo") as file:
        flags = {word for line in file if line.startswith("flags") for word in line.split()}
    native = bool(flags & {"avx512_bf16", "amx_bf16"})
    assert select_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert select_dtype("float16", CPU) == torch.float16


@needs_cuda
def test_select_dtype_auto_on_a_gpu_follows_its_generation():
    major, _ = torch.cuda.get_device_capability()
    expected = torch.bfloat16 if major >= 8 else torch.float16  # Ampere brought bfloat16
    assert select_dtype("auto", torch.device("cuda")) == expected


@needs_cuda
def test_gpu_has_a_name_and_memory_and_is_waited_for():
    device = torch.device("cuda")
    assert device_name(device) == torch.cuda.get_device_properties(0).name
    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_gib(device)
    x = torch.randn(2**13, 2**13, device=device)  # 0.25 GiB
    assert before + 0.24 < peak_memory_gib(device) < memory_gib(device)
    for _ in range(50):
        y = x @ x
    event = torch.cuda.Event()
    event.record()
    synchronize(device)
    assert event.query()
    assert y.isfinite().all()


def test_compiler_problem_without_a_compiler_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "compiler" in compiler_problem(CPU)
    assert "MPS" in compiler_problem(torch.device("mps"))


def test_compile_error_is_none_of_a_mistake_in_the_model():
    def wrong_shapes(x):
        return x @ torch.ones(3, 3)

    with pytest.raises(RuntimeError) as raised:
        torch.compile(wrong_shapes, backend="eager")(torch.ones(2, 2))
    assert compile_error(raised.value) is None
    with pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: print(x), backend="eager", fullgraph=True)(torch.ones(2, 2))
    assert "delete its cache" in compile_error(raised.value)


@pytest.mark.skipif(os.name != "posix", reason="a compiler of two lines of shell")
def test_compile_failure_finds_a_compiler_that_is_broken(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    code = (
        "import torch\nfrom runtime import device\ncpu = torch.device('cpu')\n"
        "print(device.compiler_problem(cpu), '|', device.compile_failure(cpu))"
    )
    environment = os.environ | {
        "CXX": str(broken),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    output = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=ROOT, env=environment
    )
    problem, failure = output.strip().split(" | ")
    assert problem == "None"
    assert failure != "None"
    assert "\n" not in failure


@linux_only
def test_memory_gib_on_a_cpu_is_the_machines():
    with open("/proc/meminfo") as file:
        total_kib = int(next(line for line in file if line.startswith("MemTotal")).split()[1])

    assert memory_gib(CPU) == pytest.approx(total_kib / 2**20, rel=0.01)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no resident-size peak")
def test_peak_memory_gib_grows_with_what_is_used_and_does_not_shrink():
    before = peak_memory_gib(CPU)
    block = b"x" * int(before * 2**30 + 2**27)  # 128 MiB more than ever before
    during = peak_memory_gib(CPU)
    del block

    assert during >= before + 0.1
    assert peak_memory_gib(CPU) >= during


FAULTS = """
import ctypes, resource, sys, torch
from runtime import device
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # huge pages would spare most faults, too
if sys.argv[1] == "tuned":
    device.tune_malloc()
def use():
    for _ in range(4):
        torch.empty(2**26, dtype=torch.uint8).fill_(1)
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@linux_only
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="may be another malloc")
def test_tune_malloc_spares_the_page_faults_of_large_tensors(commands, tmp_path):
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    default, tuned = (int(commands.run(script, how).stdout) for how in ("default", "tuned"))

    assert default > 1000  # 4 tensors of 16,384 pages
    assert tuned < default / 10


def test_is_out_of_memory_knows_torchs_error_from_others():
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(2**52)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)

    assert is_out_of_memory(too_much.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(other.value)


NCCL_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled \
cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""
OUT_OF_MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)"),
    dist.DistBackendError(NCCL_ERROR + "Cuda failure 2 'out of memory'"),
    dist.DistBackendError(NCCL_ERROR + "Failed to CUDA calloc 6291456 bytes"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY_ERRORS, ids=lambda error: str(error)[-30:])
def test_is_out_of_memory_knows_every_librarys_message(error):
    assert is_out_of_memory(error)


def test_is_out_of_memory_is_no_lost_process_and_no_error_of_a_file():
    gone = NCCL_ERROR + "socketProgress: Connection closed by remote peer"
    assert not is_out_of_memory(dist.DistBackendError(gone))
    assert not is_out_of_memory(OSError("out of memory"))


def test_attention_of_any_shape_leaves_cudnn_out_and_everything_else_as_it_was():
    q = torch.randn(2, 3, 16, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, q, q, is_causal=True)
    with attention_of_any_shape():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.equal(attend(q, q, q, is_causal=True), expected)
    assert torch.backends.cuda.cudnn_sdp_enabled()
