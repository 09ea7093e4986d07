import os
import sys

import pytest
import torch
import torch.distributed as dist

from runtime import device
from runtime.device import (
    NVIDIA_DRIVER,
    device_name,
    memory_gib,
    peak_memory_gib,
    select_device,
    synchronize,
)
from runtime.errors import is_out_of_memory
from runtime.precision import select_dtype

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA GPU")
no_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA GPU")


@no_cuda
def test_select_device_is_what_there_is_and_names_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # containers see the driver of their host
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert select_device("auto").type == (accelerator.type if accelerator else "cpu")
    assert select_device("cpu", local_rank=5) == CPU
    with pytest.raises(ValueError, match=r"--device cuda is not available here: use .*cpu"):
        select_device("cuda")


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((8, 9), False)])
def test_gpu_that_torch_has_no_kernels_for_is_refused(monkeypatch, capability, refused):
    known = {"is_available": True, "device_count": 1, "get_device_name": "V100"}
    known |= {"get_device_capability": capability, "get_arch_list": ["sm_75", "sm_90a", "sm_120"]}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    if not refused:
        assert select_device("auto") == torch.device("cuda", 0)
        return
    with pytest.raises(ValueError, match=r"no kernels for V100 \(sm_70\): .* or use --device cpu"):
        select_device("auto")


@no_cuda
@pytest.mark.skipif(NVIDIA_DRIVER.exists(), reason="this machine has a driver of its own")
@pytest.mark.skipif(os.name != "posix", reason="needs an executable without a suffix")
def test_driver_that_torch_cannot_use_is_refused_with_the_remedy(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for name in ("auto", "cuda"):
        said = "has an NVIDIA driver, but torch .* or use --device cpu"
        with pytest.raises(ValueError, match=said):
            select_device(name)
    assert select_device("cpu") == CPU
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert select_device("auto") == CPU


@needs_cuda
def test_gpu_has_a_name_a_dtype_and_memory_and_is_waited_for():
    count, device = torch.cuda.device_count(), torch.device("cuda")
    assert [select_device("auto", rank).index for rank in range(count)] == list(range(count))
    with pytest.raises(ValueError, match=f"--nproc_per_node={count}"):
        select_device("cuda", count)
    major, _ = torch.cuda.get_device_capability()
    expected = torch.bfloat16 if major >= 8 else torch.float16  # Ampere brought bfloat16
    assert select_dtype("auto", device) == expected
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_has_the_memory_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "OWN_CGROUPS", tmp_path / "none")
    with open("/proc/meminfo") as file:
        total_kib = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    assert memory_gib(CPU) == pytest.approx(total_kib / 2**20, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs control groups")
@pytest.mark.parametrize(
    ("own", "files"),
    [  # version 2 in a container; in a job, whose parent has the limit; version 1
        ("0::/", {"memory.max": "1048576"}),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "1048576"}),
        (
            "9:cpu:/a\n3:hugetlb,memory:/docker/1",
            {
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/docker/1/memory.limit_in_bytes": "1048576",
            },
        ),
    ],
)
def test_cpu_has_the_memory_of_its_container(own, files, monkeypatch, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(device, "CGROUPS", tmp_path)
    monkeypatch.setattr(device, "OWN_CGROUPS", tmp_path / "own")
    assert memory_gib(CPU) == 2**20 / 2**30


@pytest.mark.skipif(os.name != "posix", reason="needs the resource usage of POSIX")
def test_peak_memory_gib_grows_with_what_is_used_and_does_not_shrink():
    before = peak_memory_gib(CPU)
    block = b"x" * int(before * 2**30 + 2**27)  # 128 MiB more than ever before
    during = peak_memory_gib(CPU)
    del block
    assert during >= before + 0.1
    assert peak_memory_gib(CPU) >= during


NCCL_ERROR = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"
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


def test_is_out_of_memory_knows_every_librarys_message_from_other_errors():
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(2**52)
    for error in (too_much.value, *OUT_OF_MEMORY_ERRORS):
        assert is_out_of_memory(error), error
    gone = dist.DistBackendError(NCCL_ERROR + "socketProgress: Connection closed by remote peer")
    for error in (RuntimeError("shapes cannot be multiplied"), gone, OSError("out of memory")):
        assert not is_out_of_memory(error), error
